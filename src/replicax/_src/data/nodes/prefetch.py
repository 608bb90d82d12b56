"""The prefetch node, and the worker threads of a parallel map. Both end with their stream."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, final

from replicax._src.base.threads import new_thread
from replicax._src.data.element_blocks import Block, Row
from replicax._src.data.node import Node, PassingNode, PendingFailure, Stream
from replicax._src.data.seeds import Run

_AUTOTUNE_SIZE = 8
_JOIN_SECONDS = 1.0
_QUICK_CALL = 3e-5  # seconds per call below which one thread is as fast as several
_SLOW_PULL = 1e-3  # seconds to wait for one thread before waking others


@final
@dataclass(frozen=True, eq=False)
class PrefetchNode(PassingNode):
    """The input, with up to `buffer_size` elements produced ahead in a thread."""

    buffer_size: int

    @property
    def yields_indices(self) -> bool:
        """Always False: the thread reads elements, so blocks contain data."""
        return False

    @property
    def peeked(self) -> Node:
        """The input, read without a thread."""
        return self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass; the thread starts with the first pull."""
        stream = self.input.open(run)
        if self.buffer_size == 0:
            return stream
        size = self.buffer_size if self.buffer_size > 0 else _AUTOTUNE_SIZE
        return PrefetchStream(stream, size, step=1 if self.input.calls_user_code else size)


class _Shared:
    """The buffer between the thread and the consumer; it must not refer to the consumer's stream.

    Otherwise the thread would keep that stream alive, and garbage collection could not stop it.
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
        self.last = PendingFailure()

    def room(self) -> int:
        """Wait until the buffer has room; return for how many elements, or 0 when stopped."""
        with self.changed:
            self.changed.wait_for(lambda: self.is_stopped or self.count < self.capacity)
            return 0 if self.is_stopped else min(self.step, self.capacity - self.count)

    def put(self, item: Block | Exception) -> None:
        """Append a block, or the error that an element raised."""
        with self.changed:
            self.ready.append(item)
            self.count += 1 if isinstance(item, Exception) else len(item)
            self.changed.notify_all()

    def release(self, count: int) -> None:
        """Free the room of `count` elements that the consumer has received."""
        with self.changed:
            self.count -= count
            self.changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        """Mark the end of the input, or the `error` that ended the thread."""
        with self.changed:
            self.is_done = True
            if error is not None:
                self.last.put(error)
            self.changed.notify_all()

    def stop(self) -> None:
        """Request the thread to stop, and drop the buffered blocks."""
        with self.changed:
            self.is_stopped = True
            self.ready.clear()
            self.changed.notify_all()


@final
class PrefetchStream(Stream):
    """The elements of a stream, produced in a thread, `step` at a time."""

    def __init__(self, stream: Stream, capacity: int, *, step: int) -> None:
        self._shared = _Shared(stream, capacity, step)
        self._thread: threading.Thread | None = None
        self._left: Block | None = None
        self._pending = PendingFailure()

    def pull(self, limit: int) -> Block | None:
        """Return the next block, waiting for it if necessary."""
        if self._thread is None:
            self._start()
        block = self._left if self._left is not None else self._next_block()
        self._left = None
        if block is None:
            return None
        if len(block) > limit:
            self._left = block.slice(limit, len(block))
            block = block.slice(0, limit)
        self._shared.release(len(block))
        return block

    def skip(self, count: int) -> int:
        """Skip in the input if the thread has not started, otherwise read and drop."""
        if self._thread is None:
            return self._shared.stream.skip(count)
        return super().skip(count)

    def close(self) -> None:
        """Stop the thread, which closes the input."""
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

    def _next_block(self) -> Block | None:
        """Wait for the next block; return None at the end, or raise the error of an element."""
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready or shared.is_done)
            item = shared.ready.popleft() if shared.ready else None
        if isinstance(item, Block):
            return item
        if item is None:
            shared.last.raise_stored()
            return None
        self._pending.put(item)
        del item  # the traceback would refer to this frame, and the frame to the error
        shared.release(1)
        self._pending.raise_stored()
        return None


def _read_ahead(shared: _Shared) -> None:
    """Fill the buffer until the input ends or the consumer stops: the thread's function."""
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
            del item  # otherwise this frame would keep an extra batch alive
    except BaseException as caught:
        error = caught
    shared.stream.close()
    shared.finish(error)


