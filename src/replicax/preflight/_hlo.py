"""The optimized program as text -> its collectives and its arithmetic, loops counted through."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")

_HEADER = re.compile(r"(?P<entry>ENTRY )?%(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(?P<name>[\w.\-]+) = (?P<rest>.*)")
_OPCODE = re.compile(r"(?P<opcode>[a-z][\w\-]*)\((?P<tail>.*)")
_SHAPE = re.compile(r"\b(?P<dtype>pred|bf16|[sufc]\d+\w*)\[(?P<sizes>[\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations)=\{?(?P<names>%[^}\s]*)")
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_BODY = re.compile(r"body=%([\w.\-]+)")
_CONSTANT = re.compile(r"[su]\d+\[\]\S* constant\((\d+)\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind and group size in one step.

    Attributes:
        kind: Such as ``all-reduce``.
        count: How often a step does it.
        bytes: What one device puts in or takes out, whichever is more, in one step.
        group: How many devices take part in each.
    """

    kind: str
    count: int
    bytes: int
    group: int

    @property
    def wire_bytes(self) -> float:
        """What one device sends, with the best known algorithm: a ring."""
        share = (self.group - 1) / self.group if self.group > 1 else 0.0
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(
            self.kind, share
        )


@dataclass
class _Computation:
    instructions: list[_Instruction] = field(default_factory=list)
    shapes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Instruction:
    shape: str
    opcode: str
    tail: str


class Hlo:
    """A program, as XLA prints it."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, _Computation] = {}
        self._entry = ""
        self._read(text)

    def collectives(self) -> list[Collective]:
        """The collectives of one step, largest first."""
        counts: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        for name, times in self._executions().items():
            computation = self._computations[name]
            for one in computation.instructions:
                kind = one.opcode.removesuffix("-start")
                if kind in KINDS:
                    found = counts[kind, _group_size(one.tail)]
                    found[0] += times
                    found[1] += times * _moved_bytes(one, computation)
        made = [Collective(k, n, size, group) for (k, group), (n, size) in counts.items()]
        return sorted(made, key=lambda c: -c.bytes)

    def flops(self) -> float:
        """Multiplications and additions of matrix products and convolutions, in one step."""
        total = 0.0
        for name, times in self._executions().items():
            computation = self._computations[name]
            for one in computation.instructions:
                if one.opcode in ("convolution", "dot"):
                    total += times * _product_flops(one, computation)
        return total

    def _read(self, text: str) -> None:
        current = _Computation()
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self._computations.setdefault(header["name"], _Computation())
                self._entry = header["name"] if header["entry"] else self._entry
            elif (match := _INSTRUCTION.match(line)) and (parts := _taken_apart(match["rest"])):
                current.instructions.append(parts)
                current.shapes[match["name"]] = parts.shape

    def _executions(self) -> dict[str, int]:
        """How often each computation runs in one step."""
        times: dict[str, int] = defaultdict(int)

        def visit(name: str, count: int) -> None:
            times[name] += count
            for one in self._computations[name].instructions:
                trips = self._trips(one) if one.opcode == "while" else 1
                for called in _called(one):
                    if called in self._computations:
                        visit(called, count * trips)

        if self._entry:
            visit(self._entry, 1)
        return dict(times)

    def _trips(self, loop: _Instruction) -> int:
        """How often a loop turns: as XLA noted it, else the one bound that its condition has."""
        if known := _TRIPS.search(loop.tail):
            return int(known[1])
        condition = _CONDITION.search(loop.tail)
        bounds = set(self._constants(condition[1])) if condition else set()
        return bounds.pop() if len(bounds) == 1 else 1

    def _constants(self, name: str) -> Iterator[int]:
        for one in self._computations.get(name, _Computation()).instructions:
            if one.opcode == "constant" and (
                found := _CONSTANT.match(f"{one.shape} constant({one.tail}")
            ):
                yield int(found[1])
            for called in _called(one):
                yield from self._constants(called)


def _taken_apart(rest: str) -> _Instruction | None:
    """``f32[2]{0} add(%a, %b), ...`` as its shape, its operation and what follows."""
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    match = _OPCODE.match(rest[end:].lstrip())
    return _Instruction(rest[:end], match["opcode"], match["tail"]) if match else None


def _closing(text: str) -> int:
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)


def _called(one: _Instruction) -> list[str]:
    names = [n for match in _CALLED.finditer(one.tail) for n in _NAME.findall(match["names"])]
    # What combines the values of a collective or a reduction is no work of its own.
    return names if one.opcode in ("fusion", "while", "call", "conditional", "async-start") else []


def _moved_bytes(one: _Instruction, computation: _Computation) -> int:
    sizes = [_bytes(shape) for shape in _elements(one)]
    # A start gives what went in and what comes out, as a pair.
    out = max(sizes, default=0) if one.opcode.endswith("-start") else sum(sizes)
    operands = _NAME.findall(one.tail[: _closing(f"({one.tail}")])
    return max(out, sum(_bytes(computation.shapes.get(name, "")) for name in operands))


def _elements(one: _Instruction) -> list[str]:
    return [match[0] for match in _SHAPE.finditer(one.shape)]


def _bytes(shape: str) -> int:
    return sum(math.prod(_sizes(m)) * _item_bytes(m["dtype"]) for m in _SHAPE.finditer(shape))


def _item_bytes(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


def _sizes(match: re.Match[str]) -> list[int]:
    return [int(n) for n in match["sizes"].split(",") if n]


def _group_size(tail: str) -> int:
    """How many devices one collective joins, from any of the ways in which XLA writes it."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", tail):
        return listed[1].count(",") + 1
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", tail):
        return int(tiled[1])
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", tail):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", meshed[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", meshed[2]))
    return 2 if "source_target_pairs" in tail else 1


def _product_flops(one: _Instruction, computation: _Computation) -> float:
    out = _SHAPE.search(one.shape)
    names = _NAME.findall(one.tail[: _closing(f"({one.tail}")])
    operands = [_SHAPE.search(computation.shapes.get(name, "")) for name in names[:2]]
    if out is None or len(operands) < 2 or operands[0] is None or operands[1] is None:
        return 0.0
    left, right = _sizes(operands[0]), _sizes(operands[1])
    if labels := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.tail):
        return _convolution_flops(one.tail, labels, left, right, _sizes(out))
    contracted = re.search(r"rhs_contracting_dims=\{([\d,]*)\}", one.tail)
    axes = [int(n) for n in contracted[1].split(",") if n] if contracted else []
    return 2.0 * math.prod(_sizes(out)) * math.prod(right[axis] for axis in axes)


