"""Threads that are joined at exit (`new_thread`), and `deferred_signals`.

Threads joined at exit. Python kills a thread that returns from JAX's C++ code after the interpreter
has shut down, upon which C++ aborts the process with SIGABRT, exit code 134. So an `atexit`
function stops and joins all threads made by `new_thread`, even if their owners no longer exist.

Deferred signals. Python runs signal handlers in the main thread, between any two bytecodes. A
handler that raises, such as the one for Ctrl-C, could end a compiled call after it has consumed the
old arrays and before the variables have the new ones. In a ``with deferred_signals:`` block,
handlers wait:

- Each handler is replaced by a stand-in, which queues the signal. When the block ends, the real
  handlers are called for all queued signals. No signal is lost, or delayed longer than the block.
- Nothing raises between the last replacement and the first restoration, because every handler that
  could is replaced. Before that, the critical change has not started; afterwards, it is complete.
- An interrupted entry or exit may leave stand-ins behind. A stand-in defers only while the frame of
  the block is on the stack; at any other time it restores the real handler and calls it. So a
  leftover stand-in cannot swallow a signal.
- Other threads run no handlers; for them the block does nothing.

All handlers are replaced in one call into C, in which no Python code runs except handlers; a block
costs about 3 microseconds. Masking signals would not work: the kernel delivers a signal to any
thread that does not mask it, and Python still runs the handler in the main thread.
"""

import _signal  # type: ignore[import-not-found]
import atexit
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from operator import call
from types import FrameType
from typing import Any, final
from weakref import WeakKeyDictionary

_PATIENCE = 5.0  # seconds to wait for all threads at exit
_stops: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()


def new_thread(
    target: Callable[..., object],
    *args: Any,
    name: str,
    stop: Callable[[], object] = lambda: None,
) -> threading.Thread:
    """Return a daemon thread, not yet started, that is stopped and joined at exit.

    Args:
        target: The function to run.
        *args: Its arguments.
        name: The name of the thread.
        stop: Requests the thread to end; called at exit, and by the thread's owner.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _stops[thread] = stop
    return thread


@atexit.register
def _end_all() -> None:
    running = [(thread, stop) for thread, stop in list(_stops.items()) if thread.is_alive()]
    for _, stop in running:
        stop()
    until = time.monotonic() + _PATIENCE
    for thread, _ in running:
        thread.join(max(0.0, until - time.monotonic()))


_Handler = Callable[[int, FrameType | None], Any]

# The C functions behind the module `signal`, whose wrappers run Python code to return enums.
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal
_NUMBERS = sorted(int(n) for n in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_main = threading.main_thread().ident


@final
class DeferredSignals:
    """A context manager that defers signals; it has one instance, for the main thread."""

    def __init__(self) -> None:
        self._owner: FrameType | None = None
        self._depth = 0
        self._waiting: deque[Callable[[], Any]] = deque()
        self._real: dict[int, _Handler] = {}
        self._seen: list[Any] = []
        self._stand_in: _Handler = self._note

    def __enter__(self) -> None:
        if threading.get_ident() != _main:
            return
        frame = sys._getframe(1)  # noqa: SLF001
        # The owner may have left without `__exit__`, if a signal interrupted that: then its frame
        # is no longer on the stack, and this block is not nested in it.
        if self._owner is not None and _is_running(self._owner, frame):
            self._depth += 1
        else:
            self._begin(frame)

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != _main:
            return
        if self._depth:
            self._depth -= 1
            return
        # From here on, a stand-in that is not restored yet passes its signal on.
        self._owner = None
        try:
            self._restore()
        finally:
            self.deliver()

    def deliver(self) -> None:
        """Run the handlers of deferred signals; call where an exception does no harm.

        Raises:
            BaseException: An exception that a handler raised.
        """
        waiting = self._waiting
        if not waiting or threading.get_ident() != _main:
            return
        try:
            # Pop and call in C: no other handler can run in between and lose a signal.
            _exhaust(map(call, map(call, repeat(waiting.popleft, len(waiting)))))
        finally:
            self.deliver()  # the signals after one whose handler raised

    def let_in(self, fn: Callable[[], Any]) -> Any:
        """Call the user's function ``fn`` inside the block, with signals not deferred meanwhile."""
        owner = self._owner
        if owner is None or self._depth or threading.get_ident() != _main:
            return fn()
        self.__exit__()
        try:
            return fn()
        finally:
            self._begin(owner)

    def _begin(self, frame: FrameType) -> None:
        found = list(map(_get, _NUMBERS))
        if found != self._seen:
            self._learn(found)
        self._depth = 0
        # Set the owner first: without one, a stand-in takes itself for a leftover and removes
        # itself.
        claim = map(setattr, (self,), ("_owner",), (frame,))
        try:
            _exhaust(chain(claim, map(_set, self._real, repeat(self._stand_in))))
        except BaseException:
            self._owner = None
            self._restore()
            raise

    def _learn(self, found: list[Any]) -> None:
        # A leftover stand-in keeps standing in for the same handler.
        previous = self._real
        self._real = {
            number: previous[number] if handler is self._stand_in else handler
            for number, handler in zip(_NUMBERS, found, strict=True)
            if callable(handler)
        }
        self._seen = found

    def _restore(self) -> None:
        for number, real in self._real.items():
            if _get(number) is self._stand_in:  # code in the block may have installed another
                _set(number, real)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Queue a signal inside the block; this is the stand-in for every handler."""
        real = self._real[number]
        if self._owner is not None and _is_running(self._owner, frame):
            self._waiting.append(partial(real, number, frame))
            return
        try:  # left over from a block that has ended
            _set(number, real)
        finally:
            real(number, frame)


def _exhaust(steps: Iterator[Any]) -> None:
    """Run all steps in one call into C, between which Python runs no signal handlers."""
    deque(steps, maxlen=0)


def _is_running(owner: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not owner:
        frame = frame.f_back
    return frame is not None


deferred_signals = DeferredSignals()
