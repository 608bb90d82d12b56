"""Threads that end with their stream: reading ahead, and calls of a function."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, final

from replicax._threads import new_thread
from replicax.data._blocks import Block, Row
from replicax.data._node import Due, Node, PassingNode, Stream
from replicax.data._seeds import Run

_AUTOTUNE_SIZE = 8
_JOIN_SECONDS = 1.0
_QUICK_CALL = 3e-5  # seconds; up to here one thread makes the calls as fast as several
_SLOW_PULL = 1e-3  # seconds that one thread may take before others help


@final
@dataclass(frozen=True, eq=False)
class PrefetchNode(PassingNode):
    """Up to ``buffer_size`` elements are made before they are asked for."""

    buffer_size: int

    @property
    def gives_places(self) -> bool:
        """The thread fetches."""
        return False

    @property
    def peeked(self) -> Node:
        """Without a thread."""
        return self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass; the thread starts with the first pull."""
        stream = self.input.open(run)
        if self.buffer_size == 0:
            return stream
        size = self.buffer_size if self.buffer_size > 0 else _AUTOTUNE_SIZE
        return PrefetchStream(stream, size, step=1 if self.input.calls_user_code else size)


class _Shared:
    """What thread and consumer share; it must not refer to the consumer's stream.

    Otherwise the thread would keep that stream alive, and garbage collection could not end it.
    """

    def __init__(self, stream: Stream, capacity: int, step: int) -> None:
        self.stream = stream
        self.capacity = capacity
        self.step = step
        self.ready: deque[Block | Exception] = deque()
        self.count = 0
        self.changed = threading.Condition()
        self.is_done = False
        self.is_stopped = False
        self.last = Due()

    def room(self) -> int:
        """Wait for room; how many elements, 0 when stopped."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_stopped or self.count < self.capacity)
            return 0 if self.is_stopped else min(self.step, self.capacity - self.count)

    def put(self, item: Block | Exception) -> None:
        """Add a block, or the error of an element."""
        with self.changed:
            self.ready.append(item)
            self.count += 1 if isinstance(item, Exception) else len(item)
            self.changed.notify_all()

    def make_room(self, count: int) -> None:
        """Say that elements have been handed out."""
        with self.changed:
            self.count -= count
            self.changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        """No more blocks: the input has ended, or its thread has."""
        with self.changed:
            self.is_done = True
            if error is not None:
                self.last.put(error)
            self.changed.notify_all()

    def stop(self) -> None:
        """Ask the thread to end."""
        with self.changed:
            self.is_stopped = True
            self.ready.clear()
            self.changed.notify_all()


@final
class PrefetchStream(Stream):
    """The input's elements, made in a thread, ``step`` at a time."""

    def __init__(self, stream: Stream, capacity: int, *, step: int) -> None:
        self._shared = _Shared(stream, capacity, step)
        self._thread: threading.Thread | None = None
        self._left: Block | None = None
        self._due = Due()

    def pull(self, limit: int) -> Block | None:
        """Wait for a block."""
        if self._thread is None:
            self._start()
        block = self._left if self._left is not None else self._take()
        self._left = None
        if block is None:
            return None
        if len(block) > limit:
            self._left = block.slice(limit, len(block))
            block = block.slice(0, limit)
        self._shared.make_room(len(block))
        return block

    def skip(self, count: int) -> int:
        """Before the thread starts the input skips by itself."""
        if self._thread is None:
            return self._shared.stream.skip(count)
        return super().skip(count)

    def close(self) -> None:
        """End the thread, which closes the input."""
        self._shared.stop()
        if self._thread is None:
            self._shared.stream.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)

    def __del__(self) -> None:
        self._shared.stop()

    def _start(self) -> None:
        shared = self._shared
        self._thread = new_thread(_read_ahead, shared, name="replicax-prefetch", stop=shared.stop)
        self._thread.start()

    def _take(self) -> Block | None:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready or shared.is_done)
            item = shared.ready.popleft() if shared.ready else None
        if isinstance(item, Block):
            return item
        if item is None:
            shared.last.settle()
            return None
        self._due.put(item)
        del item
        shared.make_room(1)
        self._due.settle()
        return None


