"""Threads that end before Python does.

A thread that comes back from JAX after the interpreter has ended is killed by Python, which C++
answers by aborting the process: the program's last word would be SIGABRT, and its code 134. So the
end of the program tells every thread made here to end, and waits for it, also for those whose
owner is gone.
"""

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any
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
