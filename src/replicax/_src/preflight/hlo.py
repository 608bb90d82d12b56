"""A parser for optimized HLO text, and an evaluator for the integers that control its loops."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from replicax._src.base.origin import is_in, is_library

_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)")
_OPCODE = re.compile(r"(?P<opcode>[a-z][\w\-]*)\((?P<tail>.*)")
_SHAPE = re.compile(
    r"\b(?P<dtype>pred|bf16|[sufc]\d+\w*)\[(?P<sizes>[\d,]*)\]"
    r"(?:\{[^}]*?(?:S\((?P<space>\d+)\))?\})?"
)
_ROW = re.compile(r'(?P<id>\d+) (?:"(?P<text>.*)"|\{(?P<fields>.*)\})')
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_SHIM = str(Path(__file__).parent)  # frames of this package are at the bottom of every stack
_CALLED = re.compile(
    r"(?:calls|body|to_apply|branch_computations|true_computation|false_computation)="
    r"(?P<names>\{[^}]*\}|%[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")
_MESH = re.compile(
    r"replica_groups=@?\w*\[(?P<axes>[^\]]*=[^\]]*)\]"
    r"(?:, device_ids=\((?P<ids>\[[\d,]+\]T\([\d,]+\)|[\d,]+)\))? ?\{(?P<joined>[^}]*)\}"
)
# Backend configs of kernels span several lines; join them to the line of the instruction.
_CONTINUED = re.compile(r'\n(?="|\}[^\n])')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_MAX_ITERATIONS = 1 << 18
_CALLERS = ("fusion", "while", "call", "conditional", "async-start")


@dataclass(frozen=True)
class Shape:
    """The dtype and dimensions of an array."""

    dtype: str
    sizes: tuple[int, ...]
    space: int = 0  # the memory space: 0 is HBM

    @property
    def bytes(self) -> int:
        """The size in bytes, without padding."""
        bits = re.search(r"\d+", self.dtype)
        return -(-math.prod(self.sizes) * (int(bits[0]) if bits else 8) // 8)

    @property
    def is_counter(self) -> bool:
        """Whether it is a scalar integer or boolean, as used for loop control."""
        return not self.sizes and self.dtype[0] in "sup"


@dataclass(frozen=True)
class Instruction:
    """An instruction: ``%name = shape opcode(operands), tail``."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    tail: str
    inner: str

    @property
    def bytes(self) -> int:
        """The size of its result in bytes."""
        return sum(shape.bytes for shape in self.shapes)

    def result_bytes(self, *, far: bool) -> int:
        """Return the size of its result in bytes; with ``far``, the part in HBM only."""
        return sum(s.bytes for s in self.shapes if not (far and s.space))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs; the combiners of reductions are not included."""
        if self.opcode not in _CALLERS:
            return ()
        found = _CALLED.finditer(self.tail)
        return tuple(n for match in found for n in _NAME.findall(match["names"]))

    @cached_property
    def condition(self) -> str:
        """The name of a loop's condition computation."""
        found = re.search(r"condition=%([\w.\-]+)", self.tail)
        return found[1] if found else ""

    def number(self, key: str) -> int | None:
        """Return the integer attribute ``key``, or None."""
        found = re.search(rf"\b{key}=(\d+)", self.tail)
        return int(found[1]) if found else None


