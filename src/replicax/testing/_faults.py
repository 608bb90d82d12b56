"""Fault points: places in a program where a test lets something happen to a worker."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from replicax._errors import ReplicaxError
from replicax.cluster._resolve import resolve_cluster

VARIABLE = "REPLICAX_FAULTS"

_passed: Counter[str] = Counter()


class InjectedFaultError(ReplicaxError, RuntimeError):
    """What a fault of kind ``"raise"`` raises.

    Example:
        >>> issubclass(rx.testing.InjectedFaultError, RuntimeError)
        True
    """


@dataclass(frozen=True)
class Fault:
    """What happens to a worker at a `fault_point`; given to `run_in_processes`.

    Args:
        point: The name of the fault point.
        worker: The index of the worker that it happens to.
        count: At which passing of the point, from 1.
        kind: ``"kill"`` ends the process at once, as a machine that is lost does; ``"raise"``
            raises an `InjectedFaultError`; ``"exit"`` leaves by ``sys.exit(1)``; ``"hang"`` stops
            it for ever.

    Raises:
        ValueError: If there is no such kind, or the count is not positive.

    Example:
        >>> rx.testing.Fault("after_step", worker=1, count=3)
        Fault(point='after_step', worker=1, count=3, kind='kill')
    """

    point: str
    worker: int = 0
    count: int = 1
    kind: str = "kill"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(map(repr, _KINDS))}.")
        if self.count < 1:
            raise ValueError(f"count={self.count} must be 1 or more: the first passing is 1.")


def fault_point(name: str) -> None:
    """A place where a test may let something happen; nothing happens anywhere else.

    Example:
        >>> rx.testing.fault_point("after_step")
    """
    if VARIABLE not in os.environ:
        return
    _passed[name] += 1
    for told in json.loads(os.environ[VARIABLE]):
        fault = Fault(**told)
        if (fault.point, fault.count) != (name, _passed[name]):
            continue
        if fault.worker == resolve_cluster().index:
            _KINDS[fault.kind](f"{fault} was injected here.")


def as_text(faults: Sequence[Fault]) -> str:
    """The faults as the environment of a worker carries them."""
    return json.dumps([dataclasses.asdict(fault) for fault in faults])


def _kill(text: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(text: str) -> NoReturn:
    raise InjectedFaultError(text)


def _exit(text: str) -> NoReturn:
    sys.exit(1)


def _hang(text: str) -> NoReturn:
    while True:
        time.sleep(3600)


_KINDS: dict[str, Callable[[str], None]] = {
    "kill": _kill,
    "raise": _raise,
    "exit": _exit,
    "hang": _hang,
}