def _convolution_flops(
    tail: str, labels: re.Match[str], left: list[int], right: list[int], out: list[int]
) -> float:
    """Products of a convolution, without those with padding.

    The TPU compiler writes every matrix product as a convolution, and a batch of them as one whose
    windows meet padding nearly everywhere.
    """
    of_left, of_right, of_out = labels.groups()
    total = 2.0 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    window = _window(tail)
    for axis in sorted(filter(str.isdigit, of_out)):
        sizes = left[of_left.index(axis)], right[of_right.index(axis)], out[of_out.index(axis)]
        total *= _meetings(*sizes, {k: v[int(axis)] for k, v in window.items()})
    return total


def _window(tail: str) -> dict[str, list[int]]:
    """Stride, padding and dilations of a convolution's window, by axis; only those that are set."""
    text = re.search(r"window=\{([^}]*)\}", tail)
    found: dict[str, list[int]] = {}
    for part in text[1].split() if text else ():
        key, _, value = part.partition("=")
        found[key] = [int(v.split("_")[0]) for v in value.split("x")]
    return found


def _meetings(size: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """How many pairs of an output and a kernel position on one axis meet an input."""
    stride, low = window.get("stride", 1), window.get("pad", 0)
    stretch, reach = window.get("lhs_dilate", 1), window.get("rhs_dilate", 1)
    spread = (size - 1) * stretch
    count = 0
    for k in range(kernel):
        # Output o and kernel position k meet the input at stride * o + start, if there is one.
        start = k * reach - low
        count += sum(
            1
            for at in range(start, start + stride * out, stride)
            if 0 <= at <= spread and at % stretch == 0
        )
    return count
