"""A function of each element: map and filter."""

import os
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import numpy as np

from replicax.data._blocks import Block, Row
from replicax.data._errors import InvalidArgumentError
from replicax.data._functions import ElementFunction
from replicax.data._node import AUTOTUNE, UNKNOWN_CARDINALITY, Node, PlacesAhead, Stream, UnaryNode
from replicax.data._probe import KnownSpec, mapped_spec
from replicax.data._seeds import Run

_MOST_ROWS = 1024  # rows given to a function at once
_SLOW_CALL = 3e-4  # seconds; from here on AUTOTUNE thinks threads worth their cost


@final
@dataclass(frozen=True, eq=False)
class MapNode(UnaryNode):
    """The function's results in the order of the elements."""

    function: ElementFunction
    num_parallel_calls: int | None = None
    known_spec: KnownSpec = field(default_factory=KnownSpec)

    def with_inputs(self, *inputs: Node) -> Self:
        """The same function over another input, whose results may have other shapes."""
        (node,) = inputs
        return replace(self, input=node, known_spec=KnownSpec())

    @property
    def element_spec(self) -> Any:
        """Learnt by calling the function on the first element."""
        return self.known_spec.get(lambda: mapped_spec(self.input, self.function))

    @property
    def calls_user_code(self) -> bool:
        """Yes, unless blocks are known to do."""
        return not self.function.is_vectorized or self.input.calls_user_code

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        stream = self.input.open(run)
        if self.input.gives_places:
            stream = PlacesAhead(stream)
        return _MapStream(stream, self.function, self.num_parallel_calls)


@final
class _MapStream(Stream):
    def __init__(self, stream: Stream, function: ElementFunction, workers: int | None) -> None:
        self._stream = stream
        self._function = function
        self._workers = workers
        self._index = 0
        self._error: Exception | None = None
        self._pending: deque[Future[Row]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def pull(self, limit: int) -> Block | None:
        if self._error is not None:
            raise self._error
        limit = min(limit, _MOST_ROWS)
        if self._workers not in (None, 1, AUTOTUNE) and (
            self._pending or limit == 1 or self._function.is_elementwise
        ):
            return self._pull_parallel(limit)
        block = self._stream.pull(limit)
        if block is None:
            return None
        if len(block) == 1 and self._workers is None and not self._function.vectorize:
            row = self._function.row(block.elements()[0], self._index)
            self._index += 1
            return self._function.rows_block([row])
        result = self._function.block(block)
        if result is None:
            return self._one_by_one(block)
        self._index += len(block)
        return result

    def skip(self, count: int) -> int:
        done = 0
        while self._pending and done < count:
            self._pending.popleft().result()
            done += 1
        done += self._stream.skip(count - done)
        self._index += done
        return done

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._stream.close()

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _one_by_one(self, block: Block) -> Block:
        rows: list[Row] = []
        began = time.perf_counter()
        for element in block.elements():
            try:
                rows.append(self._function.row(element, self._index))
            except Exception as error:
                if not rows:
                    raise
                self._error = error
                break
            self._index += 1
        if self._workers == AUTOTUNE:
            is_slow = (time.perf_counter() - began) / len(rows) > _SLOW_CALL
            self._workers = _cores() if is_slow else None
        return self._function.rows_block(rows)

    def _pull_parallel(self, limit: int) -> Block | None:
        self._submit(max(limit, self._workers or 1))
        rows: list[Row] = []
        while self._pending and len(rows) < limit:
            try:
                rows.append(self._pending.popleft().result())
            except Exception as error:
                if not rows:
                    raise
                self._error = error
                break
        if not rows:
            self.close()
            return None
        return self._function.rows_block(rows)

    def _submit(self, wanted: int) -> None:
        while len(self._pending) < wanted:
            block = self._stream.pull(wanted - len(self._pending))
            if block is None:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, "replicax-map")
            for element in block.elements():
                task = self._pool.submit(self._function.row, element, self._index)
                self._pending.append(task)
                self._index += 1


@final
@dataclass(frozen=True, eq=False)
class FilterNode(UnaryNode):
    """The elements for which the function is true."""

    predicate: ElementFunction

    @property
    def cardinality(self) -> int:
        """Not known before looking at every element."""
        return 0 if self.input.cardinality == 0 else UNKNOWN_CARDINALITY

    @property
    def calls_user_code(self) -> bool:
        """Yes, unless blocks are known to do."""
        return not self.predicate.is_vectorized or self.input.calls_user_code

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _FilterStream(self.input.open(run), self.predicate)


@final
class _FilterStream(Stream):
    def __init__(self, stream: Stream, predicate: ElementFunction) -> None:
        self._stream = stream
        self._predicate = predicate
        self._index = 0

    def pull(self, limit: int) -> Block | None:
        while True:
            block = self._stream.pull(min(limit, _MOST_ROWS))
            if block is None:
                return None
            kept = self._keep(block)
            if len(kept):
                return kept

    def close(self) -> None:
        self._stream.close()

    def _keep(self, block: Block) -> Block:
        verdicts = self._predicate.block(block)
        if verdicts is None:
            answers = [
                self._answer(element, self._index + k) for k, element in enumerate(block.elements())
            ]
            mask = np.array(answers, bool)
        else:
            mask = verdicts.columns()[0].astype(bool)
        self._index += len(block)
        return block if mask.all() else block.take(np.flatnonzero(mask))

    def _answer(self, element: Any, index: int) -> bool:
        answer = self._predicate.call(element, index)
        if np.ndim(answer) or not isinstance(answer, (bool, np.bool_, int, np.integer, np.ndarray)):
            raise InvalidArgumentError(
                f"The function given to filter() must return one bool, but for element {index} it"
                f" returned {answer!r}. Reduce an array with `.all()` or `.any()`."
            )
        return bool(answer)


def _cores() -> int:
    return max(2, min(8, os.cpu_count() or 2))