def _read_ahead(shared: _Shared) -> None:
    error: BaseException | None = None
    try:
        while room := shared.room():
            try:
                item: Block | Exception | None = shared.stream.pull(room)
            except Exception as failed:
                item = failed
            if item is None:
                break
            shared.put(item)
            del item  # or this frame would keep one batch more alive than was asked for
    except BaseException as caught:
        error = caught
    shared.stream.close()
    shared.finish(error)


@final
class Calls:
    """Calls of a function in threads, which know this object and not the stream that it serves.

    Each thread takes one element after the other, so that a call may wait for others; no element
    costs a lock. While calls are quick one thread is woken for all of them, and the others only if
    they take long after all.
    """

    def __init__(self, function: Callable[[Any, int], Row], most_threads: int) -> None:
        self._function = function
        self._most_threads = most_threads
        self._num_threads = 0
        self._todo: deque[tuple[int, Any, int]] = deque()  # number, element, and index for messages
        self._done: dict[int, Row | BaseException] = {}
        self._added = 0  # elements that came in, and results that were given out
        self._given = 0
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._arrived: SimpleQueue[None] = SimpleQueue()
        self._awaited = -1
        self._is_quick = False

    def __len__(self) -> int:
        return self._added - self._given

    def room(self, wanted: int) -> int:
        """How many elements to add now; quick calls are not worth waking a thread for each."""
        if self._is_quick and len(self) >= wanted:
            return 0
        return max(wanted, self._most_threads) - len(self)

    def add(self, elements: Sequence[Any], index: int) -> None:
        """Elements to call the function on, the first of which has that number for messages."""
        numbers = range(self._added, self._added + len(elements))
        self._todo.extend(zip(numbers, elements, range(index, index + len(elements)), strict=True))
        self._added += len(elements)
        self._call_for(1 if self._is_quick else len(elements))

    def fail(self, error: Exception) -> None:
        """In the place of an element: what making it raised."""
        self._done[self._added] = error
        self._added += 1

    def next(self, limit: int) -> tuple[list[Row], BaseException | None]:
        """The results of the next elements, in their order, and the error that comes after them."""
        done, rows = self._done, list[Row]()
        end = min(self._given + limit, self._added)
        if self._is_quick:
            self._wait_for(end - 1, _SLOW_PULL)
        while self._given < end:
            if self._given not in done:
                self._call_for(len(self._todo))
                self._wait_for(self._given)
            result = done.pop(self._given)
            self._given += 1
            if isinstance(result, BaseException):
                return rows, result
            rows.append(result)
        return rows, None

    def stop(self) -> None:
        """Let the threads end."""
        self._todo.clear()
        for _ in range(self._num_threads):
            self._wake.put(False)

    def _call_for(self, num_threads: int) -> None:
        threads = min(num_threads, self._most_threads)
        for _ in range(threads - self._num_threads):
            new_thread(self._work, name="replicax-map", stop=self.stop).start()
            self._num_threads += 1
        for _ in range(threads):
            self._wake.put(True)

    def _wait_for(self, number: int, timeout: float | None = None) -> None:
        self._awaited = number  # a thread looks here after it has put a result down
        with suppress(Empty):
            while number not in self._done:
                self._arrived.get(timeout=timeout)

    def _work(self) -> None:
        while self._wake.get():
            began = time.perf_counter()
            calls = self._call_all()
            if calls:
                self._is_quick = time.perf_counter() - began < _QUICK_CALL * calls

    def _call_all(self) -> int:
        todo, done, function = self._todo, self._done, self._function
        calls = 0
        while True:
            try:
                number, element, index = todo.popleft()
            except IndexError:
                return calls
            try:
                done[number] = function(element, index)
            except BaseException as error:  # raised in its turn
                done[number] = error
            if self._awaited == number:
                self._arrived.put(None)
            calls += 1
