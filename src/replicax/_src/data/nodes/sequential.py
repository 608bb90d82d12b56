"""Nodes that process elements sequentially: take_while, scan, unique, rejection_resample."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, RowBlock
from replicax._src.data.graph_facts import Known, first_element, traced_on, with_unknown_sizes
from replicax._src.data.leaves import common_shape, leaf_spec, private_copy, to_leaf
from replicax._src.data.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Node,
    PassingNode,
    Stream,
    UnaryNode,
)
from replicax._src.data.nodes.map import PredicateNode
from replicax._src.data.seeds import Run, Seeds
from replicax._src.data.structure import LEAF, Structure, flatten, tuple_of
from replicax._src.data.tracing import TraceOutcome, Verdict, traced
from replicax._src.data.user_functions import ElementFunction

_SMOOTHING = 10  # initial count of each class in the estimated distribution, as in TensorFlow
_TINY = float(np.finfo(np.float32).tiny)


@final
@dataclass(frozen=True, eq=False)
class TakeWhileNode(PredicateNode):
    """The elements before the first one for which the predicate is false."""

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _TakeWhileStream(self.input.open(run), self)


@final
class _TakeWhileStream(Stream):
    def __init__(self, stream: Stream, node: TakeWhileNode) -> None:
        self._stream = stream
        self._predicate = node.evaluate
        self._index = 0
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        # One at a time: elements after the end must not be read from the input.
        block = None if self._is_done else self._stream.pull(1)
        if block is None:
            return None
        self._index += 1
        self._is_done = not self._predicate(block.elements()[0], self._index - 1)
        return None if self._is_done else block

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True, eq=False)
class _FunctionNode(UnaryNode):
    """A node whose spec is traced, or else inferred by calling its function on one element."""

    function: ElementFunction
    known_spec: Known = field(default_factory=Known, kw_only=True)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return the node over another input, without the inferred spec."""
        (node,) = inputs
        return replace(self, input=node, known_spec=self.known_spec.elsewhere())

    @property
    def outcome(self) -> TraceOutcome:
        """The outcome of tracing the function."""
        return self.known_spec.traced(self.trace_spec)

    @abstractmethod
    def trace_spec(self) -> TraceOutcome:
        """Trace the function and return an outcome whose result is the spec of elements."""

    @property
    def is_spec_known(self) -> bool:
        """Whether the function can be traced, or the spec has already been inferred."""
        return self.known_spec.value is not None or self.is_spec_sure

    @property
    def is_spec_sure(self) -> bool:
        """Whether the function can be traced."""
        return self.outcome.verdict is Verdict.PROVED

    @property
    def calls_user_code(self) -> bool:
        """Always True: reading calls the function."""
        return True


