"""`Rendezvous`: the threads of one eager run, and the points where they wait for each other.

One replica runs at a time, in order, until it ends or waits in a collective; then the next one
runs. Prints and breakpoints therefore come in a fixed order and Python state needs no locks, while
the devices work in parallel in the background. When all replicas wait, the calling thread computes
the collective (it *settles* the rendezvous). Meanwhile signals are deferred: their handlers run
only while it waits or settles, never in between.

A collective inside a compiled function of one replica arrives from a thread of the XLA runtime. The
replica's own thread may be blocked in the runtime by then, so the next replica runs concurrently.

JAX keeps some settings per thread; `inherited_jax_state` passes them to the replicas' threads.
"""

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from replicax._src.base.errors import ReplicaError, user_line
from replicax._src.base.managers import contextmanager
from replicax._src.base.threads import deferred_signals, new_thread
from replicax._src.collectives.consistency import Call, difference

# JAX's settings that a `with` block changes for one thread; a new thread has the global ones.
_SETTINGS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_transfer_guard": jax.transfer_guard,
}


def inherited_jax_state() -> Callable[[], AbstractContextManager[None]]:
    """Capture the JAX settings of this thread; return a context manager for another thread."""
    wanted = {name: getattr(jax.config, name) for name in _SETTINGS}

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in wanted.items():
                if getattr(jax.config, name) != value:
                    stack.enter_context(_SETTINGS[name](value))
            yield

    return enter


Settle = Callable[[list[Any]], list[Any]]
_POLL_SECONDS = 0.05  # seconds between checks for deferred signals
_BY_ARGUMENT = " Pass values that differ between the replicas to merge_call in `args`."
_SAME_CALLS = (
    "Every replica must call the same collectives, variable writes and merge_calls, on the same"
    " variables and with the same functions, in the same order."
)


# A BaseException, as `except Exception` in a replica function must not catch it and go on.
class Abandoned(BaseException):
    """Ends a replica that waits for one that failed; never visible to users."""


@dataclass(frozen=True)
class _Offer:
    call: Call
    value: Any
    settle: Settle
    timeout: float | None


