"""The dataset graph: immutable nodes, and the streams that they open.

A node describes a transformation or source; a stream is one pass over it. Tools traverse the graph
through `Node.inputs` and rewrite it with `Node.with_inputs`. `Root` is the base of all `Dataset`
mixins.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, final

from replicax._src.base.ops import T_co
from replicax._src.base.tf_errors import ArgumentTypeError, InvalidArgumentError
from replicax._src.data.deep_pipelines import (
    ThreadProxy,
    cached_on_node,
    is_deep,
    needs_stack,
    on_new_stack,
    once,
    with_memo,
)
from replicax._src.data.element_blocks import Block, join
from replicax._src.data.seeds import Run, Seeds

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset

INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2
AUTOTUNE = -1


class Stream(ABC):
    """One pass over a node, in order, in blocks whose size the consumer limits.

    Elements before a failed one are delivered first; then the error is raised, once, and the next
    pull continues with the element after it.
    """

    @abstractmethod
    def pull(self, limit: int) -> Block | None:
        """Return the next 1 to ``limit`` elements, or None at the end."""

    def skip(self, count: int) -> int:
        """Skip up to ``count`` elements as cheaply as possible; return how many there were."""
        done = 0
        while done < count:
            block = self.pull(count - done)
            if block is None:
                break
            done += len(block)
        return done

    def close(self) -> None:  # noqa: B027 - most streams have nothing to close
        """Stop threads and close files; calling `pull` afterwards is undefined."""


@final
class _DeepStream(Stream):
    """A stream that runs on the stack of another thread."""

    def __init__(self, stream: Stream) -> None:
        self._proxy = ThreadProxy(stream)
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        # Each consumer may pull again after the end, and so may its consumers: in a deep pipeline
        # these calls would multiply, so the end is remembered here.
        block: Block | None = None if self._is_done else self._proxy.call("pull", limit)
        self._is_done = block is None
        return block

    def skip(self, count: int) -> int:
        return self._proxy.call("skip", count) or 0

    def close(self) -> None:
        self._proxy.close()


@dataclass(frozen=True)
class Batching:
    """The batch size of elements; the last batch may be smaller unless ``is_static``."""

    size: int
    is_static: bool


class Node(ABC):
    """A transformation or a source.

    Attributes:
        keeps_batches: Whether the node preserves the batches of its input and their rows.
        grouping: Names of the arguments that determine how elements are grouped or interleaved.
            Iterator states contain them, because a position is valid only for equal values.
    """

    keeps_batches: ClassVar[bool] = False
    grouping: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _support_depth(cls)

    @property
    @abstractmethod
    def inputs(self) -> tuple["Node", ...]:
        """The nodes that this one reads from."""

    @abstractmethod
    def with_inputs(self, *inputs: "Node") -> "Node":
        """Return the same transformation over other inputs."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The nested structure of elements, with a `TypeSpec` for each leaf."""

    @property
    @abstractmethod
    def cardinality(self) -> int:
        """The number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""

    @abstractmethod
    def open(self, run: Run) -> Stream:
        """Start a pass."""

    @property
    def is_spec_known(self) -> bool:
        """Whether `element_spec` is available without reading an element."""
        return all(node.is_spec_known for node in self.inputs)

    @property
    def is_spec_sure(self) -> bool:
        """Whether `element_spec` holds for every element, not only for the first."""
        return all(node.is_spec_sure for node in self.inputs)

    @property
    def peeked(self) -> "Node":
        """A variant of this graph that reads no more than needed to produce the first element.

        It does not shuffle, prefetch or fill caches.
        """
        inputs = self.inputs
        return self.with_inputs(*(node.peeked for node in inputs)) if inputs else self

    @property
    def batching(self) -> Batching | None:
        """The batch size, if elements are batches; None if not known."""
        return None

    @property
    def yields_indices(self) -> bool:
        """Whether blocks are indices into a source (`IndexBlock`), so reading ahead is cheap."""
        return False

    @property
    def part(self) -> str:
        """A description of the part of the data that this node reads or selects; "" if all."""
        return ""

    @property
    def random(self) -> Seeds | None:
        """The seeds of this node, if it is random; not those of its inputs."""
        return None

    @property
    def calls_user_code(self) -> bool:
        """Whether reading ahead would call user functions earlier than the consumer requests."""
        return any(node.calls_user_code for node in self.inputs)

    @property
    def may_fail(self) -> bool:
        """Whether producing an element may raise; False for in-memory arrays and reorderings."""
        if not self.inputs:
            return self.calls_user_code or not self.yields_indices
        return self.calls_user_code or any(node.may_fail for node in self.inputs)


# Recursive properties of nodes, by how long a result stays valid.
_CONSTANT = ("element_spec", "cardinality", "batching", "yields_indices")
_CONSTANT_IF_TRUE = ("is_spec_known", "is_spec_sure")
_CHANGING = ("peeked", "calls_user_code", "may_fail")


def _support_depth(kind: type) -> None:
    """Wrap the recursive properties and `open` of a node class for graphs of any depth."""
    caches = (
        (_CONSTANT, cached_on_node),
        (_CONSTANT_IF_TRUE, partial(cached_on_node, is_final=bool)),
        (_CHANGING, once),
    )
    for names, cached in caches:
        for name in names:
            defined = vars(kind).get(name)
            if isinstance(defined, property) and defined.fget is not None:
                setattr(kind, name, property(cached(defined.fget), doc=defined.__doc__))
    if "open" in vars(kind):
        setattr(kind, "open", _open_at_depth(vars(kind)["open"]))  # noqa: B010 - of any type


def _open_at_depth(start: Callable[[Any, Run], Stream]) -> Callable[[Any, Run], Stream]:
    @wraps(start)
    def open_node(node: Node, run: Run) -> Stream:
        if not is_deep(node):
            return start(node, run)
        call = partial(start, node, run)
        if not needs_stack(node):
            stream: Stream = with_memo(call)
            return stream
        return _DeepStream(with_memo(partial(on_new_stack, call)))

    return open_node


_support_depth(Node)


class SourceNode(Node):
    """A node without inputs."""

    @property
    def part(self) -> str:
        """The number of elements, if known."""
        return f"{self.cardinality} elements" if self.cardinality >= 0 else ""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Empty: a source reads from no other node."""
        return ()

    def with_inputs(self, *inputs: Node) -> Self:
        """Return the node itself; raise TypeError if inputs are given."""
        if inputs:
            raise TypeError(f"{type(self).__name__} reads from no other node.")
        return self


