"""Prefetch: elements made ready in a thread that ends with its consumer.

The queues are those that are one call into C, so that a signal's handler that raises in the
consumer can come before or after a step of theirs, never within: no element is lost between the
thread and the consumer, and no lock is left in a wrong state.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import call, itemgetter
from queue import Empty, SimpleQueue
from typing import Any

from replicax._faults import fault_point
from replicax._interrupts import held
from replicax._threads import new_thread
from replicax.input._split import attempts

_END = object()
_PATIENCE = 5.0  # seconds that a thread may take to end


class Prefetch:
    """Elements that are made ahead of time, at most ``depth`` of them."""

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        depth: int,
        stop: threading.Event | None = None,
    ) -> None:
        self._ready: SimpleQueue[Any] = SimpleQueue()
        self._room: SimpleQueue[None] = SimpleQueue()
        for _ in range(max(depth, 1)):
            self._room.put(None)
        self._stop = stop or threading.Event()
        self._taken: deque[Any] = deque()
        self._is_done = False
        # The thread knows the queues and the event, never this object: dropping it ends the thread.
        end = partial(_end, self._stop, self._room, self._ready)
        self._finalizer = weakref.finalize(self, end)
        arguments = make, self._ready, self._room, self._stop
        self._thread = new_thread(_produce, *arguments, name="replicax-feed", stop=end)
        with held:
            self._thread.start()

    def move_to(self, elements: deque[Any]) -> bool:
        """Append the next element to ``elements``, wholly or not at all; False at the end.

        Raises:
            Exception: What making the element raised.
        """
        if self._is_done:
            return False
        if not self._taken:
            taken = map(self._taken.append, map(call, (self._ready.get,)))
            deque(chain(taken, map(self._room.put, (None,))), maxlen=0)
        kind, value = self._taken[0]
        if kind is not None:
            elements.extend(map(itemgetter(1), map(call, (self._taken.popleft,))))
            return True
        self.close()
        if value is _END:
            return False
        raise value

    def close(self) -> None:
        """End the thread."""
        self._is_done = True
        with held:
            self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)


def _produce(
    make: Callable[[], Iterator[Any]],
    ready: SimpleQueue[Any],
    room: SimpleQueue[None],
    stop: threading.Event,
) -> None:
    last: Any = _END
    try:
        elements = make()
        try:
            for element in attempts(elements):
                room.get()
                if stop.is_set():
                    return
                fault_point("input")
                ready.put((True, element))
                del element  # what failed would be kept alive, and its trace with the consumer
        finally:
            close = getattr(elements, "close", None)
            if close is not None:
                close()
    except BaseException as error:  # handed to the consumer
        last = error
    ready.put((None, last))


def _end(stop: threading.Event, room: SimpleQueue[None], ready: SimpleQueue[Any]) -> None:
    stop.set()
    room.put(None)
    while True:
        try:
            ready.get_nowait()
        except Empty:
            return
