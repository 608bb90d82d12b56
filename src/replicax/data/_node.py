"""The graph: immutable nodes that open into streams, and datasets as its ends.

A node says what a transformation is; a stream is one pass over it. Tools walk the graph by
`Node.inputs` and rewrite it by `Node.with_inputs`; nothing else holds the graph together.

What every part of `Dataset` needs: the graph, and a way to make the next dataset.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, final

from replicax._basics import T_co
from replicax.data._blocks import Block, join
from replicax.data._depth import (
    Elsewhere,
    answering,
    is_deep,
    needs_stack,
    on_new_stack,
    once,
    remembered,
)
from replicax.data._errors import ArgumentTypeError, InvalidArgumentError
from replicax.data._seeds import Run, Seeds

if TYPE_CHECKING:
    from replicax.data._dataset import Dataset

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
AUTOTUNE = -1


class Stream(ABC):
    """One pass over a node, in order, in blocks of the size that the consumer asks for.

    Rows that come before an error are delivered before the error is raised, once; the next pull
    goes on with what follows it.
    """

    @abstractmethod
    def pull(self, limit: int) -> Block | None:
        """The next 1 to ``limit`` elements, or None at the end."""

    def skip(self, count: int) -> int:
        """Pass over ``count`` elements as cheaply as possible; how many there were."""
        done = 0
        while done < count:
            block = self.pull(count - done)
            if block is None:
                break
            done += len(block)
        return done

    def close(self) -> None:  # noqa: B027 - most streams have nothing to close
        """End threads and close files; pulling afterwards is undefined."""


@final
class _DeepStream(Stream):
    """A stream that is pulled on another stack."""

    def __init__(self, stream: Stream) -> None:
        self._elsewhere = Elsewhere(stream)
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        # Every one of the streams above may ask again after the end, and those above it.
        block: Block | None = None if self._is_done else self._elsewhere.ask("pull", limit)
        self._is_done = block is None
        return block

    def skip(self, count: int) -> int:
        return self._elsewhere.ask("skip", count) or 0

    def close(self) -> None:
        self._elsewhere.close()


@dataclass(frozen=True)
class Batching:
    """How many rows an element has; the last one may have fewer unless ``is_static``."""

    size: int
    is_static: bool


class Node(ABC):
    """One transformation, or a source.

    Attributes:
        keeps_batches: Whether it changes neither the batches of its input nor their rows.
        grouping: The arguments that say how many elements become one, or come in turn: with other
            ones the same number of elements ends elsewhere.
    """

    keeps_batches: ClassVar[bool] = False
    grouping: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _allow_depth(cls)

    @property
    @abstractmethod
    def inputs(self) -> tuple["Node", ...]:
        """The nodes that this one reads from."""

    @abstractmethod
    def with_inputs(self, *inputs: "Node") -> "Node":
        """The same transformation over other inputs."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The structure of elements, with a `TypeSpec` for each leaf."""

    @property
    @abstractmethod
    def cardinality(self) -> int:
        """The number of elements, or one of the two negative constants."""

    @abstractmethod
    def open(self, run: Run) -> Stream:
        """Start a pass."""

    @property
    def is_spec_known(self) -> bool:
        """Whether `element_spec` says it without reading an element."""
        return all(node.is_spec_known for node in self.inputs)

    @property
    def is_spec_sure(self) -> bool:
        """Whether `element_spec` holds for every element: not learnt from the first one alone."""
        return all(node.is_spec_sure for node in self.inputs)

    @property
    def peeked(self) -> "Node":
        """The same elements for a look at the first, without what would read more than that."""
        inputs = self.inputs
        return self.with_inputs(*(node.peeked for node in inputs)) if inputs else self

    @property
    def batching(self) -> Batching | None:
        """The size of batches, if each element is one; None where that is not known."""
        return None

    @property
    def gives_places(self) -> bool:
        """Whether elements are not fetched yet when they come, so that reading ahead is cheap."""
        return False

    @property
    def part(self) -> str:
        """Which of the data this very node reads or lets through, in words; nothing if all."""
        return ""

    @property
    def random(self) -> Seeds | None:
        """The seeds of this very node, if it is random."""
        return None

    @property
    def calls_user_code(self) -> bool:
        """Whether reading ahead would run a user's function earlier than asked for."""
        return any(node.calls_user_code for node in self.inputs)

    @property
    def may_fail(self) -> bool:
        """Whether an element may raise: anything but arrays, and what only reorders them."""
        if not self.inputs:
            return self.calls_user_code or not self.gives_places
        return self.calls_user_code or any(node.may_fail for node in self.inputs)


_FIXED = ("element_spec", "cardinality", "batching", "gives_places")
_LEARNT = ("is_spec_known",)  # which stays true
_CHANGING = ("is_spec_sure", "peeked", "calls_user_code", "may_fail")


def _allow_depth(kind: type) -> None:
    """Have the questions that nodes pass on to their inputs answered for graphs of any depth."""
    kinds = (_FIXED, remembered), (_LEARNT, partial(remembered, is_final=bool)), (_CHANGING, once)
    for names, asked in kinds:
        for name in names:
            own = vars(kind).get(name)
            if isinstance(own, property) and own.fget is not None:
                setattr(kind, name, property(asked(own.fget), doc=own.__doc__))
    if "open" in vars(kind):
        setattr(kind, "open", _opened(vars(kind)["open"]))  # noqa: B010 - of any type


