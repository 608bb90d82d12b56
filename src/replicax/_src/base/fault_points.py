"""Fault injection: named points in replicax at which tests can trigger a failure.

``REPLICAX_FAULT="commit-write:kill@2"`` kills the process the second time that it reaches the point
``commit-write``; several faults are separated by commas. Without the variable, a point costs one
check of an empty dictionary. ``REPLICAX_FAULT_LOG`` names a file to which faults are logged.
"""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from replicax._src.base.errors import ReplicaxError

FAULT_VARIABLE = "REPLICAX_FAULT"
LOG_VARIABLE = "REPLICAX_FAULT_LOG"

POINTS = (
    "join",  # before a worker connects to the others
    "register",  # before a worker registers with JAX's coordination service
    "registered",  # after that, before it learns which devices the others have
    "connect",  # in an elastic run that has re-formed, before the devices connect to each other
    "collective",  # before a collective operation
    "collected",  # after a collective operation
    "barrier",  # in an elastic step, after the new values are computed, before the barrier
    "input",  # before a batch is read, in the prefetching thread
    "commit-begin",  # after the folder of a checkpoint is created
    "commit-write",  # after this worker's arrays are written
    "commit-manifest",  # after all arrays are written, before the manifest
    "committed",  # after the manifest is written
    "prune",  # after the manifest of an old checkpoint is removed, before its arrays
    "restore",  # before a checkpoint is read
    "leave",  # before a worker disconnects
)


def _busy() -> NoReturn:
    while True:
        pass


def _raise(error: BaseException) -> Callable[[], NoReturn]:
    def now() -> NoReturn:
        raise error

    return now


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ACTIONS: dict[str, Callable[[], object]] = {
    "kill": _signal(signal.SIGKILL),
    "term": _signal(signal.SIGTERM),
    "int": _signal(signal.SIGINT),
    "stop": _signal(signal.SIGSTOP),
    "abort": os.abort,
    "exit": lambda: sys.exit(0),
    "vanish": lambda: os._exit(0),
    "raise": _raise(ValueError("a fault that REPLICAX_FAULT asked for")),
    "memory": _raise(MemoryError("a fault that REPLICAX_FAULT asked for")),
    "full": _raise(OSError(errno.ENOSPC, "No space left on device")),
    "broken": _raise(OSError(errno.EIO, "Input/output error")),
    "denied": _raise(OSError(errno.EACCES, "Permission denied")),
    "hang": lambda: time.sleep(10**6),
    "busy": _busy,
    "slow": lambda: time.sleep(0.5),
}


def fault_point(name: str) -> None:
    """Trigger the fault, if any, that is armed for this pass through the point ``name``."""
    if _waiting:
        _pass(name)


def _pass(name: str) -> None:
    with _lock:
        due = [fault for fault in _waiting.get(name, ()) if fault[1] == 1]
        _waiting[name] = [(action, left - 1) for action, left in _waiting.get(name, ())]
    for action, _ in due:
        _note(f"{time.time()} {name} {action}\n")
        ACTIONS[action]()


def _note(line: str) -> None:
    """Append ``line`` to the log of faults, if there is one, and sync it to the disk."""
    if path := os.environ.get(LOG_VARIABLE):
        with open(path, "a") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())


def arm(text: str) -> None:
    """Arm the faults that ``text`` describes, and disarm all others.

    Raises:
        ReplicaxError: ``text`` names an unknown point or action.
    """
    _waiting.clear()
    for word in filter(None, text.split(",")):
        point, _, rest = word.strip().partition(":")
        action, _, times = rest.partition("@")
        if point not in POINTS or action not in ACTIONS or not (times or "1").isdecimal():
            raise ReplicaxError(
                f"{FAULT_VARIABLE}: {word!r} is not POINT:ACTION@N, with a point of"
                f" {', '.join(POINTS)}, and an action of {', '.join(ACTIONS)}."
            )
        _waiting.setdefault(point, []).append((action, int(times or 1)))


_waiting: dict[str, list[tuple[str, int]]] = {}
_lock = threading.Lock()
arm(os.environ.get(FAULT_VARIABLE, ""))
