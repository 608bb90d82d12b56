"""Threads that end before Python does, and signals that wait until a change is whole.

Threads that end before Python does.

A thread that comes back from JAX after the interpreter has ended is killed by Python, which C++
answers by aborting the process: the program's last word would be SIGABRT, and its code 134. So the
end of the program tells every thread made here to end, and waits for it, also for those whose
owner is gone.

Interrupts: signals that wait while something is changed that must be whole.

Python runs the handlers of signals in the main thread, between any two steps of its code. A handler
that raises, such as the one for Ctrl-C, may so end a compiled call after it has consumed the old
arrays and before the variables have the new ones. In a ``with held:`` block handlers wait:

- Each handler is replaced by a stand-in, which notes that the signal came; what came is told to the
  real handlers when the block ends, by calling them as Python would have. No signal is lost, and
  none is kept longer than the block.
- Nothing raises between the last replacement and the first restoration, as every handler that
  could is replaced. Before, nothing was changed yet; afterwards, all is.
- An interrupted entry or exit may leave stand-ins behind. A stand-in defers only as long as the
  frame that holds the block is on the stack; called at any other time it puts the real handler back
  and calls it. So it can make no signal disappear.
- Other threads run no handlers, and pass through.

The replacement is one call into C, in which no Python code runs but handlers: about 3 microseconds
for a block. Masking signals would not do: the system hands a signal to any thread that does not
mask it, and Python runs the handler in the main thread all the same.
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

_PATIENCE = 5.0  # seconds that all of them may take at the end of the program
_stops: WeakKeyDictionary[threading.Thread, Callable[[], object]] = WeakKeyDictionary()


def new_thread(
    target: Callable[..., object],
    *args: Any,
    name: str,
    stop: Callable[[], object] = lambda: None,
) -> threading.Thread:
    """A thread, to be started, that does not keep the program from ending.

    Args:
        target: What it runs.
        *args: With what.
        name: Its name.
        stop: Asks it to end; called at the end of the program, and to be called by its owner.
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

# The functions in C below those of the module `signal`, which make enumerations in Python.
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal
_NUMBERS = sorted(int(n) for n in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_main = threading.main_thread().ident


@final
class Held:
    """The context in which signals wait; there is one, `held`, for the one thread with handlers."""

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
        self._owner = None
        try:
            self._restore()
        finally:
            self.deliver()

    def deliver(self) -> None:
        """Let the handlers of signals that came run now; a place where an exception does no harm.

        Raises:
            BaseException: What a handler raised.
        """
        waiting = self._waiting
        if not waiting or threading.get_ident() != _main:
            return
        try:
            # Taken and called without a step of Python in between.
            _exhaust(map(call, map(call, repeat(waiting.popleft, len(waiting)))))
        finally:
            self.deliver()

    def let_in(self, fn: Callable[[], Any]) -> Any:
        """Call a function of the user's inside the block, with the handlers at work meanwhile."""
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
        claim = map(setattr, (self,), ("_owner",), (frame,))
        try:
            _exhaust(chain(claim, map(_set, self._real, repeat(self._stand_in))))
        except BaseException:
            self._owner = None
            self._restore()
            raise

    def _learn(self, found: list[Any]) -> None:
        # A stand-in that was left behind stands for what it stood for.
        kept = self._real
        self._real = {
            number: kept[number] if handler is self._stand_in else handler
            for number, handler in zip(_NUMBERS, found, strict=True)
            if callable(handler)
        }
        self._seen = found

    def _restore(self) -> None:
        for number, real in self._real.items():
            if _get(number) is self._stand_in:  # not another one that code in the block installed
                _set(number, real)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The stand-in for every handler."""
        real = self._real[number]
        if self._owner is not None and _is_running(self._owner, frame):
            self._waiting.append(partial(real, number, frame))
            return
        try:
            _set(number, real)
        finally:
            real(number, frame)


def _exhaust(steps: Iterator[Any]) -> None:
    """Do all steps in one call into C, during which Python starts no handler by itself."""
    deque(steps, maxlen=0)


def _is_running(owner: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not owner:
        frame = frame.f_back
    return frame is not None


held = Held()
