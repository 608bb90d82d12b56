"""Nodes that map each element to a dataset and flatten the result: flat_map and interleave."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from replicax._src.base.tf_errors import StructureError
from replicax._src.data.element_blocks import Block, as_structure
from replicax._src.data.graph_facts import (
    Known,
    first_element,
    has_open_axis,
    traced_on,
    with_unknown_sizes,
)
from replicax._src.data.leaves import Array, DatasetSpec
from replicax._src.data.node import UNKNOWN_CARDINALITY, Node, PendingFailure, Stream, UnaryNode
from replicax._src.data.nodes.choose import Branch, Branches
from replicax._src.data.nodes.prefetch import PrefetchStream
from replicax._src.data.seeds import Run, Seeds, is_in_function, nested_seeds
from replicax._src.data.structure import Structure, map_leaves
from replicax._src.data.tracing import TraceOutcome, Verdict
from replicax._src.data.user_functions import ElementFunction

# Opens the dataset of an element: returns its stream, and whether elements of several turns may be
# read from it at once: not if that would call user code earlier than requested.
OpenInner = Callable[[Any, int], tuple[Stream, bool]]

_READ_AHEAD = 1024  # elements to buffer for each dataset that is read in its own thread


@dataclass(frozen=True, eq=False)
class DatasetFunctionNode(UnaryNode):
    """A node whose function returns datasets; its spec is traced or inferred from the first one."""

    known_inner: Known = field(default_factory=Known, kw_only=True)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return the node over another input, without the inferred spec."""
        (node,) = inputs
        return replace(self, input=node, known_inner=self.known_inner.elsewhere())

    @property
    def is_spec_known(self) -> bool:
        """Whether the function can be traced, or the spec of the first dataset is already known."""
        inner = self.known_inner.value
        return self.is_spec_sure or (isinstance(inner, Node) and inner.is_spec_known)

    @property
    def is_spec_sure(self) -> bool:
        """Whether the function can be traced."""
        return self.outcome.verdict is Verdict.PROVED

    @property
    def outcome(self) -> TraceOutcome:
        """The outcome of tracing the function; the result is the spec of the returned dataset."""
        return self.known_inner.traced(self.trace_spec)

    @abstractmethod
    def trace_spec(self) -> TraceOutcome:
        """Trace the function and return the outcome."""

    def infer_spec(self, first_inner: Callable[[], Node]) -> Any:
        """Return the traced spec of elements, or the spec of the first dataset.

        Args:
            first_inner: Returns the graph of the first dataset; called only if tracing failed.
        """
        outcome = self.outcome
        if outcome.verdict is Verdict.PROVED:
            return outcome.result.element_spec
        spec = self.known_inner.get(first_inner).element_spec
        is_open = outcome.verdict is Verdict.VALUE or has_open_axis(self.input.element_spec)
        return map_leaves(with_unknown_sizes, spec) if is_open else spec

    @property
    def calls_user_code(self) -> bool:
        """Always True: reading calls the function that returns datasets."""
        return True


@dataclass(frozen=True, eq=False)
class NestedDatasetNode(DatasetFunctionNode):
    """A node whose function returns a dataset for each element."""

    function: ElementFunction
    seeds: Seeds
    declared: Any = field(default=None, kw_only=True)  # the spec of elements, if declared

    @property
    def random(self) -> Seeds:
        """The seeds for random datasets created in the function."""
        return self.seeds

    @property
    def element_spec(self) -> Any:
        """The spec of the elements of the inner datasets."""
        return self.infer_spec(self.first_inner)

    def trace_spec(self) -> TraceOutcome:
        """Trace the function; raise if it is proved to return no dataset."""
        if self.declared is not None:
            return TraceOutcome(Verdict.PROVED, DatasetSpec(self.declared))
        return require_dataset(traced_on(self.input, self.function), self.function.name)

    @property
    def cardinality(self) -> int:
        """Unknown until all inner datasets are created, unless the input is empty."""
        return 0 if self.input.cardinality == 0 else UNKNOWN_CARDINALITY

    def checked(self) -> Self:
        """Return the node; raise if tracing proves that the function returns no dataset."""
        if not is_in_function():
            _ = self.outcome
        return self

    def first_inner(self) -> Node:
        """Return the graph of the first element's dataset, calling the function at most once."""

        def learn() -> Node:
            structure, leaves = first_element(self.input, self.function.name)
            return self.inner(structure.unflatten(leaves), 0, Run())

        inner: Node = self.known_inner.get(learn)
        return inner

    def inner(self, element: Any, index: int, run: Run) -> Node:
        """Return the graph of the dataset that the function returns for `element`."""
        return call_for_dataset(self.function, element, index, run.at(index), self.seeds)

    def opener(self, run: Run, *, in_threads: bool = False) -> OpenInner:
        """Return a function that opens an element's dataset, in its own thread if `in_threads`."""

        def open_inner(element: Any, index: int) -> tuple[Stream, bool]:
            node = self.inner(element, index, run)
            stream = node.open(run.inside(self.seeds, index))
            if not in_threads:
                return stream, not node.calls_user_code
            step = 1 if node.calls_user_code else _READ_AHEAD
            return PrefetchStream(stream, _READ_AHEAD, step=step), True

        return open_inner


def require_dataset(outcome: TraceOutcome, verb: str) -> TraceOutcome:
    """Return `outcome`; raise if it proves that the function returns no dataset."""
    if outcome.verdict is Verdict.PROVED and not isinstance(outcome.result, DatasetSpec):
        raise StructureError(
            f"The function given to {verb}() must return a Dataset, but it returns a value of the"
            f" spec {outcome.result}. Return `rx.data.Dataset.from_tensor_slices(...)`, or use"
            " `map` for single values."
        )
    return outcome


