"""The largest buffers of a device at its peak memory use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replicax._src.preflight.hlo import Computation, Hlo, Instruction

# Instructions whose result is an alias of an operand.
_ALIASES = ("bitcast", "get-tuple-element", "tuple", "optimization-barrier", "while", "conditional")
_PRODUCTS = ("dot", "convolution", "custom-call")  # these cannot reuse an operand's buffer
_UNCOUNTED = ("parameter", "constant", "after-all", "partition-id", "replica-id")


@dataclass(frozen=True)
class Buffer:
    """The memory of a device that one value takes.

    Attributes:
        bytes: Its size, without padding.
        what: The name of a variable or of an argument, or the operation that computes it, with its
            shape.
        source: The source line of the operation; empty for an argument.

    Example:
        >>> from replicax._src.preflight.memory import Buffer
        >>> Buffer(4096, "dot f32[32,32]", "train.py:12").bytes
        4096
    """

    bytes: int
    what: str
    source: str = ""


def largest(hlo: Hlo, names: Sequence[str], count: int = 10) -> tuple[Buffer, ...]:
    """Return the largest buffers at the peak of memory use, including arguments.

    Args:
        hlo: The program.
        names: The names of its inputs.
        count: The number of buffers to return.
    """
    entry = hlo.computations.get(hlo.entry)
    if entry is None:
        return ()
    arguments = [_argument(entry.instructions[p], names) for p in entry.parameters]
    _, live = _peak(hlo, entry, _aliased(hlo, entry))
    found = [*arguments, *(_temporary(hlo, one) for one in live)]
    return tuple(sorted(found, key=lambda b: -b.bytes)[:count])


def _argument(one: Instruction, names: Sequence[str]) -> Buffer:
    place = re.search(r'op_name="leaves\[(\d+)\]', one.tail)
    at = int(place[1]) if place else -1
    name = names[at] if 0 <= at < len(names) else f"input {one.inner}"
    return Buffer(_hbm_bytes(one), f"{name} {_format_shapes(one)}")


def _temporary(hlo: Hlo, one: Instruction) -> Buffer:
    named = re.search(r'op_name="([^"]*)"', one.tail)
    what = named[1].rsplit("/", 1)[-1] if named else one.opcode
    return Buffer(_hbm_bytes(one), f"{what} {_format_shapes(one)}", hlo.source(one))


def _format_shapes(one: Instruction) -> str:
    shapes = [f"{s.dtype}[{','.join(map(str, s.sizes))}]" for s in one.shapes]
    more = ", ..." if len(shapes) > 3 else ""
    return shapes[0] if len(shapes) == 1 else f"({', '.join(shapes[:3])}{more})"


def _aliased(hlo: Hlo, entry: Computation) -> set[str]:
    """Return the names of results that share a buffer with an argument."""
    root = entry.instructions.get(entry.root)
    places = [int(n) for n in re.findall(r"\{(\d+)\}: \(", hlo.head)]
    if root is None or root.opcode != "tuple":
        return {entry.root} if "input_output_alias" in hlo.head else set()
    return {root.operands[i] for i in places if i < len(root.operands)}


def _peak(
    hlo: Hlo, computation: Computation, in_place: Iterable[str] = ()
) -> tuple[int, list[Instruction]]:
    """Return the peak size of a computation's live values, and those values."""
    order = list(computation.instructions.values())
    made: dict[str, set[str]] = {}
    reusable: dict[str, set[str]] = {}
    last: dict[str, int] = {}
    for at, one in enumerate(order):
        aliased = set[str]().union(*(made.get(name, set()) for name in one.operands))
        is_same = one.opcode in _ALIASES or one.opcode.endswith(("-done", "-update"))
        made[one.name] = aliased if is_same else set() if one.opcode in _UNCOUNTED else {one.name}
        reusable[one.name] = set() if one.opcode in _PRODUCTS else aliased
        last.update(dict.fromkeys(aliased | made[one.name], at))
    last.update(dict.fromkeys(made.get(computation.root, set()), len(order)))
    uncounted = set[str]().union(*(made.get(name, set()) for name in in_place))
    return _scan_live(
        hlo, [(one, reusable[one.name], one.name not in uncounted) for one in order], last
    )


def _scan_live(
    hlo: Hlo, order: Sequence[tuple[Instruction, set[str], bool]], last: dict[str, int]
) -> tuple[int, list[Instruction]]:
    """Scan the instructions in order with their live values; return the peak and its values."""
    live: dict[str, Instruction] = {}
    size, most, then = 0, 0, list[Instruction]()
    for at, (one, reusable, is_counted) in enumerate(order):
        needed = _hbm_bytes(one) if is_counted and one.name in last else 0
        if needed:
            # Reuse the buffer of an operand of the same size that dies here, as XLA does.
            ending = (n for n in reusable if n in live and last[n] == at and n != one.name)
            old = next((n for n in ending if _hbm_bytes(live[n]) == needed), None)
            size += needed - (_hbm_bytes(live.pop(old)) if old else 0)
            live[one.name] = one
        insides = [_inner_peak(hlo, name) for name in _subcomputations(one)]
        inside, values = max(insides, key=lambda found: found[0], default=(0, []))
        if size + inside > most:
            most, then = size + inside, [*live.values(), *values]
        for name in [n for n in live if last[n] <= at]:
            size -= _hbm_bytes(live.pop(name))
    return most, then


def _subcomputations(one: Instruction) -> tuple[str, ...]:
    return one.called if one.opcode in ("while", "conditional", "call") else ()


def _inner_peak(hlo: Hlo, name: str) -> tuple[int, list[Instruction]]:
    """Return the peak of a computation that an instruction runs."""
    computation = hlo.computations.get(name)
    if computation is None:
        return 0, []
    # The values passed to the next iteration reuse the buffers of the loop state.
    return _peak(hlo, computation, [computation.root])


def _hbm_bytes(one: Instruction) -> int:
    """Return the bytes that a value takes in HBM."""
    shapes = one.shapes
    if one.opcode in ("copy-start", "slice-start"):
        shapes = shapes[:1] if one.opcode == "copy-start" else shapes[1:2]
    elif one.opcode.endswith("-start"):
        shapes = shapes[len(one.operands) :] or shapes
    return sum(shape.bytes for shape in shapes if shape.space == 0)