@dataclass
class Computation:
    """A sequence of instructions; the root is its result."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @cached_property
    def parameters(self) -> list[str]:
        """The names of its parameters, in order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return [i.name for i in sorted(found, key=lambda i: int(i.inner))]

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that use each result."""
        found: dict[str, list[Instruction]] = {}
        for one in self.instructions.values():
            for name in one.operands:
                found.setdefault(name, []).append(one)
        return found

    def operands(self, one: Instruction) -> list[Instruction]:
        """Return the operands of an instruction."""
        found = (self.instructions.get(name) for name in one.operands)
        return [i for i in found if i is not None]


class Hlo:
    """A program, parsed from XLA's text format."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.head = text.partition("\n")[0]
        self._tables: dict[str, dict[int, Any]] = {name: {} for name in _TABLES}
        current, table = Computation(), ""
        for line in _CONTINUED.sub(" ", text).splitlines():
            table = line if line in _TABLES else table if line else ""
            if table:
                self._add_row(table, line)
            elif header := _HEADER.match(line):
                current = self.computations.setdefault(header["name"], Computation())
                self.entry = header["name"] if header["entry"] else self.entry
            elif (match := _INSTRUCTION.match(line)) and (one := _parse_instruction(match)):
                current.instructions[one.name] = one
                current.root = one.name if match["root"] else current.root

    @property
    def num_devices(self) -> int:
        """The number of devices that run it."""
        found = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", self.head)
        return math.prod(map(int, found))

    def _add_row(self, table: str, line: str) -> None:
        """Add a row to a table of source locations."""
        row = _ROW.fullmatch(line)
        if row is None:
            return
        pairs = re.findall(r"(\w+)=(\d+)", row["fields"] or "")
        entry = row["text"] if row["text"] is not None else {k: int(v) for k, v in pairs}
        self._tables[table][int(row["id"])] = entry

    def source(self, one: Instruction) -> str:
        """Return the innermost ``file:line`` of an instruction's stack outside of libraries."""
        frame, first = one.number("stack_frame_id"), ""
        while frame and frame in self._tables["StackFrames"]:
            row = self._tables["StackFrames"][frame]
            place = self._tables["FileLocations"].get(row.get("file_location_id"), {})
            file = self._tables["FileNames"].get(place.get("file_name_id"), "")
            line = f"{file}:{place.get('line', '?')}"
            if file and not is_library(file):
                return line
            first = first or ("" if is_in(file, _SHIM) else line)
            # XLA prints parent ids plus one, with 1 for none.
            frame = min(row.get("parent_frame_id", 1), frame) - 1
        return first

    def turns(self, loop: Instruction, values: Values) -> list[list[Any]] | None:
        """Return the integers in a loop's state at the start of each iteration.

        Args:
            loop: A ``while``.
            values: The values of the computation that contains it.

        Returns:
            One state per iteration, with unknown values as None; None if the number of iterations
            is unknown.
        """
        known = _TRIPS.search(loop.tail)
        start = values.of(loop.operands[0])
        state = start if isinstance(start, list) else [None]
        turns: list[list[Any]] = []
        body, condition = loop.called[0], loop.condition
        while len(turns) < _MAX_ITERATIONS:
            goes_on = self.result(condition, [state])
            if goes_on is None:
                break
            if not goes_on:
                return turns
            turns.append(state)
            state = self.result(body, [state])
            if not isinstance(state, list):
                break
        return [[None]] * int(known[1]) if known else None

    def result(self, name: str, arguments: Sequence[Any]) -> Any:
        """Evaluate a computation's integers; return its result, None where unknown."""
        if name not in self.computations:
            return None
        values = Values(self, self.computations[name], arguments)
        return values.of(self.computations[name].root)


class Values:
    """The integers in one execution of a computation: ints, lists of them, None if unknown."""

    def __init__(self, hlo: Hlo, computation: Computation, arguments: Sequence[Any]) -> None:
        self._hlo, self._computation = hlo, computation
        self._known: dict[str, Any] = {}
        self._arguments = arguments

    def of(self, name: str) -> Any:
        """Return the value of an instruction."""
        if name not in self._known:
            one = self._computation.instructions.get(name)
            self._known[name] = None if one is None else self._evaluate(one)
        return self._known[name]

    def _evaluate(self, one: Instruction) -> Any:
        """Evaluate an instruction; None if its value is unknown."""
        if not any(shape.is_counter for shape in one.shapes):
            return None
        match one.opcode:
            case "parameter":
                at = int(one.inner)
                return self._arguments[at] if at < len(self._arguments) else None
            case "tuple":
                return [self.of(name) for name in one.operands]
            case "get-tuple-element":
                whole, index = self.of(one.operands[0]), one.number("index")
                if not isinstance(whole, list) or index is None or index >= len(whole):
                    return None
                return whole[index]
            case "copy" | "optimization-barrier":
                return self.of(one.operands[0])
            case "fusion" | "call":
                return self._hlo.result(one.called[0], [self.of(x) for x in one.operands])
        return self._evaluate_scalar(one) if one.shapes[0].is_counter else None

    def _evaluate_scalar(self, one: Instruction) -> Any:
        """Evaluate arithmetic on scalars."""
        if one.opcode == "constant":
            return {"true": 1, "false": 0}.get(one.inner) if one.inner.isalpha() else int(one.inner)
        make = _ARITHMETIC.get(one.opcode) or _COMPARISONS.get(_direction(one))
        operands = [self.of(name) for name in one.operands]
        if make is None or any(not isinstance(x, int) for x in operands):
            return None
        if one.opcode in ("divide", "remainder") and not operands[1]:
            return None
        return _wrap(make(*operands), one.shapes[0].dtype)


