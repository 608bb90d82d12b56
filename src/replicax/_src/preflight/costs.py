"""The cost of one step on a device: arithmetic, memory traffic and collectives, with loops."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replicax._src.preflight.hlo import Computation, Hlo, Instruction, Values, groups_of, numbers
from replicax._src.preflight.targets import Limits

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all"),
    *("ragged-all-to-all", "collective-broadcast", "send"),
)
_SLICES = ("dynamic-slice", "slice", "gather")
# Instructions without memory traffic: aliases, control flow, and halves of async pairs.
_NO_TRAFFIC = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "optimization-barrier", "while", "call", "conditional"),
    *("async-start", "async-update", "recv"),
)
_PRODUCTS = ("__cublas$gemm", "__cublas$lt$matmul", "__cudnn$conv")
# Custom calls without arithmetic: they allocate memory, or annotate the program.
_NO_FLOPS = (
    *("AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollective", "ConcatBitcast"),
    *("GatherScatterIndices", "Pin", "PrepareAsyncCall", "Sharding", "SliceId", "SPMD", "annotate"),
)
# Instructions that run computations, whose collectives are on a timeline of their own.
_NESTING = ("while", "conditional", "call")
_CHAIN = re.compile(r'chain_id="(\w+)"')
_COST_ESTIMATE = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
# Rough rates of a chip per second, to compare the branches of a conditional.
_FLOPS, _BYTES, _SENT = 2e14, 1e12, 1e11


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind and group size in one step.

    Attributes:
        kind: The HLO opcode, such as ``all-reduce``.
        count: The number per step.
        bytes: The larger of one device's input and output, in total per step.
        group: The number of devices in each.
        hosts: The number of hosts (for TPUs, slices) that a group spans, if links between them
            are slower than inside.
        source: The source line.
        asynchronous: The number of those that start and finish in different instructions.
        apart_seconds: The time of the operations between start and finish, in total of those that
            are asynchronous.
    """

    kind: str
    count: int
    bytes: int
    group: int
    hosts: int = 1
    source: str = ""
    asynchronous: int = 0
    apart_seconds: float = 0.0

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends with a ring algorithm."""
        share = (self.group - 1) / self.group if self.group > 1 else 0.0
        whole = {"all-reduce": 2 * share, "collective-permute": 1.0, "send": 1.0}
        return self.bytes * whole.get(self.kind, share)


@dataclass(frozen=True)
class Sent:
    """Totals over several collectives of one kind; `Collective` describes the fields."""

    count: int = 0
    bytes: int = 0
    asynchronous: int = 0
    apart_seconds: float = 0.0

    def plus(self, other: Sent, times: int = 1) -> Sent:
        """Return the sum with other collectives, which run `times` times."""
        return Sent(
            self.count + times * other.count,
            self.bytes + times * other.bytes,
            self.asynchronous + times * other.asynchronous,
            self.apart_seconds + times * other.apart_seconds,
        )


Key = tuple[str, int, int, str]


@dataclass
class Cost:
    """The cost of a computation, or of a part of it.

    Attributes:
        flops: Multiplications and additions of matmuls and convolutions.
        bytes: Memory traffic.
        bytes_once: The same with every loop body counted once, as XLA counts.
        far: The part of the traffic that goes to HBM.
        seconds: The sum over operations of the time of the arithmetic or of the HBM traffic,
            whichever is longer; without asynchronous copies and collectives.
        waiting: The time in which the device waits for collectives, if asynchronous ones run
            concurrently with the operations between their start and finish.
        collectives: The totals of the collectives, by kind, group size, hosts and source line.
        notes: Descriptions of costs that could not be counted, and how often they occurred.
    """

    flops: float = 0.0
    bytes: float = 0.0
    bytes_once: float = 0.0
    far: float = 0.0
    seconds: float = 0.0
    waiting: float = 0.0
    collectives: dict[Key, Sent] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Cost, times: int = 1) -> None:
        """Add another cost ``times`` times."""
        self.flops += times * other.flops
        self.bytes += times * other.bytes
        self.far += times * other.far
        self.seconds += times * other.seconds
        self.waiting += times * other.waiting
        self.bytes_once += other.bytes_once
        for key, sent in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, Sent()).plus(sent, times)
        self.notes.update(other.notes)

    @property
    def weight(self) -> float:
        """A rough time, to compare the branches of a conditional."""
        sent = sum(sent.bytes for sent in self.collectives.values())
        return self.flops / _FLOPS + self.bytes / _BYTES + sent / _SENT

    def merged(self, *, by_line: bool = False) -> list[Collective]:
        """Return the collectives of one step, largest first."""
        sums: dict[Key, Sent] = {}
        for (kind, group, hosts, line), sent in self.collectives.items():
            key = kind, group, hosts, line if by_line else ""
            sums[key] = sums.get(key, Sent()).plus(sent)
        made = [
            Collective(kind, c.count, c.bytes, group, hosts, line, c.asynchronous, c.apart_seconds)
            for (kind, group, hosts, line), c in sums.items()
        ]
        return sorted(made, key=lambda c: -c.bytes)


class _Timeline:
    """The clocks of one run of a computation: of its operations, and of the links.

    Collectives run one after the other on the links; an asynchronous one while operations run.

    Attributes:
        waiting: The time in which operations waited for collectives.
    """

    def __init__(self) -> None:
        self.waiting = 0.0
        self._now = self._worked = self._links_end = 0.0
        # Of each collective in progress: its key, its end, and the work done before.
        self._started: dict[str, tuple[Key, float, float]] = {}

    def work(self, seconds: float, waiting: float = 0.0) -> None:
        """Run an operation, in which the device works and waits for so long."""
        self._now += seconds + waiting
        self._worked += seconds

    def start(self, name: str, key: Key, seconds: float) -> None:
        """Start an asynchronous collective."""
        self._links_end = max(self._links_end, self._now) + seconds
        self._started[name] = key, self._links_end, self._worked

    def finish(self, name: str) -> tuple[Key, float] | None:
        """Wait for a collective; return its key and the work since its start, if known.

        It is not known if it was started in the iteration of a loop before.
        """
        if name not in self._started:
            return None
        key, end, worked = self._started.pop(name)
        self._wait_until(end)
        return key, self._worked - worked

    def block(self, seconds: float) -> None:
        """Run a collective during which no operation runs."""
        self._links_end = max(self._links_end, self._now) + seconds
        self._wait_until(self._links_end)

    def close(self) -> None:
        """Finish the collectives in progress: the next iteration of a loop needs the links too."""
        self._wait_until(self._links_end)

    def _wait_until(self, end: float) -> None:
        self.waiting += max(0.0, end - self._now)
        self._now = max(self._now, end)


class Costs:
    """A cost analysis of a program.

    Args:
        hlo: The program.
        near: The number of consecutive devices that fast links connect; 0 for all.
        chip: The peak rates of a device; None to leave out the times.
    """

    def __init__(self, hlo: Hlo, near: int = 0, chip: Limits | None = None) -> None:
        self._hlo, self._near = hlo, near
        self._chip = chip or Limits(math.inf, math.inf, math.inf)
        self._known: dict[tuple[str, str], Cost] = {}

    def of_step(self) -> Cost:
        """Return the cost of the program, which takes at least the time of all its HBM traffic."""
        cost = self._cost(self._hlo.entry, ()) if self._hlo.entry else Cost()
        cost.seconds = max(cost.seconds, cost.far / self._chip.hbm_bytes)
        return cost

    def _cost(self, name: str, arguments: Sequence[Any]) -> Cost:
        key = name, repr(arguments)
        if key not in self._known:
            computation = self._hlo.computations.get(name, Computation())
            values = Values(self._hlo, computation, arguments)
            total, timeline = Cost(), _Timeline()
            self._known[key] = total
            for one in computation.instructions.values():
                cost = self._instruction(one, computation, values)
                total.add(cost)
                self._run(one, cost, timeline, total)
            timeline.close()
            total.waiting += timeline.waiting
        return self._known[key]

    def _run(self, one: Instruction, cost: Cost, timeline: _Timeline, total: Cost) -> None:
        """Run an instruction on a timeline; record how far start and finish are apart."""
        begun, ended = self._begins(one), self._ends(one)
        if ended and (found := timeline.finish(ended)):
            key, apart = found
            total.collectives[key] = total.collectives[key].plus(Sent(apart_seconds=apart))
        sent = {} if one.opcode in _NESTING else cost.collectives
        on_links = [(key, self._link_seconds(key, each)) for key, each in sent.items()]
        for key, seconds in on_links if begun else ():
            timeline.start(begun, key, seconds)
        timeline.work(cost.seconds, cost.waiting)
        for _, seconds in () if begun else on_links:
            timeline.block(seconds)

    def _link_seconds(self, key: Key, sent: Sent) -> float:
        kind, group, hosts, _ = key
        wire = Collective(kind, sent.count, sent.bytes, group).wire_bytes
        return self._chip.seconds(wire, group, hosts)

    def _begins(self, one: Instruction) -> str:
        """Return the name of the collective that an instruction starts; empty if none."""
        if one.opcode == "fusion":
            return self._chain(one, "AsyncCollectiveStart")
        return one.name if one.opcode.endswith("-start") or one.opcode == "send" else ""

    def _ends(self, one: Instruction) -> str:
        """Return the name of the collective for which an instruction waits; empty if none."""
        if one.opcode == "fusion":
            return self._chain(one, "AsyncCollectiveDone")
        return one.operands[0] if one.opcode.endswith("-done") and one.operands else ""

    def _chain(self, fusion: Instruction, target: str) -> str:
        """Return the chain of collectives of a fusion that contains the custom call `target`."""
        for name in fusion.called:
            inside = self._hlo.computations.get(name, Computation()).instructions.values()
            found = [m[1] for i in inside if (m := _CHAIN.search(i.tail))]
            if found and any(_target(i) == target for i in inside):
                return f"chain {found[0]}"
        return ""

    def _instruction(self, one: Instruction, computation: Computation, values: Values) -> Cost:
        """Return the cost of one instruction."""
        match one.opcode:
            case "while":
                return self._loop(one, values)
            case "conditional":
                return self._branches(one, values)
            case "fusion":
                return self._fusion(one, computation)
            case "call" | "async-start":
                cost = Cost()
                for name in one.called:
                    cost.add(self._cost(name, [values.of(x) for x in one.operands]))
                return cost if one.opcode == "call" else _started(cost)
        return self._single(one, computation)

    def _fusion(self, one: Instruction, computation: Computation) -> Cost:
        cost = self._inside(one)
        cost.bytes = cost.bytes_once = self._fusion_bytes(one, computation)
        self._set_time(cost, self._fusion_bytes(one, computation, far=True))
        return cost

    def _set_time(self, cost: Cost, far: float) -> None:
        chip = self._chip
        cost.far, cost.seconds = far, max(cost.flops / chip.flops, far / chip.hbm_bytes)

    def _inside(self, fusion: Instruction) -> Cost:
        """Return the arithmetic of a fusion, whose intermediate values stay on the chip."""
        cost = Cost()
        for name in fusion.called:
            cost.add(self._cost(name, ()))
        cost.waiting = 0.0  # the collectives of a fusion are on the timeline of its caller
        if any(name.startswith("all-reduce-scatter") for name in fusion.called):
            # An all-reduce of which each device keeps a part runs as a reduce-scatter.
            line = self._hlo.source(fusion)
            cost.collectives = {
                (kind.replace("all-reduce", "reduce-scatter"), group, hosts, source or line): sent
                for (kind, group, hosts, source), sent in cost.collectives.items()
            }
        return cost

    def _loop(self, loop: Instruction, values: Values) -> Cost:
        """Return the cost of all iterations of a loop."""
        body, turns = loop.called[0], self._hlo.turns(loop, values)
        cost = Cost()
        if turns is None:
            cost.add(self._cost(body, ()))
            cost.notes["loop whose turns depend on data, counted once"] += 1
        elif not self._depends_on_arguments(body):
            cost.add(self._cost(body, ()), len(turns))
        else:
            for state in turns:
                cost.add(self._cost(body, [[x if isinstance(x, int) else None for x in state]]))
            cost.bytes_once = self._cost(body, ()).bytes_once
        return cost

    def _depends_on_arguments(self, name: str) -> bool:
        """Whether the cost of a computation depends on its arguments."""
        computation = self._hlo.computations.get(name, Computation())
        blind = Values(self._hlo, computation, ())
        return any(
            (i.opcode == "while" and self._hlo.turns(i, blind) is None)
            or (i.opcode != "fusion" and any(map(self._depends_on_arguments, i.called)))
            for i in computation.instructions.values()
        )

    def _branches(self, one: Instruction, values: Values) -> Cost:
        """Return the cost of the most expensive branch of a conditional."""
        found = [self._cost(name, ()) for name in one.called]
        cost = Cost()
        if found:
            cost.add(max(found, key=lambda c: c.weight))
            if len({(c.flops, c.bytes, str(c.collectives)) for c in found}) > 1:
                cost.notes["branch taken to be the costliest of its conditional"] += 1
        return cost

    def _single(self, one: Instruction, computation: Computation) -> Cost:
        """Return the cost of an instruction that calls no computation."""
        cost = Cost()
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS and _is_continued(one, computation):
            return cost
        if kind in KINDS:
            if re.search(r"replica_groups=(?!\{\})", one.tail) and not groups_of(one.tail):
                cost.notes[f"{kind} whose devices cannot be read, counted as over all"] += 1
            group, hosts = self._group(one)
            key = kind, group, hosts, self._hlo.source(one)
            moved = _moved_bytes(one, computation)
            cost.collectives[key] = Sent(1, moved, int(_is_asynchronous(one)))
        elif one.opcode == "custom-call":
            _count_custom(one, computation, cost)
        elif one.opcode in ("convolution", "dot"):
            cost.flops = _product_flops(one, computation)
        cost.bytes = cost.bytes_once = _traffic(one, computation)
        self._set_time(cost, min(cost.bytes, _plain_bytes(one, computation, far=True)))
        if kind in KINDS or one.opcode.endswith("-start"):
            cost.seconds = 0.0
        return cost

    def _group(self, one: Instruction) -> tuple[int, int]:
        """Return the group size of a collective, and the number of hosts that a group spans."""
        if one.opcode == "send":
            return 2, 2
        members = groups_of(one.tail) or [list(range(self._hlo.num_devices))]
        near = self._near
        hosts = max(len({m // near for m in group}) for group in members) if near else 1
        return max(map(len, members)), hosts

    def _fusion_bytes(
        self, one: Instruction, computation: Computation, *, far: bool = False
    ) -> float:
        """Return the traffic of a fusion, or its HBM part; sliced operands count in part."""
        inside = self._hlo.computations.get(one.called[0]) if one.called else None
        if inside is None:
            return _plain_bytes(one, computation, far=far)
        given = zip(inside.parameters, computation.operands(one), strict=False)
        total = sum(
            _read_bytes(inside, name, operand.result_bytes(far=far)) for name, operand in given
        )
        return total + _written_bytes(inside, one.result_bytes(far=far))


def _plain_bytes(one: Instruction, computation: Computation, *, far: bool = False) -> float:
    made = one.shapes[:1] if one.opcode == "copy-start" else one.shapes  # its 2nd is the source
    result = sum(shape.bytes for shape in made if not (far and shape.space))
    return result + sum(i.result_bytes(far=far) for i in computation.operands(one))


def _traffic(one: Instruction, computation: Computation) -> float:
    """Return the memory traffic of an instruction, in bytes."""
    if one.opcode in _NO_TRAFFIC or one.opcode.endswith("-done"):
        return 0.0
    if one.opcode == "custom-call" and _target(one).startswith(_NO_FLOPS):
        return 0.0
    if one.opcode.removesuffix("-start") in _SLICES:
        return 2.0 * (one.bytes if one.opcode in _SLICES else one.shapes[1].bytes)
    if one.opcode == "dynamic-update-slice":
        return 2.0 * computation.operands(one)[1].bytes
    if one.opcode in ("copy-start", "collective-permute-start", "all-gather-start"):
        return float(_moved_bytes(one, computation) + _operand_bytes(one, computation))
    return _plain_bytes(one, computation)


def _read_bytes(inside: Computation, parameter: str, whole: int) -> float:
    """Return the bytes that a fusion reads from one operand, per use, as XLA counts."""
    total = 0.0
    for user in inside.users.get(parameter, []):
        if user.opcode in _SLICES and user.operands[0] == parameter:
            total += min(whole, user.bytes)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != parameter:
            total += whole  # the operand of a dynamic-update-slice is updated in place
    return total


def _written_bytes(inside: Computation, whole: int) -> float:
    """Return the bytes that a fusion writes; an in-place update counts in part."""
    root = inside.instructions.get(inside.root)
    while root is not None and root.opcode in ("bitcast", "copy"):
        root = inside.instructions.get(root.operands[0])
    if root is not None and root.opcode == "dynamic-update-slice":
        return min(whole, inside.operands(root)[1].bytes)
    return whole


def _is_continued(one: Instruction, computation: Computation) -> bool:
    """Whether a collective was started in another fusion.

    The TPU compiler overlaps some collectives with matmuls. It repeats such a collective in each of
    the fusions that run concurrently, from the one that starts it to the one that waits for it.
    """
    if "chain_id=" not in one.tail:
        return False
    users = computation.users.get(one.name, [])
    return not any(_target(user) == "AsyncCollectiveStart" for user in users)


def _started(cost: Cost) -> Cost:
    """Return the cost of a computation that runs concurrently with the operations after it."""
    cost.waiting = 0.0
    for key, sent in cost.collectives.items():
        cost.collectives[key] = replace(sent, asynchronous=sent.count)
    return cost


def _is_asynchronous(one: Instruction) -> bool:
    """Whether other operations can run between the start and the finish of a collective."""
    is_split = one.opcode.endswith("-start") or one.opcode == "send" or "chain_id=" in one.tail
    return is_split and '"is_sync":true' not in one.tail  # GPUs run such a pair at once


def _operand_bytes(one: Instruction, computation: Computation) -> int:
    return sum(operand.bytes for operand in computation.operands(one))


def _moved_bytes(one: Instruction, computation: Computation) -> int:
    """Return the larger of the bytes that go in and out."""
    into = _operand_bytes(one, computation)
    if one.opcode == "send":
        return into
    out = one.bytes
    if one.opcode.endswith("-start") and len(one.shapes) > len(one.operands):
        # The result of a start contains the inputs, the outputs, and sometimes scalar tokens.
        out = sum(s.bytes for s in one.shapes if s.sizes or s.dtype[0] not in "su") - into
    return max(out, into)


def _target(one: Instruction) -> str:
    found = re.search(r'custom_call_target="([^"]*)"', one.tail)
    return found[1] if found else "?"


def _count_custom(one: Instruction, computation: Computation, cost: Cost) -> None:
    target, estimate = _target(one), _COST_ESTIMATE.search(one.tail)
    if target.startswith(_PRODUCTS):
        cost.flops = _product_flops(one, computation)
    elif estimate:  # a kernel with a cost estimate
        cost.flops = float(estimate[1])
    elif not target.startswith(_NO_FLOPS):
        cost.notes[f"custom call {target}, whose arithmetic is not counted"] += 1


def _product_flops(one: Instruction, computation: Computation) -> float:
    """Return the flops of a matmul or a convolution."""
    operands, out = computation.operands(one)[:2], one.shapes[0].sizes
    if len(operands) < 2:
        return 0.0
    left, right = (operand.shapes[0].sizes for operand in operands)
    if labels := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.tail):
        return _convolution_flops(one.tail, labels, left, right, out)
    contracted = re.search(
        r'rhs_contracting_dim(?:s=\{|ension(?:_numbers|s)"?:\[)([\d,"]*)', one.tail
    )
    axes = numbers(contracted[1].replace('"', "")) if contracted else []
    return 2.0 * math.prod(out) * math.prod(right[axis] for axis in axes)


def _convolution_flops(
    tail: str,
    labels: re.Match[str],
    left: Sequence[int],
    right: Sequence[int],
    out: Sequence[int],
) -> float:
    """Return the flops of a convolution, not counting products with padding.

    The TPU compiler writes every matmul as a convolution, and a batched matmul as one whose windows
    cover padding nearly everywhere.
    """
    of_left, of_right, of_out = labels.groups()
    total = 2.0 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    window = _window(tail)
    for axis in sorted(filter(str.isdigit, of_out)):
        sizes = left[of_left.index(axis)], right[of_right.index(axis)], out[of_out.index(axis)]
        total *= _overlaps(*sizes, {k: v[int(axis)] for k, v in window.items()})
    return total


def _window(tail: str) -> dict[str, list[int]]:
    """Return the stride, padding and dilation of a convolution's window by axis, where set."""
    text = re.search(r"window=\{([^}]*)\}", tail)
    found: dict[str, list[int]] = {}
    for part in text[1].split() if text else ():
        key, _, value = part.partition("=")
        found[key] = [int(v.split("_")[0]) for v in value.split("x")]
    return found


def _overlaps(size: int, kernel: int, out: int, window: dict[str, int]) -> int:
    """Count the pairs of output and kernel positions on one axis that read an input element."""
    stride, low = window.get("stride", 1), window.get("pad", 0)
    stretch, reach = window.get("lhs_dilate", 1), window.get("rhs_dilate", 1)
    count = 0
    for k in range(kernel):
        # Output o and kernel position k read the input at stride * o + start, if it exists.
        start = k * reach - low
        met = range(start, start + stride * out, stride)
        count += sum(1 for at in met if 0 <= at <= (size - 1) * stretch and not at % stretch)
    return count