@dataclass(frozen=True, eq=False)
class UnaryNode(Node):
    """A node with one input; spec and cardinality are those of the input unless overridden."""

    input: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The one input."""
        return (self.input,)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return the same transformation over another input."""
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
    """A node that passes on some or all elements of its input unchanged."""

    keeps_batches = True

    @property
    def batching(self) -> Batching | None:
        """As in the input."""
        return self.input.batching

    @property
    def yields_indices(self) -> bool:
        """As in the input."""
        return self.input.yields_indices


def walk(node: Node) -> Iterator[Node]:
    """Yield each node of the graph once, depth first, starting with `node`."""
    seen: set[int] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            pending.extend(reversed(current.inputs))


def discard_elements(stream: Stream, count: int) -> int:
    """Produce and discard up to `count` elements (failures count); return how many."""
    done = 0
    while done < count:
        try:
            block = stream.pull(count - done)
        except Exception:  # raised in place of one element
            done += 1
            continue
        if block is None:
            break
        done += len(block)
    return done


class PendingFailure:
    """An error to raise after the rows before it have been delivered."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def put(self, error: BaseException) -> None:
        """Store an error."""
        self.error = error

    def raise_stored(self) -> None:
        """Raise the stored error, if any, and forget it."""
        if self.error is None:
            return
        error, self.error = self.error, None
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame: break the cycle, which holds threads


class SkippingStream:
    """A stream of which the next `count` elements are skipped before it is read.

    They are produced, so user functions are called for them. An element that fails raises, and
    does not count as skipped.
    """

    def __init__(self, node: Node, run: Run, count: int) -> None:
        self.stream = node.open(run)
        self.count = count
        self._may_fail = node.may_fail

    def skip_remaining(self, *, produces: bool = True) -> bool:
        """Skip the elements still to be skipped; return False if the stream ends before.

        Args:
            produces: Whether to produce the skipped elements if producing them may fail.
        """
        while self.count:
            if produces and self._may_fail:
                block = self.stream.pull(self.count)
                skipped = 0 if block is None else len(block)
            else:
                skipped = self.stream.skip(self.count)
            self.count -= skipped
            if not skipped:
                return False
        return True


class BufferedStream(Stream):
    """A stream with push-back, for consumers that cannot use all rows of a block."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._left: Block | None = None

    def pull(self, limit: int) -> Block | None:
        """Return the next 1 to ``limit`` elements, pushed-back ones first."""
        block = self._left
        if block is None:
            return self.stream.pull(limit)
        self._left = None
        if len(block) > limit:
            self._left = block.slice(limit, len(block))
            return block.slice(0, limit)
        return block

    def push_back(self, block: Block) -> None:
        """Return rows to the stream; the next `pull` yields them first."""
        if len(block):
            self._left = block if self._left is None else join([block, self._left])

    def skip(self, count: int) -> int:
        """Skip up to `count` elements; return how many there were."""
        done = 0
        if self._left is not None:
            block = self.pull(count)
            done = 0 if block is None else len(block)
        return done + self.stream.skip(count - done) if done < count else done

    def close(self) -> None:
        """Close the stream."""
        self.stream.close()


class Root(ABC, Generic[T_co]):
    """The base of `Dataset` and its mixins: access to the graph, and construction from a node."""

    @property
    @abstractmethod
    def node(self) -> Node:
        """The last node of the graph."""

    @staticmethod
    @abstractmethod
    def _wrap(node: Node) -> "Dataset[Any]":
        """Return the dataset whose last node is ``node``."""


def node_of(dataset: Any, verb: str) -> Node:
    """Return the last node of a dataset; raise `ArgumentTypeError` for other objects."""
    node = getattr(dataset, "node", None)
    if not isinstance(node, Node):
        raise ArgumentTypeError(
            f"{verb}() needs datasets, got {type(dataset).__name__}. Wrap arrays with"
            " `rx.data.Dataset.from_tensor_slices(...)`."
        )
    return node


def to_int(value: Any, verb: str, name: str, *, least: int | None = None) -> int:
    """Return `value` as an int of at least ``least``.

    Raises:
        ArgumentTypeError: If it is no int. Messages name the argument `name` of `verb`.
        InvalidArgumentError: If it is too small.
    """
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
