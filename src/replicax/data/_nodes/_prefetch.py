"""Reading ahead in a thread that ends with its stream."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import final

from replicax._threads import new_thread
from replicax.data._blocks import Block
from replicax.data._node import Due, Node, PassingNode, Stream
from replicax.data._seeds import Run

_AUTOTUNE_SIZE = 8
_JOIN_SECONDS = 1.0


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