@final
@dataclass(frozen=True, eq=False)
class ScanNode(_FunctionNode):
    """The outputs of a function that also carries a state from one element to the next."""

    state: tuple[Any, ...]
    nesting: Structure

    @property
    def element_spec(self) -> Any:
        """The traced spec of outputs, or one inferred from the first element."""
        return self.known_spec.get(self._learn)

    def trace_spec(self) -> TraceOutcome:
        """Trace the function; relax the sizes of the state until they hold for every step."""
        if not self.input.is_spec_sure:
            return TraceOutcome(Verdict.UNPROVED)
        state = self.nesting.unflatten([leaf_spec(leaf) for leaf in self.state])
        while True:
            outcome = traced(self.function.function, state, self.input.element_spec)
            if outcome.verdict is not Verdict.PROVED:
                return outcome
            if type(outcome.result) is not tuple or len(outcome.result) != 2:
                raise _pair_error(f"it returns a value of the spec {outcome.result}")
            following = widened(state, outcome.result[0], "scan")
            if following == state:
                return TraceOutcome(Verdict.PROVED, outcome.result[1])
            state = following

    def _learn(self) -> Any:
        """Return the traced spec of outputs, or infer it from one call."""
        outcome = self.outcome
        if outcome.verdict is Verdict.PROVED:
            return outcome.result
        structure, leaves = first_element(self.input, self.function.name)
        state, output = self.step(self.state, structure.unflatten(leaves), 0)
        nesting, results = flatten(output)
        specs: list[Any] = [leaf_spec(to_leaf(result)) for result in results]
        # The sizes of one result hold for all only if inputs and state have fixed shapes and the
        # function does not branch on values.
        given = structure.leaves_of(self.input.element_spec)
        is_sure = all(None not in (getattr(spec, "shape", None) or ()) for spec in given)
        is_sure = is_sure and outcome.verdict is not Verdict.VALUE
        if not is_sure or [np.shape(x) for x in state] != [np.shape(x) for x in self.state]:
            specs = [with_unknown_sizes(spec) for spec in specs]
        return nesting.unflatten(specs)

    def step(self, state: Sequence[Any], element: Any, index: int) -> tuple[tuple[Any, ...], Any]:
        """Call the function on `state` and `element`; return the next state and the output."""
        result = self.function.call((self.nesting.unflatten(state), element), index)
        if type(result) is not tuple or len(result) != 2:
            raise _pair_error(f"for element {index} it returned {result!r:.100}")
        try:
            leaves = tuple(
                private_copy(to_leaf(leaf)) for leaf in self.nesting.leaves_of(result[0])
            )
        except StructureError as error:
            raise StructureError(
                f"The next state of scan() must be built like its initial_state: {error}."
            ) from None
        for old, new in zip(self.state, leaves, strict=True):
            before, after = leaf_spec(old), leaf_spec(new)
            if getattr(before, "dtype", None) != getattr(after, "dtype", None):
                raise StructureError(
                    f"The next state of scan() must have the dtypes of its initial_state: it was"
                    f" {before} and is {after} after element {index}. Begin with a value of that"
                    " dtype, such as np.int64(0), or convert it in the function."
                )
        return leaves, tuple(result[1]) if type(result[1]) is list else result[1]

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _ScanStream(self.input.open(run), self)


def _pair_error(what: str) -> StructureError:
    return StructureError(
        "The function given to scan() must return a pair, the next state and the result for the"
        f" element, but {what}."
    )


def widened(state: Any, following: Any, verb: str) -> Any:
    """Return the spec that covers both a state and the next one; raise if dtypes differ."""
    structure, leaves = flatten(state)
    try:
        next_leaves = structure.leaves_of(following)
    except StructureError as error:
        raise StructureError(
            f"The next state of {verb}() must be built like its initial_state: {error}."
        ) from None
    widened: list[Any] = []
    for old, new in zip(leaves, next_leaves, strict=True):
        if not isinstance(new, TensorSpec) or old.dtype != new.dtype:
            raise StructureError(
                f"The next state of {verb}() must have the dtypes of its first one: it was {old}"
                f" and becomes {new}. Begin with a value of that dtype, such as np.int64(0), or"
                " convert it in the function."
            )
        widened.append(TensorSpec(common_shape(old.shape, new.shape), old.dtype))
    return structure.unflatten(widened)


@final
class _ScanStream(Stream):
    def __init__(self, stream: Stream, node: ScanNode) -> None:
        self._stream = stream
        self._node = node
        self._state = node.state
        self._structure: Structure | None = None
        self._index = 0

    def pull(self, limit: int) -> Block | None:
        block = self._stream.pull(1)
        if block is None:
            return None
        self._index += 1
        state = tuple(
            private_copy(leaf) for leaf in self._state
        )  # the function may modify its argument
        self._state, output = self._node.step(state, block.elements()[0], self._index - 1)
        if self._structure is None:
            self._structure = flatten(output)[0]
        leaves = self._structure.leaves_of(output)
        return RowBlock(self._structure, [tuple(private_copy(to_leaf(leaf)) for leaf in leaves)])

    def close(self) -> None:
        self._stream.close()


@final
@dataclass(frozen=True, eq=False)
class UniqueNode(PassingNode):
    """The distinct elements, each at its first occurrence."""

    keeps_batches = False  # elements are single values

    @property
    def cardinality(self) -> int:
        """Unknown until all elements are read."""
        return UNKNOWN_CARDINALITY

    @property
    def yields_indices(self) -> bool:
        """Always False: elements are read to compare them, so blocks contain data."""
        return False

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _UniqueStream(self.input.open(run))


