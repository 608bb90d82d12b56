"""Elastic runs: when a worker is lost, the others re-form in process and repeat the step.

A program of several workers is a *step*: it changes variables and iterators as a whole or not at
all. In an elastic run it commits in two phases. Every worker computes the new values, without
donating the old ones, and then takes part in a barrier. A worker that passes the barrier knows that
every other has the new values in memory. If a worker is lost, the hub therefore has to compare one
number per survivor, the last step whose values it has: all continue from the smallest of them,
which no survivor has left behind.

The survivors then drop JAX's backends and start them again as a smaller group. Objects that hold
arrays or devices register here: `before` runs while the old arrays can still be read, `after` when
the new devices exist.
"""

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, TypeVar

import jax

from replicax._src.base.errors import ReplicaxError
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.workers import group as _group

_log = logging.getLogger("replicax")
_F = TypeVar("_F", bound=Callable[..., Any])


class StepInterrupted(WorkerLostError):  # noqa: N818 - a signal, not an error
    """A worker was lost during a step, and this process can continue without it.

    Attributes:
        commit: Stores the step's new values and returns its results; None if the step has none yet.
    """

    commit: Callable[[], Any] | None = None


class CannotResizeError(ReplicaxError):
    """This process holds state that cannot be moved to another number of workers."""


@dataclass
class Phase:
    """Callbacks of one phase of a resize, in the order of their registration's ``order``."""

    _calls: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    def register(self, order: int, call: Callable[[], None]) -> None:
        """Call ``call`` in this phase, after those with a smaller ``order``."""
        self._calls.append((order, next(self._numbers), call))
        self._calls.sort(key=lambda entry: entry[:2])

    def run(self) -> None:
        """Run all callbacks."""
        for _, _, call in self._calls:
            call()


# Raise `CannotResizeError` for state that would be lost; nothing has changed yet.
check = Phase()
# The same for state that a worker that joins would not get.
check_join = Phase()
# Copy arrays to the host, and end threads that use devices.
before = Phase()
# Move to the new devices.
after = Phase()

# The order within a phase: later ones rely on earlier ones.
DEVICES, VALUES, INPUT, PROGRAMS, SERVICES = range(5)

# Re-forms the group, given a function that commits the step (None if this worker lacks its
# results) and the number of collectives before the step; returns whether the step was committed.
Reform: TypeAlias = Callable[[Callable[[], None] | None, int], bool]
_reform: list[Reform] = []  # empty if the run is not elastic


def turn_on(reform: Reform) -> None:
    """Make programs commit in two phases from now on, and recover by ``reform``."""
    _reform[:] = [reform]


def is_on() -> bool:
    """Whether this process belongs to an elastic run."""
    return bool(_reform)


def is_joining() -> bool:
    """Whether this worker is joining an elastic run and has not received the state yet."""
    return bool(_reform) and (group := _group.current()) is not None and group.is_joining


def is_behind() -> bool:
    """Whether other survivors have already run the code up to this worker's next collective.

    That is so if a worker was lost when they had begun the next step, and this one had not
    finished the step before. Collectives between the two steps, such as those of a save, find no
    partners: the others have given them up.
    """
    return bool(_reform) and (group := _group.current()) is not None and group.is_behind


_previews: ContextVar[bool] = ContextVar("replicax_previews", default=False)


@contextmanager
def preview() -> Iterator[None]:
    """Allow a worker that joins to read a dataset whose position it restores afterwards."""
    token = _previews.set(True)
    try:
        yield
    finally:
        _previews.reset(token)


def refuse_while_joining(what: str) -> None:
    """Raise if this worker is joining a run and has not received its state yet.

    Raises:
        ReplicaxError: If so.
    """
    if is_joining() and not _previews.get():
        raise ReplicaxError(
            f"This worker was started to join a running elastic run, and {what} before it has the"
            " state of the others. It receives the state where the program creates"
            " `rx.train.Resumable`: create that before the first step, with all objects that a step"
            " changes. The other workers go on without this one."
        )


def free_old_backends() -> None:
    """Free the JAX backends from before a resize; call this when nothing uses their arrays.

    A backend is part of reference cycles. It has a dozen threads, and sockets to the other workers;
    the next full garbage collection may be hours away.
    """
    gc.collect()


def cached_until_resize(fn: _F) -> _F:
    """Like `functools.cache`, for functions of devices: a resize clears the cache."""
    cached: Any = cache(fn)
    after.register(DEVICES, cached.cache_clear)
    return cached  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Recovery:
    """The outcome of an interrupted step.

    Attributes:
        is_committed: Whether its new values are stored; otherwise it must be repeated.
        result: Its result, if so.
    """

    is_committed: bool
    result: Any = None


def call() -> AbstractContextManager[None]:
    """Return the context of a call of a function by the program."""
    group = _group.current() if _reform else None
    return nullcontext() if group is None else group.call()


def completed() -> int:
    """Return how many collectives this worker has completed; 0 if the run is not elastic."""
    return group.completed if _reform and (group := _group.current()) is not None else 0


def interruption(error: WorkerLostError) -> WorkerLostError:
    """Return the error to raise if a worker is lost before a step has changed anything.

    That is a `StepInterrupted` if the others can repeat the step, otherwise ``error`` itself. A
    worker can be lost there because the workers first agree on the shapes of the arguments.
    """
    group = _group.current()
    is_recoverable = group is not None and group.may_resize and is_supported()
    return StepInterrupted(group.loss, error.index) if group and is_recoverable else error


def is_supported() -> bool:
    """Whether steps on the devices of this process keep the old values until all have the new ones.

    Accelerators run asynchronously, and would have to be waited for: there, a lost worker means a
    restart.
    """
    return is_on() and jax.local_devices()[0].platform == "cpu"


def recover(interrupted: StepInterrupted, before: int, check_step: Callable[[], None]) -> Recovery:
    """Continue after a lost worker: re-form the group, and commit or undo the step.

    Args:
        interrupted: The interruption.
        before: The value of `completed` when the call began.
        check_step: Raises `CannotResizeError` if the step could not be repeated.

    Raises:
        WorkerLostError: If this is not possible; the caller's process must end.
    """
    began, results = time.monotonic(), list[Any]()

    def commit() -> None:
        assert interrupted.commit is not None
        results.append(interrupted.commit())

    try:
        check.run()
        check_step()
        is_committed = _reform[0](commit if interrupted.commit is not None else None, before)
    except CannotResizeError as error:
        raise WorkerLostError(f"{interrupted} {error}", interrupted.index) from None
    _log.warning("re-formed in %.2f s: %s", time.monotonic() - began, interrupted)
    return Recovery(is_committed, results[0] if results else None)