def _direction(one: Instruction) -> str:
    found = re.search(r"direction=(\w+)", one.tail) if one.opcode == "compare" else None
    return found[1] if found else ""


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: int(a / b) if abs(a) < 1 << 50 else a // b,
    "remainder": math.fmod,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "minimum": min,
    "maximum": max,
    "negate": lambda a: -a,
    "select": lambda which, a, b: a if which else b,
    "clamp": lambda low, x, high: min(max(low, x), high),
    "convert": lambda a: a,
    "bitcast": lambda a: a,
    "reshape": lambda a: a,
}


def _wrap(value: Any, dtype: str) -> int:
    """Wrap an integer to the width of ``dtype``."""
    if dtype == "pred":
        return int(bool(value))
    bits = int(re.sub(r"\D", "", dtype))
    low: int = int(value) & ((1 << bits) - 1)
    return low - (1 << bits) if dtype[0] == "s" and low >> (bits - 1) else low


def _parse_instruction(match: re.Match[str]) -> Instruction | None:
    """Parse ``f32[2]{0} add(%a, %b), ...``; return None if it is not an instruction."""
    rest = match["rest"]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    found = _OPCODE.match(rest[end:].lstrip())
    if found is None:
        return None
    tail = found["tail"]
    close = _closing(f"({tail}") - 1
    inner, names = tail[:close], tuple(_NAME.findall(tail[:close]))
    made = shapes(rest[:end]), found["opcode"], names
    return Instruction(match["name"], *made, tail=tail[close:], inner=inner)


def shapes(text: str) -> tuple[Shape, ...]:
    """Return the shapes of all arrays in a text."""
    return tuple(
        Shape(m["dtype"], tuple(int(n) for n in m["sizes"].split(",") if n), int(m["space"] or 0))
        for m in _SHAPE.finditer(text)
    )


def _closing(text: str) -> int:
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)


def groups_of(tail: str) -> list[list[int]]:
    """Return the groups of devices of a collective, from any of XLA's notations."""
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", tail):
        return _parse_groups(pairs[1])
    if listed := re.search(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", tail):
        return _parse_groups(listed[1])
    tiled = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", tail)
    if tiled:
        sizes = numbers(tiled[3])
        order = numbers(tiled[4]) if tiled[4] else list(range(len(sizes)))
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
        groups: list[list[int]] = ids.reshape(int(tiled[1]), int(tiled[2])).tolist()
        return groups
    meshed = _MESH.search(tail)
    return _mesh_groups(meshed) if meshed else []


def _mesh_groups(found: re.Match[str]) -> list[list[int]]:
    """Return the groups along mesh axes, or along parts of axes: ``'b':(2)4``."""
    joined = re.findall(r"['\"]?([\w.]+)['\"]?(?::\((\d+)\)(\d+))?", found["joined"])
    sizes, inner = list[int](), list[int]()
    for name, size in re.findall(r"['\"]?([\w.]+)['\"]?=(\d+)", found["axes"]):
        parts = [(int(a or 1), int(a or 1) * int(n or size)) for x, a, n in joined if x == name]
        cuts = sorted({1, int(size), *(cut for part in parts for cut in part)})
        for start, end in itertools.pairwise(cuts):
            inner += [len(sizes)] if any(a <= start and end <= b for a, b in parts) else []
            sizes.append(end // start)
    outer = [i for i in range(len(sizes)) if i not in inner]
    ids = _device_ids(found["ids"], math.prod(sizes)).reshape(sizes).transpose([*outer, *inner])
    groups: list[list[int]] = ids.reshape(-1, math.prod(sizes[i] for i in inner)).tolist()
    return groups


def _device_ids(text: str | None, count: int) -> Any:
    """Return the device ids of a mesh: from ``[2,4]T(1,0)``, from a list, or in order."""
    if text and (turned := re.fullmatch(r"\[([\d,]+)\]T\(([\d,]+)\)", text)):
        return np.arange(count).reshape(numbers(turned[1])).transpose(numbers(turned[2]))
    return np.asarray(numbers(text)) if text else np.arange(count)


def _parse_groups(text: str) -> list[list[int]]:
    return [numbers(group) for group in re.findall(r"\{([\d,]*)\}", text)]


def numbers(text: str) -> list[int]:
    """Parse comma-separated integers."""
    return [int(n) for n in text.split(",") if n]
