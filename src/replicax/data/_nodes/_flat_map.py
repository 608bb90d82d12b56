"""A dataset for each element, one after the other or in turn: flat_map and interleave."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from replicax.data._blocks import Block, as_structure
from replicax.data._errors import StructureError
from replicax.data._functions import ElementFunction
from replicax.data._known import Known, first_element, has_open_axis, opened, traced_on
from replicax.data._leaves import Array, DatasetSpec
from replicax.data._node import UNKNOWN_CARDINALITY, Due, Node, Stream, UnaryNode
from replicax.data._nodes._choose import Branch, Branches
from replicax.data._nodes._prefetch import PrefetchStream
from replicax.data._seeds import Run, Seeds, is_in_function, nested_seeds
from replicax.data._structure import Structure, map_leaves
from replicax.data._trace import TraceOutcome, Verdict

# A stream, and whether nobody notices if it is read for several turns at once.
OpenInner = Callable[[Any, int], tuple[Stream, bool]]

_READ_AHEAD = 1024


@dataclass(frozen=True, eq=False)
class MakingNode(UnaryNode):
    """A node whose function makes datasets; the first one shows what elements look like."""

    known_inner: Known = field(default_factory=Known, kw_only=True)

    def with_inputs(self, *inputs: Node) -> Self:
        """The same functions over another input, whose datasets may have other shapes."""
        (node,) = inputs
        return replace(self, input=node, known_inner=self.known_inner.elsewhere())

    @property
    def is_spec_known(self) -> bool:
        """Whether the function can be traced; otherwise once the first dataset was asked for."""
        inner = self.known_inner.value
        return self.is_spec_sure or (isinstance(inner, Node) and inner.is_spec_known)

    @property
    def is_spec_sure(self) -> bool:
        """Whether the function can be traced."""
        return self.outcome.verdict is Verdict.PROVED

    @property
    def outcome(self) -> TraceOutcome:
        """The outcome of tracing the function: the spec of the dataset that it makes."""
        return self.known_inner.traced(self.attempt)

    @abstractmethod
    def attempt(self) -> TraceOutcome:
        """Trace the function."""

    def spec_by(self, first_inner: Callable[[], Node]) -> Any:
        """The spec of elements, traced or that of the first dataset.

        Args:
            first_inner: Makes the first dataset.
        """
        outcome = self.outcome
        if outcome.verdict is Verdict.PROVED:
            return outcome.result.element_spec
        spec = self.known_inner.get(first_inner).element_spec
        is_open = outcome.verdict is Verdict.VALUE or has_open_axis(self.input.element_spec)
        return map_leaves(opened, spec) if is_open else spec

    @property
    def calls_user_code(self) -> bool:
        """Yes: the functions."""
        return True


@dataclass(frozen=True, eq=False)
class NestingNode(MakingNode):
    """A node whose function returns a dataset for each element."""

    function: ElementFunction
    seeds: Seeds
    declared: Any = field(default=None, kw_only=True)  # the spec of elements, if it is known

    @property
    def random(self) -> Seeds:
        """The source of seeds for random datasets that the function makes."""
        return self.seeds

    @property
    def element_spec(self) -> Any:
        """That of the inner datasets."""
        return self.spec_by(self.first_inner)

    def attempt(self) -> TraceOutcome:
        """Trace the function."""
        if self.declared is not None:
            return TraceOutcome(Verdict.PROVED, DatasetSpec(self.declared))
        return of_dataset(traced_on(self.input, self.function), self.function.name)

    @property
    def cardinality(self) -> int:
        """Not known before all inner datasets are made."""
        return 0 if self.input.cardinality == 0 else UNKNOWN_CARDINALITY

    def checked(self) -> Self:
        """Check that the function makes datasets, if it can be traced."""
        if not is_in_function():
            _ = self.outcome
        return self

    def first_inner(self) -> Node:
        """The graph that the function makes for the first element; it is called once for this."""

        def learn() -> Node:
            structure, leaves = first_element(self.input, self.function.name)
            return self.inner(structure.unflatten(leaves), 0, Run())

        inner: Node = self.known_inner.get(learn)
        return inner

    def inner(self, element: Any, index: int, run: Run) -> Node:
        """The graph that the function makes for one element."""
        return made_inside(self.function, element, index, run.at(index), self.seeds)

    def opener(self, run: Run, *, in_threads: bool = False) -> OpenInner:
        """How to open the dataset of an element, to be read ahead in a thread of its own or not."""

        def open_inner(element: Any, index: int) -> tuple[Stream, bool]:
            node = self.inner(element, index, run)
            stream = node.open(run.inside(self.seeds, index))
            if not in_threads:
                return stream, not node.calls_user_code
            step = 1 if node.calls_user_code else _READ_AHEAD
            return PrefetchStream(stream, _READ_AHEAD, step=step), True

        return open_inner


def of_dataset(outcome: TraceOutcome, verb: str) -> TraceOutcome:
    """Check that a traced function returns a dataset."""
    if outcome.verdict is Verdict.PROVED and not isinstance(outcome.result, DatasetSpec):
        raise StructureError(
            f"The function given to {verb}() must return a Dataset, but it returns a value of the"
            f" spec {outcome.result}. Return `rx.data.Dataset.from_tensor_slices(...)`, or use"
            " `map` for single values."
        )
    return outcome


def made_inside(
    function: ElementFunction, element: Any, index: int, run: Run, seeds: Seeds
) -> Node:
    """The graph of the dataset that a function returns, made with seeds that replay alike."""
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
class FlatMapNode(NestingNode):
    """The inner datasets one after the other."""

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return InterleaveStream(self.input.open(run), self.opener(run), cycle=1, block=1 << 62)


@final
@dataclass(frozen=True, eq=False)
class InterleaveNode(NestingNode):
    """``block`` elements from each of ``cycle`` inner datasets in turn."""

    cycle: int
    block: int
    num_parallel_calls: int | None = None
    grouping = ("cycle", "block")

    @property
    def peeked(self) -> Node:
        """Without threads."""
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
    """Inner streams in turn; a slot whose stream has ended is filled at its next turn.

    An element that fails is one of a slot's turn, or it is not, as in TensorFlow's two ways. Where
    no user's function would notice, the streams are asked for the elements of several turns at
    once.
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
        self._asks_once = [False] * cycle
        self._slot = 0
        self._left = block  # elements that the current slot may still give in this turn
        self._index = 0
        self._is_input_done = False
        self._structure: Structure | None = None
        self._due = Due()

    def pull(self, limit: int) -> Block | None:
        self._due.settle()
        while (inner := self._current()) is not None:
            block = self._of_turns(limit) if limit > self._left else self._of_one(inner, limit)
            if block is not None:
                self._structure = self._structure or block.structure
                return as_structure(block, self._structure)
        return None

    def close(self) -> None:
        self._branches.close()
        self._stream.close()

    def _of_one(self, inner: Stream, limit: int) -> Block | None:
        try:
            block = inner.pull(min(limit, self._left))
        except Exception:
            self._used(1 if self._counts_errors else 0)
            raise
        if block is None:
            self._end()
        else:
            self._used(len(block))
        return block

    def _of_turns(self, limit: int) -> Block | None:
        numbers = self._turns(limit)
        answer = self._branches.ask(numbers)
        self._used(answer.count)
        while answer.count < len(numbers) and self._slot != numbers[answer.count]:
            self._next_slot()
        if answer.ended is not None:
            self._end()
        if answer.error is not None:
            self._used(1 if self._counts_errors else 0)
            self._due.put(answer.error)
            if answer.block is None:
                self._due.settle()
        return answer.block

    def _turns(self, limit: int) -> Array:
        """The slots of the next elements, as far as their streams are open and can be asked."""
        slots = len(self._asks_once)
        slot = self._slot
        numbers = [slot] * self._left
        while len(numbers) < limit and self._asks_once[self._slot]:
            slot = (slot + 1) % slots
            if self._branches.streams[slot] is None and self._is_input_done:
                continue
            if not self._asks_once[slot]:
                break
            numbers += [slot] * min(self._block, limit - len(numbers))
        return np.array(numbers)

    def _current(self) -> Stream | None:
        """The stream whose turn it is, or None when all have ended."""
        streams = self._branches.streams
        for _ in range(len(streams)):
            if streams[self._slot] is None and not self._is_input_done:
                self._fill()
            if streams[self._slot] is not None:
                return streams[self._slot]
            self._next_slot()
        return None

    def _fill(self) -> None:
        block = self._stream.pull(1)
        if block is None:
            self._is_input_done = True
            return
        self._index += 1
        stream, asks_once = self._open(block.elements()[0], self._index - 1)
        self._branches.streams[self._slot] = Branch(stream)
        self._asks_once[self._slot] = asks_once

    def _end(self) -> None:
        self._branches.end(self._slot)
        self._asks_once[self._slot] = False
        self._next_slot()

    def _used(self, count: int) -> None:
        while count >= self._left:
            count -= self._left
            self._next_slot()
            while count and self._branches.streams[self._slot] is None:
                self._next_slot()
        self._left -= count

    def _next_slot(self) -> None:
        self._slot = (self._slot + 1) % len(self._asks_once)
        self._left = self._block
