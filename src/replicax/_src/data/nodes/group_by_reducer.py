"""The node of group_by_reducer, which folds all elements with the same key into one."""

import operator
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from replicax._src.base.tf_errors import StructureError
from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, RowBlock
from replicax._src.data.graph_facts import Known, first_element, traced_on, with_unknown_sizes
from replicax._src.data.leaves import leaf_spec, private_copy, to_leaf
from replicax._src.data.node import UNKNOWN_CARDINALITY, Node, Stream, UnaryNode
from replicax._src.data.nodes.sequential import widened
from replicax._src.data.seeds import Run
from replicax._src.data.structure import Structure, flatten, map_leaves
from replicax._src.data.tracing import TraceOutcome, Verdict, traced
from replicax._src.data.user_functions import ElementFunction

_KEY = TensorSpec((), np.int64)


@dataclass(frozen=True)
class Folding:
    """The three functions of a `Reducer`."""

    init: ElementFunction
    reduce: ElementFunction
    finalize: ElementFunction

    def begin(self, key: int) -> Any:
        """Return the initial state for `key`."""
        return self.init.call(np.int64(key), 0)

    def step(self, state: Any, element: Any, index: int) -> Any:
        """Return the state after `element`."""
        return self.reduce.call((state, element), index)

    def end(self, state: Any) -> Any:
        """Return the result for a final state."""
        return self.finalize.call(state, 0)


@final
@dataclass(frozen=True, eq=False)
class GroupByReducerNode(UnaryNode):
    """One element for each key, in ascending order; the first pull reads the whole input."""

    key: ElementFunction
    folding: Folding
    known_spec: Known = field(default_factory=Known, kw_only=True)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return the node over another input, without the inferred spec."""
        (node,) = inputs
        return replace(self, input=node, known_spec=self.known_spec.elsewhere())

    @property
    def cardinality(self) -> int:
        """Unknown until the keys are, unless the input is empty."""
        return 0 if self.input.cardinality == 0 else UNKNOWN_CARDINALITY

    @property
    def calls_user_code(self) -> bool:
        """Always True: reading calls the key function and the reducer."""
        return True

    @property
    def outcome(self) -> TraceOutcome:
        """The outcome of tracing the functions."""
        return self.known_spec.traced(self._trace_spec)

    @property
    def is_spec_sure(self) -> bool:
        """Whether the functions can be traced."""
        return self.outcome.verdict is Verdict.PROVED

    @property
    def is_spec_known(self) -> bool:
        """Whether the functions can be traced, or the spec has already been inferred."""
        return self.known_spec.value is not None or self.is_spec_sure

    @property
    def element_spec(self) -> Any:
        """The traced spec of results, or one inferred from the first element."""
        return self.known_spec.get(self._learn)

    def key_of(self, element: Any, index: int) -> int:
        """Return the key of `element`; raise if the function returns no int."""
        value = self.key.call(element, index)
        try:
            return operator.index(value[()] if isinstance(value, np.ndarray) else value)
        except TypeError:
            raise StructureError(
                f"The key_func given to group_by_reducer() must return one int, but for element"
                f" {index} it returned {value!r:.100}."
            ) from None

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _GroupByReducerStream(self, self.input.open(run))

    def _learn(self) -> Any:
        if self.is_spec_sure:
            return self.outcome.result
        structure, leaves = first_element(self.input, "group_by_reducer")
        element = structure.unflatten(leaves)
        state = self.folding.step(self.folding.begin(self.key_of(element, 0)), element, 0)
        return map_leaves(
            lambda leaf: with_unknown_sizes(leaf_spec(to_leaf(leaf))), self.folding.end(state)
        )

    def _trace_spec(self) -> TraceOutcome:
        """Trace the functions; the result is the spec of elements."""
        folding = self.folding
        keys = traced_on(self.input, self.key)
        first = traced(folding.init.function, _KEY)
        for outcome in (keys, first):
            if outcome.verdict is not Verdict.PROVED:
                return outcome
        # Relax the sizes of the state until one more step leaves them unchanged.
        state = first.result
        while True:
            outcome = traced(folding.reduce.function, state, self.input.element_spec)
            if outcome.verdict is not Verdict.PROVED:
                return outcome
            following = widened(state, outcome.result, "group_by_reducer")
            if following == state:
                return traced(folding.finalize.function, state, is_tuple=True)
            state = following


@final
class _GroupByReducerStream(Stream):
    def __init__(self, node: GroupByReducerNode, stream: Stream) -> None:
        self._node = node
        self._stream = stream
        self._states: dict[int, Any] | None = None
        self._left: list[int] = []
        self._structure: Structure | None = None

    def pull(self, limit: int) -> Block | None:
        if self._states is None:
            self._states = self._fold()
            self._left = sorted(self._states, reverse=True)
        if not self._left:
            return None
        result = self._node.folding.end(self._states.pop(self._left.pop()))
        if self._structure is None:
            self._structure = flatten(result)[0]
        leaves = self._structure.leaves_of(result)
        return RowBlock(self._structure, [tuple(private_copy(to_leaf(leaf)) for leaf in leaves)])

    def close(self) -> None:
        self._stream.close()

    def _fold(self) -> dict[int, Any]:
        """Read the whole input and return the final state of each key."""
        node, states, index = self._node, {}, 0
        while (block := self._stream.pull(1)) is not None:
            element = block.elements()[0]
            key = node.key_of(element, index)
            if key not in states:
                states[key] = node.folding.begin(key)
            states[key] = node.folding.step(states[key], element, index)
            index += 1
        return states