def _opened(start: Callable[[Any, Run], Stream]) -> Callable[[Any, Run], Stream]:
    @wraps(start)
    def open_node(node: Node, run: Run) -> Stream:
        if not is_deep(node):
            return start(node, run)
        call = partial(start, node, run)
        if not needs_stack(node):
            stream: Stream = answering(call)
            return stream
        return _DeepStream(answering(partial(on_new_stack, call)))

    return open_node


_allow_depth(Node)


class SourceNode(Node):
    """A node without inputs."""

    @property
    def part(self) -> str:
        """How many elements there are, as far as that is known."""
        return f"{self.cardinality} elements" if self.cardinality >= 0 else ""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """No nodes: elements are made here."""
        return ()

    def with_inputs(self, *inputs: Node) -> Self:
        """The node itself: there is nothing to replace."""
        if inputs:
            raise TypeError(f"{type(self).__name__} reads from no other node.")
        return self


@dataclass(frozen=True, eq=False)
class UnaryNode(Node):
    """A node with one input; elements and their number stay as they are, unless overridden."""

    input: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The one input."""
        return (self.input,)

    def with_inputs(self, *inputs: Node) -> Self:
        """The same transformation over another input."""
        (node,) = inputs
        return replace(self, input=node)

    @property
    def element_spec(self) -> Any:
        """As in the input."""
        return self.input.element_spec

    @property
    def cardinality(self) -> int:
        """As in the input."""
        return self.input.cardinality


class PassingNode(UnaryNode):
    """A node that gives some of its input's elements, as they are."""

    keeps_batches = True

    @property
    def batching(self) -> Batching | None:
        """As in the input."""
        return self.input.batching

    @property
    def gives_places(self) -> bool:
        """As in the input."""
        return self.input.gives_places


def walk(node: Node) -> Iterator[Node]:
    """Every node once, this one first, inputs in order."""
    seen: set[int] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            pending.extend(reversed(current.inputs))


def pass_over(stream: Stream, count: int) -> int:
    """Make elements and leave them out, those that fail too; how many there were."""
    done = 0
    while done < count:
        try:
            block = stream.pull(count - done)
        except Exception:  # which stands for its element
            done += 1
            continue
        if block is None:
            break
        done += len(block)
    return done


class Due:
    """An error that waits until the rows before it are delivered."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def put(self, error: BaseException) -> None:
        """Keep an error."""
        self.error = error

    def settle(self) -> None:
        """Raise what is due, once."""
        if self.error is None:
            return
        error, self.error = self.error, None
        try:
            raise error
        finally:
            del error  # or the frame, in the error's own trace, would keep it and its threads alive


class Passed:
    """A stream, and elements of it to leave out first.

    Functions are called for those too, and one that fails is raised and not counted.
    """

    def __init__(self, node: Node, run: Run, count: int) -> None:
        self.stream = node.open(run)
        self.count = count
        self._may_fail = node.may_fail

    def is_past(self, *, makes: bool = True) -> bool:
        """Leave them out; whether there were as many.

        Args:
            makes: Whether they must be made, as far as they may fail.
        """
        while self.count:
            if makes and self._may_fail:
                block = self.stream.pull(self.count)
                passed = 0 if block is None else len(block)
            else:
                passed = self.stream.skip(self.count)
            self.count -= passed
            if not passed:
                return False
        return True


class Buffered(Stream):
    """A stream read with a push-back: for consumers that cannot use all rows at once."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._left: Block | None = None

    def pull(self, limit: int) -> Block | None:
        """The next 1 to ``limit`` elements."""
        block = self._left
        if block is None:
            return self.stream.pull(limit)
        self._left = None
        if len(block) > limit:
            self._left = block.slice(limit, len(block))
            return block.slice(0, limit)
        return block

    def push_back(self, block: Block) -> None:
        """Give back rows; the next `pull` returns them first."""
        if len(block):
            self._left = block if self._left is None else join([block, self._left])

    def skip(self, count: int) -> int:
        """Pass over elements."""
        done = 0
        if self._left is not None:
            block = self.pull(count)
            done = 0 if block is None else len(block)
        return done + self.stream.skip(count - done) if done < count else done

    def close(self) -> None:
        """Close the stream."""
        self.stream.close()


class Root(ABC, Generic[T_co]):
    """A dataset as the last node of a graph."""

    @property
    @abstractmethod
    def node(self) -> Node:
        """The last node of the graph."""

    @staticmethod
    @abstractmethod
    def _wrap(node: Node) -> "Dataset[Any]":
        """The dataset that ends in ``node``."""


def node_of(dataset: Any, verb: str) -> Node:
    """The graph of a dataset that a user handed over."""
    node = getattr(dataset, "node", None)
    if not isinstance(node, Node):
        raise ArgumentTypeError(
            f"{verb}() needs datasets, got {type(dataset).__name__}. Wrap arrays with"
            " `rx.data.Dataset.from_tensor_slices(...)`."
        )
    return node


def to_int(value: Any, verb: str, name: str, *, least: int | None = None) -> int:
    """An int argument, at least ``least``."""
    call = f"{verb}({name}={value!r})"
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(
            f"{call}: {name} must be an int, got {type(value).__name__}."
        ) from None
    if least is not None and number < least:
        raise InvalidArgumentError(f"{call}: {name} must be at least {least}, got {number}.")
    return number