@final
class Calls:
    """Ordered calls of a function in worker threads.

    The threads refer to this object and not to the stream that uses it, so that dropping the
    stream stops them. Threads take one element at a time, so that calls may wait for each other,
    and exchange elements and results through atomic operations of deque and dict, without a lock.
    While calls are quick, only one thread is woken; the others follow if it takes too long.
    """

    def __init__(self, function: Callable[[Any, int], Row], max_threads: int) -> None:
        self._function = function
        self._max_threads = max_threads
        self._num_threads = 0
        self._todo: deque[tuple[int, Any, int]] = deque()  # ticket, element, index in messages
        self._done: dict[int, Row | BaseException] = {}
        self._added = 0  # elements added so far
        self._delivered = 0  # results delivered so far
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._arrived: SimpleQueue[None] = SimpleQueue()
        self._awaited = -1
        self._is_quick = False

    def __len__(self) -> int:
        return self._added - self._delivered

    def room(self, wanted: int) -> int:
        """Return how many elements to add now: enough for `wanted` results and all threads."""
        # Quick calls need no queue for the other threads: waking them costs more than the calls.
        if self._is_quick and len(self) >= wanted:
            return 0
        return max(wanted, self._max_threads) - len(self)

    def add(self, elements: Sequence[Any], index: int) -> None:
        """Queue `elements`; `index` is the position of the first one in error messages."""
        numbers = range(self._added, self._added + len(elements))
        self._todo.extend(zip(numbers, elements, range(index, index + len(elements)), strict=True))
        self._added += len(elements)
        self._wake_threads(1 if self._is_quick else len(elements))

    def fail(self, error: Exception) -> None:
        """Queue the error that reading an element raised, in that element's position."""
        self._done[self._added] = error
        self._added += 1

    def next(self, limit: int) -> tuple[list[Row], BaseException | None]:
        """Return up to `limit` results in order, and the error that follows them, if any."""
        done, rows = self._done, list[Row]()
        end = min(self._delivered + limit, self._added)
        if self._is_quick:
            self._wait_for(end - 1, _SLOW_PULL)
        while self._delivered < end:
            if self._delivered not in done:
                self._wake_threads(len(self._todo))
                self._wait_for(self._delivered)
            result = done.pop(self._delivered)
            self._delivered += 1
            if isinstance(result, BaseException):
                return rows, result
            rows.append(result)
        return rows, None

    def stop(self) -> None:
        """Drop queued elements and stop the threads."""
        self._todo.clear()
        for _ in range(self._num_threads):
            self._wake.put(False)

    def _wake_threads(self, num_threads: int) -> None:
        """Start missing threads, up to the maximum, and wake as many as requested."""
        threads = min(num_threads, self._max_threads)
        for _ in range(threads - self._num_threads):
            new_thread(self._run_worker, name="replicax-map", stop=self.stop).start()
            self._num_threads += 1
        for _ in range(threads):
            self._wake.put(True)

    def _wait_for(self, number: int, timeout: float | None = None) -> None:
        """Wait until result `number` has arrived, or for `timeout` seconds per arrival."""
        # Threads check this after storing a result: set it before checking `_done`, or a result
        # stored in between would not be signalled.
        self._awaited = number
        with suppress(Empty):
            while number not in self._done:
                self._arrived.get(timeout=timeout)

    def _run_worker(self) -> None:
        while self._wake.get():
            began = time.perf_counter()
            calls = self._drain()
            if calls:
                self._is_quick = time.perf_counter() - began < _QUICK_CALL * calls

    def _drain(self) -> int:
        """Call the function on queued elements until the queue is empty; return how many."""
        todo, done, function = self._todo, self._done, self._function
        calls = 0
        while True:
            try:
                number, element, index = todo.popleft()
            except IndexError:
                return calls
            try:
                done[number] = function(element, index)
            except BaseException as error:  # raised by the consumer, in order
                done[number] = error
            if self._awaited == number:
                self._arrived.put(None)
            calls += 1
