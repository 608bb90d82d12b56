"""Prefetch: elements made ready in a thread that ends with its consumer."""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_END = object()


class Prefetch(Iterator[Any]):
    """An iterator whose elements are made ahead of time, at most ``depth`` of them."""

    def __init__(
        self,
        make: Callable[[], Iterator[Any]],
        depth: int,
        stop: threading.Event | None = None,
    ) -> None:
        self._ready: queue.Queue[Any] = queue.Queue(depth)
        self._stop = stop or threading.Event()
        self._is_done = False
        self._thread = threading.Thread(
            target=_produce, args=(make, self._ready, self._stop), name="replicax-feed", daemon=True
        )
        self._thread.start()
        # The thread knows the queue and the event, never this object: dropping it ends the thread.
        self._finalizer = weakref.finalize(self, _end, self._stop, self._ready)

    def __next__(self) -> Any:
        if self._is_done:
            raise StopIteration
        kind, value = self._ready.get()
        if kind is not None:
            return value
        self._is_done = True
        self.close()
        if value is _END:
            raise StopIteration
        raise value

    def close(self) -> None:
        """End the thread."""
        self._is_done = True
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)


def _produce(
    make: Callable[[], Iterator[Any]], ready: queue.Queue[Any], stop: threading.Event
) -> None:
    last: Any = _END
    try:
        elements = make()
        try:
            for element in elements:
                if not _put(ready, (True, element), stop):
                    return
        finally:
            close = getattr(elements, "close", None)
            if close is not None:
                close()
    except BaseException as error:  # handed to the consumer
        last = error
    _put(ready, (None, last), stop)


def _put(ready: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _end(stop: threading.Event, ready: queue.Queue[Any]) -> None:
    stop.set()
    while True:
        try:
            ready.get_nowait()
        except queue.Empty:
            return
