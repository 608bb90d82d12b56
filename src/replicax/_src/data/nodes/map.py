"""Nodes that call a function on each element: map and filter."""

import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, Row
from replicax._src.data.graph_facts import Known, mapped_spec, traced_on
from replicax._src.data.leaves import to_leaf
from replicax._src.data.node import (
    AUTOTUNE,
    UNKNOWN_CARDINALITY,
    BufferedStream,
    Node,
    PendingFailure,
    Stream,
    UnaryNode,
)
from replicax._src.data.nodes.prefetch import Calls
from replicax._src.data.seeds import Run, is_in_function
from replicax._src.data.tracing import TraceOutcome, Verdict
from replicax._src.data.user_functions import ElementFunction

_MOST_ROWS = 1024  # the most elements processed in one pull
_SLOW_CALL = 3e-4  # seconds per call from which AUTOTUNE uses threads
_ROWS_AHEAD = 256  # the most elements to read ahead
_BYTES_AHEAD = 1 << 17  # and about how many bytes
_BOOLS = (bool, np.bool_)


@final
@dataclass(frozen=True, eq=False)
class MapNode(UnaryNode):
    """The results of a function of each element, in order."""

    function: ElementFunction
    num_parallel_calls: int | None = None
    known_spec: Known = field(default_factory=Known)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return the node over another input, without the inferred spec."""
        (node,) = inputs
        return replace(self, input=node, known_spec=self.known_spec.elsewhere())

    @property
    def outcome(self) -> TraceOutcome:
        """The outcome of tracing the function."""
        return self.known_spec.traced(lambda: traced_on(self.input, self.function))

    @property
    def element_spec(self) -> Any:
        """The traced spec of results, or one inferred by a call on the first element."""
        return self.known_spec.get(lambda: mapped_spec(self.input, self.function, self.outcome))

    @property
    def is_spec_known(self) -> bool:
        """Whether the function can be traced, or the spec has already been inferred."""
        return self.known_spec.value is not None or self.is_spec_sure

    @property
    def is_spec_sure(self) -> bool:
        """Whether the function can be traced."""
        return self.outcome.verdict is Verdict.PROVED

    @property
    def peeked(self) -> Node:
        """The same elements, computed without threads."""
        return replace(self, input=self.input.peeked, num_parallel_calls=None)

    @property
    def calls_user_code(self) -> bool:
        """True unless the function is vectorized and the input calls no user code."""
        return not self.function.vectorize or self.input.calls_user_code

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        stream = self.input.open(run)
        if self.function.vectorize:
            return _BlockMapStream(stream, self.function)
        reader = _Elements(stream, reads_ahead=not self.input.calls_user_code)
        return _MapStream(reader, self.function, self.num_parallel_calls)


class _Elements:
    """The elements of a stream, read ahead in blocks unless that would call user code early."""

    def __init__(self, stream: Stream, *, reads_ahead: bool) -> None:
        self._stream = stream
        # Elements to read at once; 0 until the first block shows how large they are.
        self._ahead = 0 if reads_ahead else 1
        self._ready: deque[Any] = deque()

    def read(self, limit: int) -> list[Any]:
        """Return the next 1 to `limit` elements, or an empty list at the end."""
        ready = self._ready
        if not ready:
            block = self._stream.pull(max(limit, self._ahead))
            if block is None:
                return []
            if not self._ahead:
                self._ahead = max(1, min(_ROWS_AHEAD, _BYTES_AHEAD // _bytes_of(block)))
            elements = block.elements()
            if len(elements) <= limit:
                return elements
            ready.extend(elements)
        if limit == 1:
            return [ready.popleft()]
        return [ready.popleft() for _ in range(min(limit, len(ready)))]

    def push_back(self, elements: list[Any]) -> None:
        """Return unused elements; the next `read` starts with them."""
        self._ready.extendleft(reversed(elements))

    def skip(self, count: int) -> int:
        """Skip up to `count` elements; return how many were skipped."""
        done = min(count, len(self._ready))
        for _ in range(done):
            self._ready.popleft()
        return done + self._stream.skip(count - done)

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()


@final
class _MapStream(Stream):
    def __init__(self, elements: _Elements, function: ElementFunction, workers: int | None) -> None:
        self._elements = elements
        self._function = function
        self._is_autotuned = workers == AUTOTUNE
        self._calls: Calls | None = None
        if workers is not None and workers > 1:
            self._calls = Calls(function.row, workers)
        self._index = 0
        self._pending = PendingFailure()

    def pull(self, limit: int) -> Block | None:
        if self._pending.error is not None:
            self._pending.raise_stored()
        if self._calls is not None:
            rows = self._call_in_threads(self._calls, min(limit, _MOST_ROWS))
        elif self._is_autotuned:
            rows = self._call_and_autotune(limit)
        else:
            rows = self._call_here(limit)
        if not rows:
            self._pending.raise_stored()
        return self._function.rows_block(rows) if rows else None

    def skip(self, count: int) -> int:
        done = 0
        while self._calls and done < count:
            _, error = self._calls.next(1)
            if error is not None:
                raise error
            done += 1
        passed = self._elements.skip(count - done)
        self._index += passed
        return done + passed

    def close(self) -> None:
        self._end_threads()
        self._elements.close()

    def __del__(self) -> None:
        self._end_threads()

    def _call_here(self, limit: int) -> list[Row]:
        """Call the function on this thread; defer an error behind the results before it."""
        elements = self._elements.read(limit if limit < _MOST_ROWS else _MOST_ROWS)
        rows: list[Row] = []
        try:
            self._function.add_rows(rows, elements, self._index)
        except Exception as error:
            self._elements.push_back(elements[len(rows) + 1 :])
            self._index += 1
            self._pending.put(error)
        self._index += len(rows)
        return rows

    def _call_and_autotune(self, limit: int) -> list[Row]:
        """Time the first calls on this thread, and switch to threads if they are slow."""
        began = time.perf_counter()
        rows = self._call_here(limit)
        is_slow = time.perf_counter() - began > _SLOW_CALL * len(rows)
        if is_slow and rows:
            self._calls = Calls(self._function.row, _cores())
        self._is_autotuned = False
        return rows

    def _call_in_threads(self, calls: Calls, limit: int) -> list[Row]:
        """Queue elements for the worker threads, and return the next results in order."""
        while (room := calls.room(limit)) > 0:
            try:
                elements = self._elements.read(room)
            except Exception as error:  # delivered in order, between the results
                calls.fail(error)
                continue
            if not elements:
                break
            calls.add(elements, self._index)
            self._index += len(elements)
        rows, failed = calls.next(limit)
        if failed is not None:
            self._pending.put(failed)
        elif not rows:
            self._end_threads()
        return rows

    def _end_threads(self) -> None:
        if self._calls is not None:
            self._calls.stop()


@final
class _BlockMapStream(Stream):
    def __init__(self, stream: Stream, function: ElementFunction) -> None:
        self._stream = stream
        self._function = function

    def pull(self, limit: int) -> Block | None:
        block = self._stream.pull(min(limit, _MOST_ROWS))
        return None if block is None else self._function.block(block)

    def skip(self, count: int) -> int:
        return self._stream.skip(count)

    def close(self) -> None:
        self._stream.close()


@dataclass(frozen=True, eq=False)
class PredicateNode(UnaryNode):
    """A node that selects elements with a user's predicate."""

    predicate: ElementFunction

    @classmethod
    def of(cls, node: Node, predicate: ElementFunction) -> Self:
        """Return the node; raise if tracing proves that the predicate returns no bool."""
        if is_in_function():  # tracing for every outer element is slow; `evaluate` checks anyway
            return cls(node, predicate)
        outcome = traced_on(node, predicate)
        is_bool = TensorSpec((), np.bool_).is_compatible_with(outcome.result)
        if outcome.verdict is Verdict.PROVED and not is_bool:
            raise _bool_error(predicate.name, f"it returns a value of the spec {outcome.result}")
        return cls(node, predicate)

    def evaluate(self, element: Any, index: int) -> bool:
        """Return whether the predicate holds for `element`; raise if it returns no bool."""
        result = self.predicate.call(element, index)
        if type(result) in _BOOLS:
            return bool(result)
        leaf: Any = to_leaf(result)
        if not isinstance(leaf, np.bool_):
            raise _bool_error(
                self.predicate.name, f"for element {index} it returned {result!r:.100}"
            )
        return bool(leaf)

    @property
    def cardinality(self) -> int:
        """Unknown until every element is tested, unless the input is empty."""
        return 0 if self.input.cardinality == 0 else UNKNOWN_CARDINALITY

    @property
    def calls_user_code(self) -> bool:
        """Always True: reading calls the predicate."""
        return True