def call_for_dataset(
    function: ElementFunction, element: Any, index: int, run: Run, seeds: Seeds
) -> Node:
    """Call `function` on `element` with replayable seeds; return the graph of its dataset."""
    with nested_seeds(run, seeds):
        result = function.call(element, index)
    node = getattr(result, "node", None)
    if not isinstance(node, Node):
        raise StructureError(
            f"The function given to {function.name}() must return a Dataset, but for element"
            f" {index} it returned {result!r} of type {type(result).__name__}. Return"
            " `rx.data.Dataset.from_tensor_slices(...)`, or use `map` for single values."
        )
    return node


@final
@dataclass(frozen=True, eq=False)
class FlatMapNode(NestedDatasetNode):
    """The elements of each inner dataset in turn."""

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return InterleaveStream(self.input.open(run), self.opener(run), cycle=1, block=1 << 62)


@final
@dataclass(frozen=True, eq=False)
class InterleaveNode(NestedDatasetNode):
    """`block` elements from each of `cycle` open inner datasets, cyclically."""

    cycle: int
    block: int
    num_parallel_calls: int | None = None
    grouping = ("cycle", "block")

    @property
    def peeked(self) -> Node:
        """The same elements, read without threads."""
        return replace(self, input=self.input.peeked, num_parallel_calls=None)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        in_threads = self.num_parallel_calls not in (None, 1)
        opener = self.opener(run, in_threads=in_threads)
        return InterleaveStream(
            self.input.open(run),
            opener,
            cycle=self.cycle,
            block=self.block,
            counts_errors=in_threads,
        )


@final
class InterleaveStream(Stream):
    """A round robin over slots with inner streams; an empty slot is refilled at its next turn.

    An element that raises counts towards its slot's turn if `counts_errors`: TensorFlow counts it
    in its parallel implementation and not in its sequential one. Streams that call no user code
    are read for several turns at once.
    """

    def __init__(
        self,
        stream: Stream,
        opener: OpenInner,
        *,
        cycle: int,
        block: int,
        counts_errors: bool = False,
    ) -> None:
        self._stream = stream
        self._open = opener
        self._block = block
        self._counts_errors = counts_errors
        self._branches = Branches([None] * cycle)
        self._can_read_turns = [False] * cycle
        self._slot = 0
        self._left = block  # elements left in the current slot's turn
        self._index = 0
        self._is_input_done = False
        self._structure: Structure | None = None
        self._pending = PendingFailure()

    def pull(self, limit: int) -> Block | None:
        self._pending.raise_stored()
        while (inner := self._current()) is not None:
            block = self._pull_turns(limit) if limit > self._left else self._pull_slot(inner, limit)
            if block is not None:
                self._structure = self._structure or block.structure
                return as_structure(block, self._structure)
        return None

    def close(self) -> None:
        self._branches.close()
        self._stream.close()

    def _pull_slot(self, inner: Stream, limit: int) -> Block | None:
        """Return elements of the current slot, within its turn; None if its stream has ended."""
        try:
            block = inner.pull(min(limit, self._left))
        except Exception:
            self._advance(1 if self._counts_errors else 0)
            raise
        if block is None:
            self._end()
        else:
            self._advance(len(block))
        return block

    def _pull_turns(self, limit: int) -> Block | None:
        """Return elements of several turns; None if a stream has ended before the first."""
        numbers = self._slots_of_turns(limit)
        selection = self._branches.select(numbers)
        self._advance(selection.count)
        # Move past empty slots to the one that could not serve its element: it has failed or ended.
        while selection.count < len(numbers) and self._slot != numbers[selection.count]:
            self._next_slot()
        if selection.ended is not None:
            self._end()
        if selection.error is not None:
            self._advance(1 if self._counts_errors else 0)
            self._pending.put(selection.error)
            if selection.block is None:
                self._pending.raise_stored()
        return selection.block

    def _slots_of_turns(self, limit: int) -> Array:
        """Return the slots of the next elements, up to one that must be read turn by turn."""
        slots = len(self._can_read_turns)
        slot = self._slot
        numbers = [slot] * self._left
        while len(numbers) < limit and self._can_read_turns[self._slot]:
            slot = (slot + 1) % slots
            if self._branches.streams[slot] is None and self._is_input_done:
                continue
            if not self._can_read_turns[slot]:
                break
            numbers += [slot] * min(self._block, limit - len(numbers))
        return np.array(numbers)

    def _current(self) -> Stream | None:
        """Return the stream of the next non-empty slot, or None when all have ended."""
        streams = self._branches.streams
        for _ in range(len(streams)):
            if streams[self._slot] is None and not self._is_input_done:
                self._fill()
            if streams[self._slot] is not None:
                return streams[self._slot]
            self._next_slot()
        return None

    def _fill(self) -> None:
        """Open the dataset of the next input element in the current slot."""
        block = self._stream.pull(1)
        if block is None:
            self._is_input_done = True
            return
        self._index += 1
        stream, can_read_turns = self._open(block.elements()[0], self._index - 1)
        self._branches.streams[self._slot] = Branch(stream)
        self._can_read_turns[self._slot] = can_read_turns

    def _end(self) -> None:
        self._branches.end(self._slot)
        self._can_read_turns[self._slot] = False
        self._next_slot()

    def _advance(self, count: int) -> None:
        """Move on by `count` elements, passing over empty slots."""
        while count >= self._left:
            count -= self._left
            self._next_slot()
            while count and self._branches.streams[self._slot] is None:
                self._next_slot()
        self._left -= count

    def _next_slot(self) -> None:
        self._slot = (self._slot + 1) % len(self._can_read_turns)
        self._left = self._block