def require_comparable(structure: Structure, specs: Sequence[Any]) -> None:
    """Raise unless elements are a single leaf of dtype int32, int64 or string."""
    if structure.num_leaves != 1:
        raise InvalidArgumentError(
            f"unique() needs elements of one part, but these are {structure}. Keep one with `map`."
        )
    dtype = getattr(specs[0], "dtype", None)
    if dtype not in (np.int32, np.int64, object):
        raise StructureError(
            f"unique() compares int32, int64 and strings, but the elements are of dtype {dtype}:"
            " floats that look equal may differ. Convert them in a `map` first."
        )


@final
class _UniqueStream(Stream):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._seen: set[Any] = set()

    def pull(self, limit: int) -> Block | None:
        while (block := self._stream.pull(limit)) is not None:
            rows = block.rows()
            require_comparable(block.structure, [leaf_spec(leaf) for leaf in rows[0][:1]])
            new: list[int] = []
            for place, (leaf,) in enumerate(rows):
                key = leaf if isinstance(leaf, bytes) else (leaf.shape, *leaf.reshape(-1).tolist())
                if key not in self._seen:
                    self._seen.add(key)
                    new.append(place)
            if new:
                return block.take(np.array(new, np.int64))
        return None

    def close(self) -> None:
        self._stream.close()


@final
@dataclass(frozen=True, eq=False)
class ResampleNode(_FunctionNode):
    """Pairs of a class and an element, after rejection sampling to a target distribution."""

    target: tuple[float, ...]
    initial: tuple[float, ...] | None
    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The seeds of the draws."""
        return self.seeds

    @property
    def cardinality(self) -> int:
        """Unknown unless empty or infinite: it depends on the draws."""
        size = self.input.cardinality
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    @property
    def element_spec(self) -> Any:
        """A pair of the spec of a class and the input's spec."""

        def learn() -> Any:
            if self.is_spec_sure:
                return self.outcome.result
            structure, leaves = first_element(self.input, self.function.name)
            label = to_leaf(self.function.call(structure.unflatten(leaves), 0))
            return leaf_spec(label), self.input.element_spec

        return self.known_spec.get(learn)

    def trace_spec(self) -> TraceOutcome:
        """Trace the class function; the result is the spec of pairs."""
        outcome = traced_on(self.input, self.function)
        if outcome.verdict is not Verdict.PROVED:
            return outcome
        return TraceOutcome(Verdict.PROVED, (outcome.result, self.input.element_spec))

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _ResampleStream(self.input.open(run), self, run.generator(self.seeds))


@final
class _ResampleStream(Stream):
    def __init__(self, stream: Stream, node: ResampleNode, generator: np.random.Generator) -> None:
        self._stream = stream
        self._node = node
        self._generator = generator
        self._seen = np.full(len(node.target), _SMOOTHING, np.float64)
        self._index = 0

    def pull(self, limit: int) -> Block | None:
        while (block := self._stream.pull(1)) is not None:
            self._index += 1
            label = to_leaf(self._node.function.call(block.elements()[0], self._index - 1))
            draw = self._generator.random()
            if draw < self._acceptance(self._class_index(label)):
                structure = tuple_of((LEAF, block.structure))
                return RowBlock(structure, [(label, *block.rows()[0])])
        return None

    def close(self) -> None:
        self._stream.close()

    def _class_index(self, label: Any) -> int:
        """Return `label` as an int; raise unless it is a class of the target distribution."""
        count = len(self._seen)
        if np.ndim(label) or not isinstance(label, np.integer) or not 0 <= label < count:
            raise InvalidArgumentError(
                f"The class_func given to rejection_resample() returned {label!r:.60} for element"
                f" {self._index - 1}; with {count} numbers in target_dist a class is an int from 0"
                f" to {count - 1}."
            )
        return int(label)

    def _acceptance(self, label: int) -> float:
        """Return the probability with which an element of class `label` is kept."""
        if self._node.initial is None:
            self._seen[label] += 1
            initial = self._seen / self._seen.sum()
        else:
            initial = np.array(self._node.initial)
        ratios = np.array(self._node.target) / (initial + _TINY)
        return float(ratios[label] / ratios.max())
