"""A dataset for each element, one after the other or in turn: flat_map and interleave."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

from replicax.data._blocks import Block, as_structure
from replicax.data._errors import StructureError
from replicax.data._functions import ElementFunction
from replicax.data._known import Known, first_element
from replicax.data._node import UNKNOWN_CARDINALITY, Node, Stream, UnaryNode
from replicax.data._nodes._prefetch import PrefetchStream
from replicax.data._seeds import Run, Seeds, nested_seeds
from replicax.data._structure import Structure

OpenInner = Callable[[Any, int], Stream]

_READ_AHEAD = 1024


@dataclass(frozen=True, eq=False)
class MakingNode(UnaryNode):
    """A node whose function makes datasets; the first one shows what elements look like."""

    known_inner: Known = field(default_factory=Known, kw_only=True)

    def with_inputs(self, *inputs: Node) -> Self:
        """The same functions over another input, whose datasets may have other shapes."""
        (node,) = inputs
        return replace(self, input=node, known_inner=Known())

    @property
    def is_spec_known(self) -> bool:
        """Once the first dataset was asked for."""
        inner = self.known_inner.value
        return isinstance(inner, Node) and inner.is_spec_known

    @property
    def calls_user_code(self) -> bool:
        """Yes: the functions."""
        return True


@dataclass(frozen=True, eq=False)
class NestingNode(MakingNode):
    """A node whose function returns a dataset for each element."""

    function: ElementFunction
    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The source of seeds for random datasets that the function makes."""
        return self.seeds

    @property
    def element_spec(self) -> Any:
        """That of the first inner dataset."""
        return self.first_inner().element_spec

    @property
    def cardinality(self) -> int:
        """Not known before all inner datasets are made."""
        return 0 if self.input.cardinality == 0 else UNKNOWN_CARDINALITY

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

        def open_inner(element: Any, index: int) -> Stream:
            node = self.inner(element, index, run)
            stream = node.open(run.inside(self.seeds, index))
            if not in_threads:
                return stream
            step = 1 if node.calls_user_code else _READ_AHEAD
            return PrefetchStream(stream, _READ_AHEAD, step=step)

        return open_inner


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

    An element that fails is one of a slot's turn, or it is not, as in TensorFlow's two ways.
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
        self._slots: list[Stream | None] = [None] * cycle
        self._slot = 0
        self._left = block  # elements that the current slot may still give in this turn
        self._index = 0
        self._is_input_done = False
        self._structure: Structure | None = None

    def pull(self, limit: int) -> Block | None:
        while (inner := self._current()) is not None:
            try:
                block = inner.pull(min(limit, self._left))
            except Exception:
                self._used(1 if self._counts_errors else 0)
                raise
            if block is None:
                inner.close()
                self._slots[self._slot] = None
                self._next_slot()
                continue
            self._used(len(block))
            self._structure = self._structure or block.structure
            return as_structure(block, self._structure)
        return None

    def close(self) -> None:
        for inner in self._slots:
            if inner is not None:
                inner.close()
        self._stream.close()

    def _current(self) -> Stream | None:
        """The stream whose turn it is, or None when all have ended."""
        for _ in range(len(self._slots)):
            inner = self._slots[self._slot]
            if inner is None and not self._is_input_done:
                inner = self._slots[self._slot] = self._next_inner()
            if inner is not None:
                return inner
            self._next_slot()
        return None

    def _next_inner(self) -> Stream | None:
        block = self._stream.pull(1)
        if block is None:
            self._is_input_done = True
            return None
        self._index += 1
        return self._open(block.elements()[0], self._index - 1)

    def _used(self, count: int) -> None:
        self._left -= count
        if not self._left:
            self._next_slot()

    def _next_slot(self) -> None:
        self._slot = (self._slot + 1) % len(self._slots)
        self._left = self._block