class Rendezvous:
    """The rendezvous of the replicas of one eager run."""

    def __init__(self, num_replicas: int) -> None:
        self._size = num_replicas
        self._changed = threading.Condition()
        self._running = [False] * num_replicas
        self._offers: dict[int, _Offer] = {}
        self._answers: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._failure: tuple[int, BaseException] | None = None
        self._over = False
        self._threads: list[threading.Thread] = []

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Run `body(replica)` for every replica and return their results; signals are deferred.

        Raises:
            ReplicaError: If one replica waits for a collective that another never calls.
            Exception: The error that a replica raised, with a note that names the replica.
        """
        try:
            for replica in range(self._size):
                self._start(replica, body)
                self._wait_until(lambda r=replica: self._is_idle(r))  # type: ignore[misc]
            while len(self._results) < self._size or self._offers:
                self._settle()
            return [self._results[r] for r in range(self._size)]
        finally:
            self._end()

    def meet(
        self,
        replica: int,
        call: Call,
        value: Any,
        settle: Settle,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Wait for all replicas; return this replica's answer from `settle`.

        Args:
            replica: The calling replica.
            call: The collective, which must be the same on all replicas.
            value: This replica's contribution.
            settle: Maps the list of all contributions to the list of all answers; called once, on
                the thread that runs the rendezvous.
            timeout: Seconds to wait for the others; None waits as long as they run.
        """
        # False for a collective in compiled code, which calls from a thread of the runtime while
        # the replica's own thread may still be running.
        inside = self._threads[replica] is threading.current_thread()
        with self._changed:
            self._offers[replica] = _Offer(call, value, settle, timeout)
            if inside:
                self._running[replica] = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: replica in self._answers or self._over)
            if replica not in self._answers:
                raise Abandoned
            return self._answers.pop(replica)

    def _start(self, replica: int, body: Callable[[int], Any]) -> None:
        """Start the thread of a replica."""
        # New threads start with an empty context: pass on the frame, level and rendezvous.
        context = contextvars.copy_context()
        jax_state = inherited_jax_state()

        def work() -> None:
            result, failure = None, None
            try:
                with jax_state():
                    result = context.run(body, replica)
            except Abandoned:
                pass
            except BaseException as error:
                failure = error
            # All at once: `run` ends when each replica has a result, and must see a failure first.
            with self._changed:
                self._running[replica] = False
                self._results[replica] = result
                if failure is not None and self._failure is None:
                    self._failure = (replica, failure)
                self._changed.notify_all()

        thread = new_thread(work, name=f"replica-{replica}")
        self._threads.append(thread)
        self._running[replica] = True
        thread.start()

    def _is_idle(self, replica: int) -> bool:
        return replica in self._offers or not self._running[replica]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not self._poll(condition, began):
            deferred_signals.deliver()  # the only place where a signal may end the run

    def _poll(self, condition: Callable[[], bool], began: float) -> bool:
        """Wait briefly; return whether `condition` holds. Raise the error of a failed replica."""
        with self._changed:
            if not (condition() or self._failure):
                limits = [o.timeout for o in self._offers.values() if o.timeout is not None]
                left = min(limits) - (time.monotonic() - began) if limits else _POLL_SECONDS
                if left <= 0:
                    raise ReplicaError(self._timeout_message(min(limits)))
                self._changed.wait(min(left, _POLL_SECONDS))
            # Before the condition: the other replicas may wait for the failed one forever.
            if self._failure:
                replica, error = self._failure
                error.add_note(f"Raised in replica {replica} of {self._size}.")
                raise error
            return condition()

    def _settle(self) -> None:
        """Wait until all replicas wait, compute the collective, and answer each replica."""
        self._wait_until(lambda: all(map(self._is_idle, range(self._size))))
        with self._changed:
            offers = dict(self._offers)
            if not offers:
                return
            self._check(offers)
        order = range(self._size)
        # Without the lock, and with signals: a merge_fn is code of the user, and may take long.
        try:
            answers = deferred_signals.let_in(
                lambda: offers[0].settle([offers[r].value for r in order])
            )
        except Exception as error:
            self._note_line(error)
            raise
        # Answer one replica at a time and let it run until it waits again, which keeps the order of
        # side effects deterministic. A collective in compiled code does not suspend its replica's
        # thread, so there is nothing to wait for.
        for replica in order:
            with self._changed:
                del self._offers[replica]
                self._answers[replica] = answers[replica]
                inside = not self._running[replica] and replica not in self._results
                self._running[replica] = inside or self._running[replica]
                self._changed.notify_all()
            if inside:
                self._wait_until(lambda r=replica: self._is_idle(r))  # type: ignore[misc]

    def _note_line(self, error: Exception) -> None:
        # The error is raised on this thread, but the user's line is where the replicas wait.
        if line := self._line(0):
            error.add_note(f"The replicas were at {line}.")

    def _line(self, replica: int) -> str:
        """Return `file:line` of the user code where a replica waits; "" if unknown."""
        return user_line(sys._current_frames().get(self._threads[replica].ident or 0))  # noqa: SLF001

    def _describe(self, replica: int, offer: _Offer) -> str:
        line = self._line(replica)
        return f"replica {replica} in {offer.call.purpose}{f' at {line}' if line else ''}"

    def _check(self, offers: dict[int, _Offer]) -> None:
        """Raise `ReplicaError` unless all replicas wait in the same collective."""
        ended = [r for r in range(self._size) if r not in offers]
        if ended:
            waiting = ", ".join(self._describe(r, o) for r, o in sorted(offers.items()))
            raise ReplicaError(
                f"{_replicas(ended)} ended while others wait for the whole group: {waiting}."
                " Every replica must call the same collectives, variable writes and merge_calls"
                " in the same order; do not put them under an `if` that depends on the replica."
            )
        first = offers[0]
        for replica, offer in sorted(offers.items()):
            if offer.call.purpose != first.call.purpose:
                where = ", ".join(self._describe(r, o) for r, o in sorted(offers.items()))
                raise ReplicaError(
                    f"The replicas wait for different things: {where}. {_SAME_CALLS}"
                )
            if found := difference(first.call.subject, offer.call.subject):
                where = f"{self._describe(0, first)}, {self._describe(replica, offer)}"
                raise ReplicaError(
                    f"The replicas disagree: {where}, where {found}. {_SAME_CALLS}"
                    + _BY_ARGUMENT * ("merge_fn" in first.call.subject)
                )

    def _timeout_message(self, limit: float) -> str:
        """Return the message for replicas that did not arrive in time."""
        late = [r for r in range(self._size) if not self._is_idle(r)]
        waiting = ", ".join(
            f"replica {r} in {o.call.purpose}" for r, o in sorted(self._offers.items())
        )
        return (
            f"{_replicas(late)} did not arrive within timeout_seconds={limit:g} of the"
            f" communication options, while others wait: {waiting}."
        )

    def _end(self) -> None:
        """End the rendezvous: replicas that still wait raise `Abandoned`."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:  # the thread was started
                # A replica may be in user code that cannot be interrupted, so limit the wait.
                thread.join(timeout=5.0)


def _replicas(numbers: list[int]) -> str:
    return ("Replica " if len(numbers) == 1 else "Replicas ") + ", ".join(map(str, numbers))