@final
@dataclass(frozen=True, eq=False)
class FilterNode(PredicateNode):
    """The elements for which the predicate is true."""

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _FilterStream(self.input.open(run), self)


@final
class _FilterStream(Stream):
    def __init__(self, stream: Stream, node: FilterNode) -> None:
        self._stream = BufferedStream(stream)
        self._predicate = node.evaluate
        self._index = 0
        self._pending = PendingFailure()

    def pull(self, limit: int) -> Block | None:
        self._pending.raise_stored()
        while (block := self._stream.pull(min(limit, _MOST_ROWS))) is not None:
            selected = self._select(block)
            if len(selected):
                return selected
        return None

    def close(self) -> None:
        self._stream.close()

    def _select(self, block: Block) -> Block:
        """Return the elements of `block` for which the predicate holds, up to one that raises."""
        places: list[int] = []
        for place, element in enumerate(block.elements()):
            self._index += 1
            try:
                if self._predicate(element, self._index - 1):
                    places.append(place)
            except Exception as error:
                self._stream.push_back(block.slice(place + 1, len(block)))
                if not places:
                    raise
                self._pending.put(error)
                break
        return block if len(places) == len(block) else block.take(np.array(places, np.int64))


def _bool_error(verb: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"The function given to {verb}() must return one bool, but {what}. Compare numbers, as in"
        " `x % 2 == 1`, and reduce an array with `.all()` or `.any()`."
    )


def _cores() -> int:
    return max(2, min(8, os.cpu_count() or 2))


def _bytes_of(block: Block) -> int:
    """Estimate the size of one element in bytes."""
    row = block.rows()[0]
    return max(64, sum(getattr(leaf, "nbytes", None) or len(leaf) for leaf in row))
