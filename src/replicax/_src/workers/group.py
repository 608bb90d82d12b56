"""The group: this process's membership in the cluster, from the roll call to the goodbye.

Every cross-process collective passes through `Group.collective`. It numbers the collectives, so
that the hub can detect workers that are late or that run something else; it refuses to start one
after a worker is lost; and it replaces XLA's error about a broken connection by the hub's
explanation.
"""

import atexit
import hashlib
import logging
import os
import statistics
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

from replicax._src.base.errors import ReplicaError, ReplicaxError
from replicax._src.base.fault_points import fault_point
from replicax._src.cluster.checks import RollCallError, WorkerLostError
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.compat.jax import disconnect_distributed
from replicax._src.workers import reports, sockets
from replicax._src.workers import wire as _wire
from replicax._src.workers.reports import Report
from replicax._src.workers.settings import NOT_NEEDED
from replicax._src.workers.watchdog import disk, load
from replicax._src.workers.wire import Message, Wire

_PING_EVERY = 1.0
_EXTRA_PING_EVERY = 0.2  # minimum seconds between the extra pings that announce a new collective
_REPORT_PATIENCE = 5.0  # seconds to wait for the hub to explain a broken connection
_SHOWN = 32
_LAST_RESORT = 8.0  # seconds that a collective may continue after its connections were cut
# The same while JAX connects the workers: Gloo waits 30 s for a worker that does not connect.
_LAST_RESORT_CONNECTING = 40.0
_ABORT_EVERY = 0.1
_MOVE_ON = 5.0  # seconds for a stuck worker to exit before it is ended
_log = logging.getLogger("replicax")
_FORKED = (
    "This process was forked from a worker, and is not one itself: JAX and the connections to the"
    " other workers are its parent's. Start processes of your own with the method 'spawn', and"
    " let them compute with NumPy only."
)

_DEPARTED = (
    "This process has left its cluster by `strategy.leave()`, and cannot take part in collectives"
    " any more. It can still read its variables; to train again, start a new process."
)


_OUTSIDE_STEP = (
    " But not this one: it was not in a step, which is a call of an `rx.function` with"
    " `strategy.run`. Start all workers again, from the last checkpoint."
)


class Cancelled(Exception):  # noqa: N818 - a signal, not an error
    """The agreement was cancelled by its caller."""


class Group:
    """The workers that train together, as seen by one of them.

    Attributes:
        facts: The cluster, with an address for every worker once JAX has started. In an elastic run
            it changes with the workers, and the indices are those of the workers that are left.
        local_host: The address of this machine on the network of the workers.
        number: The index with which this worker joined, by which messages name it.
        generation: How often the workers have changed.
        is_elastic: Whether the others can go on when a worker is lost.
        is_joining: Whether this worker does not take part yet in the run that it joins.
        least: The fewest workers that go on.
        has_newcomers: Whether workers wait for the state to join.
        holds: Whether the workers are too few, and wait for others after the current step.
        too_few: Why they end, as no other has joined in time; "" otherwise.
        calls: How many calls that take part in collectives have begun since a worker joined.
        call_workers: The number of workers when the last of them began, which divided its input.
        next_workers: The same of the next one, if others have begun that already; else None.
        has_joined: Whether a worker has joined in the last resize.
        are_apart: Whether the survivors of the last resize were in different calls.
        is_behind_others: Whether others were in a later call than this one.
    """

    def __init__(self, facts: ClusterFacts, wire: Wire, go: Message) -> None:
        self.facts = facts
        self.number = facts.index
        self.generation: int = go.get("generation", 0)
        self.is_elastic: bool = go.get("elastic", False)
        self.is_joining: bool = go.get("joins", False)
        self.least: int = go.get("least", 0)
        self.has_newcomers = self.holds = False
        self.too_few = ""
        self.calls, self.call_workers = 0, facts.num_workers
        self.next_workers: int | None = None
        self.has_joined = self.are_apart = False
        self._is_new_call = self._is_in_call = self.is_behind_others = False
        self._is_compiling = False
        self._resumed_at = 0  # the collectives before the program goes on in this generation
        self._state = ""  # where a worker that joins finds the state of the others
        self._dismissal = ""  # why it cannot join
        self._next_go: Message | None = None
        # The collectives before the first step of this generation; None while JAX starts.
        self._base: int | None = 0
        self._early: list[tuple[int, Report]] = []  # of generations that it has not entered yet
        self._abort: Callable[[], None] | None = None  # see `aborting_on_loss`
        self.local_host: str = wire.socket.getsockname()[0]
        self._wire = wire
        self._members: list[Message] = go["members"]
        self._hub_pid = go["hub_pid"]
        self._hub_patience: float = go["ping_timeout"]
        self._unanswered = 0
        self._report: Report | None = None
        self._lost_at = 0.0
        self._departed: list[Report] = []
        self._unanswerable: set[str] = set()
        self._answers: dict[str, list[Any]] = {}
        self._changed = threading.Condition()
        self._ports: list[int] = []
        self._count = 0
        self._completed = 0
        self._inside = False
        self._journal: deque[tuple[int, str, int]] = deque(maxlen=_SHOWN)
        self._chain = 0
        self._began = self._pinged_at = time.monotonic()
        self._paces: deque[float] = deque(maxlen=32)
        self._is_leaving = False
        self._lock = threading.RLock()
        self._tickets = 0
        self._threads = [
            threading.Thread(target=target, name=f"replicax-{target.__name__[1:]}", daemon=True)
            for target in (self._listen, self._ping)
        ]

    def start(self) -> None:
        """Start the threads that talk to the hub, and the hooks for exit, forks and exceptions."""
        for thread in self._threads:
            thread.start()
        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self._after_fork)
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self.report_failure(error)
            before(kind, error, trace)
            news = self._report
            if news and news.index != self.facts.index and not isinstance(error, ReplicaxError):
                reports.say(f"the cause: {news.text}")

        sys.excepthook = hook

    def _after_fork(self) -> None:
        """Make this forked child unusable as a worker: the connection belongs to the parent."""
        self._is_leaving = True
        self._wire.forget()
        # The parent's threads may hold these locks at the fork, and do not exist in the child.
        self._changed = threading.Condition()
        self._lock = threading.RLock()
        self._report = Report("fork", None, _FORKED)

    def set_collective_ports(self, ports: list[int]) -> None:
        """Set the ports of all workers' collectives; their connections are cut to abort one."""
        self._ports = ports

    # Collectives.

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Run the block as this worker's next collective, which all workers must run too.

        Args:
            what: A description for messages and for the comparison; the same on all workers.

        Raises:
            WorkerLostError: If a worker has been lost, or is lost meanwhile.
            ReplicaError: If the workers run different collectives.
        """
        self._begin(what)
        if self._report_for(self._count) is not None:
            self._inside = False
            raise self._error()
        began, reading = self._began, load.reading
        try:
            fault_point("collective")
            yield
            fault_point("collected")
            self._completed = self._count
        except StopIteration:  # the end of the data, which all workers reach in the same collective
            self._completed = self._count
            raise
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._inside = False
            # A worker that reads its own data in a collective is not blocked by others.
            load.blocked += time.monotonic() - began - (load.reading - reading)

    def agree(self, what: str, value: Any) -> list[Any]:
        """All-gather ``value``: return every worker's, in the order of the workers.

        This is a collective, to be called on the main thread.

        Args:
            what: The subject, for messages; the same on all workers.
            value: A small value that JSON can represent.
        """
        with self.collective(f"an agreement on {what}"):
            return self.exchange(f"main {self._count}", value, lambda: False)

    def exchange(self, key: str, value: Any, is_cancelled: Callable[[], bool]) -> list[Any]:
        """All-gather ``value`` under ``key``, outside the order of collectives; from any thread.

        Raises:
            WorkerLostError: If a worker has been lost before it answered.
            Cancelled: When ``is_cancelled()`` returns True.
        """
        if self.facts.num_workers == 1:
            return [value]
        generation = self.generation
        self.offer(key, value)
        key = self._qualified(key)
        with self._changed:
            while key not in self._answers:
                if generation != self.generation:  # only threads that outlive a resize come here
                    raise Cancelled
                if self._report is not None or key in self._unanswerable:
                    raise self._error()
                if is_cancelled():
                    self._wire.send({"withdraw": key})
                    raise Cancelled
                self._changed.wait(0.1)
            return self._answers.pop(key)

    def offer(self, key: str, value: Any) -> None:
        """Contribute ``value`` to the `exchange` of ``key`` without waiting for the others."""
        message = {"offer": self._qualified(key), "value": value}
        self._wire.send({**message, "generation": self.generation})

    def _qualified(self, key: str) -> str:
        """Return a key that no exchange of an earlier generation has used."""
        return f"{self.generation}:{key}" if self.generation else key

    # Resizes of an elastic run.

    @property
    def may_resize(self) -> bool:
        """Whether a worker was lost, and the others may go on without it."""
        return self._report is not None and self._report.kind == "resize"

    @property
    def loss(self) -> str:
        """The report of the worker that was lost, or ""."""
        return self._report.text if self._report is not None else ""

    @property
    def completed(self) -> int:
        """The number of collectives that this worker has completed in this generation."""
        return self._since_start(self._completed)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Mark a call of a function, which counts if it takes part in a collective.

        All workers make the same calls. A survivor that has begun more of them than another has run
        code between two steps that the other one has still to run.
        """
        if self._is_in_call:
            yield
            return
        self._is_in_call = self._is_new_call = True
        try:
            yield
        finally:
            self._is_in_call = self._is_new_call = False

    @property
    def is_behind(self) -> bool:
        """Whether other survivors have already run the code up to this worker's next collective.

        A save in that code, for example, was begun and given up by them.
        """
        return self.is_behind_others and self._count == self._resumed_at

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Mark the block as a compilation, which takes as long as it takes, also after a loss."""
        self._is_compiling = True
        try:
            yield
        finally:
            self._is_compiling = False

    def refuse_newcomers(self, why: str) -> None:
        """Send the workers that wait to join the reason why they cannot."""
        self.has_newcomers = False
        self._wire.send({"no newcomers": why})

    def offer_to_wait(self, *, can_wait: bool) -> None:
        """Notify the hub whether this worker stops between two steps to wait for others."""
        if self.is_elastic and not self._is_leaving:
            self._wire.send({"waits": can_wait})

    def wait_for_newcomers(self) -> bool:
        """Wait until workers want to join; return False if none has within the time.

        Raises:
            WorkerLostError: If a worker is lost meanwhile.
        """
        with self._changed:
            while not self.has_newcomers and not self.too_few:
                if self._report is not None:
                    raise self._error()
                self._changed.wait(0.1)
            return not self.too_few

    def say_goodbye(self) -> None:
        """Leave the others of an elastic run, which go on, between two steps."""
        self._is_leaving = True
        self._wire.send({"goodbye": self._progress()})
        self._wire.close()
        disconnect_distributed()

    def wait_for_state(self) -> str:
        """Wait until the others hand over their state; return where it is.

        Raises:
            RollCallError: If they cannot.
        """
        self._wire.send({"newcomer": "waits"})
        with self._changed:
            while not self._state:
                if self._dismissal:
                    raise RollCallError(self._dismissal)
                self._changed.wait(0.1)
            return self._state

    def take_part(self) -> Message:
        """Report that the state is restored, and wait for the next generation's start message.

        Raises:
            RollCallError: If the other workers went on without this one.
        """
        self._wire.send({"newcomer": "restored"})
        with self._changed:
            while self._next_go is None:
                if self._dismissal:
                    raise RollCallError(self._dismissal)
                self._changed.wait(0.1)
            go, self._next_go = self._next_go, None
        return go

    def reform(
        self, *, has_new: bool, completed: int | None = None, planned: str = "", state: str = ""
    ) -> Message:
        """Agree with the other survivors on the last step, and wait for the next generation.

        Args:
            has_new: Whether this worker has the results of the collective in which it was.
            completed: The collectives that it has completed, if it was between two steps: those
                after them are forgotten.
            planned: The reason, if all workers have agreed to re-form.
            state: Where workers that join find the state.

        Returns:
            The hub's start message. Its ``"last"`` is the collective after which all continue.

        Raises:
            WorkerLostError: If the survivors cannot go on.
        """
        if completed is None:
            completed = self.completed
        has = self._since_start(self._count) if has_new else completed
        message = {"ready": self.generation, "has": has, "completed": completed}
        message |= {"steps": load.steps, "gave_up": self._base is None}  # while JAX was starting
        message |= {"calls": self.calls, "workers": self.call_workers}
        self._wire.send({**message, "planned": planned, "state": state})
        with self._changed:
            while self._next_go is None:
                if not self.may_resize and (not planned or self._report is not None):
                    raise self._error()
                self._changed.wait(0.1)
            go, self._next_go = self._next_go, None
        return {**go, "is_committed": has_new and go["last"] == has}

    def _since_start(self, count: int) -> int:
        """Return how many of ``count`` collectives came after those that start a generation."""
        return 0 if self._base is None else max(0, count - self._base)

    @contextmanager
    def aborting_on_loss(self, abort: Callable[[], None]) -> Iterator[None]:
        """Call ``abort`` repeatedly while the block runs, once a worker is lost.

        The block connects JAX to the others. It waits for them where only ``abort`` ends the wait,
        and may then fail with any error of JAX.
        """
        with self._changed:
            self._abort = abort
        try:
            yield
        finally:
            with self._changed:
                self._abort = None

    def finish_start(self) -> None:
        """Mark the start of a generation as complete."""
        self._base = self._count

    def resume(self) -> None:
        """Mark the end of a resize, after which the program goes on."""
        self._resumed_at = self._count

    def enter(self, go: Message) -> None:
        """Become a member of the generation that ``go`` starts; its collectives count from 0."""
        members = go["members"]
        rank = [m["index"] for m in members].index(self.number)
        with self._changed, self._lock:
            self.generation = go["generation"]
            self.is_joining, self.has_newcomers = False, go["newcomers"]
            self.holds = go["holds"]
            self.has_joined, self.are_apart = bool(go["joined"]), go["apart"]
            if self.has_joined:  # all are between the same two steps
                self.calls = 0
            self.is_behind_others = self.are_apart and self.calls < go["calls"]
            if self.is_behind_others:
                self.next_workers = go["workers"]
            self.facts = replace(
                self.facts,
                index=rank,
                num_workers=len(members),
                addresses=tuple(m["address"] for m in members),
                is_chief=rank == 0,
            )
            self._members = members
            # Reports that the others cannot go on are never outdated.
            self._report = None if self.may_resize else self._report
            self._departed = []
            early, self._early = self._early, []
            self._unanswerable, self._answers = set(), {}
            self._count = self._completed = self._chain = self._tickets = 0
            self._base = None
            self._inside = False
            self._journal.clear()
            self._paces.clear()
            self._ports = []
            self._changed.notify_all()
        for generation, report in early:
            self._handle_report(report, generation)

    def give_up(self, patience: float) -> None:
        """Raise if a worker was lost more than ``patience`` seconds ago.

        Call this in a loop that waits for something to which other workers may have to contribute.

        Raises:
            WorkerLostError: If so.
        """
        if self._report is not None and time.monotonic() - self._lost_at > patience:
            raise self._error()

    def new_ticket(self) -> int:
        """Return a number that names an exchange: equal on workers that call this equally often."""
        self._tickets += 1
        return self._tickets

    def describe(self, index: int) -> str:
        """Return a worker's name for messages."""
        return self.facts.describe(index)

    # Messages to the hub.

    def report_failure(self, error: BaseException) -> None:
        """Report to the other workers that this one failed with ``error``."""
        if isinstance(error, WorkerLostError) and self.may_resize:
            self._wire.send({"cannot": str(error)[:1000]})  # then the others must end too
            return
        if isinstance(error, WorkerLostError) or (self._report is not None and not self.may_resize):
            return  # they have been informed already
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        lines = traceback.format_exception_only(type(error), error)
        text = lines[0].strip() if lines else type(error).__name__
        if isinstance(error, SyntaxError):  # its formatted text begins with the file and line
            text = f"{type(error).__name__}: {error}"
        self._wire.send({"raised": text[:1000], "progress": self._progress()})

    def leave(self) -> None:
        """Say goodbye to the hub; called when the process exits."""
        # Count a collective that raised here: the others must see whether it raises there too.
        self._say_goodbye(self._count)

    def _say_goodbye(self, last: int) -> None:
        """Report to the others that ``last`` is this worker's last collective, and disconnect."""
        if not self._is_leaving:
            fault_point("leave")
            self._is_leaving = True
            bye = {**self._progress(), "count": last}
            self._wire.send({"bye": bye, "completed": self._since_start(last)})
            self._wire.close()

    def depart(self, error: BaseException | None) -> None:
        """Leave the cluster while the process continues; all later collectives raise.

        Args:
            error: Why this worker cannot continue; None if it has finished.
        """
        if self._is_leaving:
            return
        earlier = self._report
        if error is not None:
            self.report_failure(error)
        # Do not count a collective that failed here and was caught: others may still wait in it.
        self._say_goodbye(self._completed)
        with self._changed:
            # Not `self._report`: the hub may have sent its report of this departure back already.
            self._report = earlier or Report("over", self.facts.index, _DEPARTED)
            self._changed.notify_all()
        if not self.facts.is_connected:
            # JAX would abort this process when the coordination service ends after the last worker.
            disconnect_distributed()

    def _ping(self) -> None:
        """Send heartbeats, watch the hub, and abort a collective that can no longer complete."""
        since: float | None = None
        while not self._is_leaving:
            self._wire.send(self._ping_message())
            self._unanswered += 1  # not a time: this process may have been stopped
            if self._unanswered * _PING_EVERY > self._hub_patience and self._report is None:
                self._handle_report(Report("hub", None, self._hub_is_silent()))
            news = self._report_for(self._count) if self._inside else None
            since = None if news is None or self._is_compiling else since or time.monotonic()
            # Gloo has no timeout: cut its connections until the collective fails, or exit.
            if news is not None and since is not None:
                sockets.cut(self._ports)
                is_connecting = self._abort is not None and self.may_resize
                limit = _LAST_RESORT_CONNECTING if is_connecting else _LAST_RESORT
                if time.monotonic() - since > limit:
                    end_process(f"a collective could not be ended otherwise. {news.text}")
            time.sleep(_PING_EVERY)

    def _ping_message(self) -> Message:
        """Return a ping, with the generation whose collectives it counts."""
        with self._lock:  # `enter` changes both under it
            return {"ping": self._progress(), "generation": self.generation}

    def _progress(self) -> Message:
        """Return the contents of a ping."""
        with self._lock:
            return {
                "count": self._count,
                "inside": self._inside,
                "compiles": self._is_compiling,
                "pace": statistics.median(self._paces) if self._paces else 0.0,
                "journal": list(self._journal),
                "load": load.figures(),
                "disk": disk.status(),
            }

    def _begin(self, what: str) -> None:
        """Number the next collective, and announce it to the hub if the last ping is old enough."""
        now = time.monotonic()
        if self._is_new_call:
            self._is_new_call = False
            self.calls += 1
            self.call_workers = self.next_workers or self.facts.num_workers
            self.next_workers = None
        with self._lock:  # the ping thread reads these fields together
            self._count += 1
            # A running digest of all collectives, by which the hub compares the workers.
            self._chain = zlib.crc32(what.encode(), self._chain)
            self._journal.append((self._count, what, self._chain))
            self._paces.append(now - self._began)
            self._began = now
            self._inside = True
        if now - self._pinged_at > _EXTRA_PING_EVERY:
            self._pinged_at = now
            self._wire.send(self._ping_message())

    # Messages from the hub.

    def _listen(self) -> None:
        """Handle the hub's messages until the connection closes."""
        while True:
            try:
                message = self._wire.receive()
            except _wire.WireError:
                message = None
            if message is None:
                break
            self._unanswered = 0
            self._handle(message)
        if self.is_joining and not self._dismissal and not self._is_leaving:
            end_process("the run that it was to join is over.", NOT_NEEDED)
        if not self._is_leaving:
            self._handle_report(Report("hub", None, self._hub_is_gone()))

    def _handle(self, message: Message) -> None:
        """Handle one message of the hub."""
        match message:
            case {"answer": key, "values": values}:
                with self._changed:
                    self._answers[key] = values
                    self._changed.notify_all()
            case {"never": key}:
                with self._changed:
                    self._unanswerable.add(key)
                    self._changed.notify_all()
            case {"report": _}:
                self._handle_report(Report.from_message(message), message.get("generation"))
            case {"go": go}:
                with self._changed:
                    self._next_go = go
                    self._changed.notify_all()
            case {"stacks": late}:
                self._show_stacks(int(late))
            case {"slow": str(text)}:
                if self.facts.is_chief:
                    reports.say(text)
            case _:
                self._handle_join(message)

    def _handle_join(self, message: Message) -> None:
        """Handle a message about workers that join, of which this may be one."""
        with self._changed:
            match message:
                case {"newcomers": bool(some)}:
                    self.has_newcomers = some
                case {"too few": str(why)}:
                    self.too_few = why
                case {"state": str(path)}:
                    self._state = path
                case {"dismissed": str(why), "is_error": True}:
                    self._dismissal = why
                case {"dismissed": str(why)}:
                    end_process(f"the run does not need it any more. {why}", NOT_NEEDED)
            self._changed.notify_all()

    def _handle_report(self, report: Report, generation: int | None = None) -> None:
        """Store a report, wake the waiting threads, and abort a running collective.

        Args:
            report: The report.
            generation: The generation that it is about; None for all later ones too.
        """
        with self._changed:
            if generation is not None and generation > self.generation:
                self._early.append((generation, report))
                return
            if report.kind == "left":  # later collectives only are affected
                self._departed.append(report)
            elif self._report is None or (self.may_resize and report.kind != "resize"):
                self._report, self._lost_at = report, time.monotonic()
            is_connecting = self._abort is not None
            self._changed.notify_all()
        if report.kind != "left":
            sockets.cut(self._ports)  # wakes a thread that waits in a collective
        if report.kind != "left" and is_connecting:
            threading.Thread(target=self._abort_connecting, daemon=True).start()
        if report.kind == "lost" and report.index == self.facts.index:
            self._end_if_stuck(report)

    def _abort_connecting(self) -> None:
        """Abort the connections that the block of `aborting_on_loss` waits for, until it ends."""
        while (abort := self._abort) is not None:
            abort()
            sockets.cut(self._ports)
            time.sleep(_ABORT_EVERY)

    def _end_if_stuck(self, report: Report) -> None:
        """Exit if this worker, which the hub gave up, does not make progress any more."""
        count = self._count
        time.sleep(_MOVE_ON)
        if (count == self._count or disk.status()[0]) and not self._is_leaving:
            end_process(f"the others gave this worker up. {report.text}")

    def _show_stacks(self, late: int) -> None:
        text = reports.stacks({t.ident for t in self._threads})
        reports.say(f"{self.describe(late)} is late; the threads of this worker:\n{text}")

    def _explain(self, error: Exception) -> None:
        """Raise the hub's explanation if ``error`` is XLA's report of a broken connection."""
        is_from_jax = _is_runtime_error(error) or self._abort is not None
        if isinstance(error, ReplicaxError) or not is_from_jax:
            return
        deadline = time.monotonic() + _REPORT_PATIENCE
        with self._changed:
            while self._report_for(self._count) is None and time.monotonic() < deadline:
                self._changed.wait(0.05)
        if self._report_for(self._count) is not None:
            raise self._error() from error

    def _report_for(self, count: int) -> Report | None:
        """Return why collective ``count`` cannot complete; None if nothing is known against it."""
        early = (r for r in self._departed if r.count < count)
        return self._report or next(early, None)

    def _error(self) -> Exception:
        """Return the exception for the first report."""
        report = self._report or self._departed[0]
        if report.kind in ("mismatch", "fork", "over"):
            return ReplicaError(report.text)
        # An elastic step replaces this error; see `Program`.
        text = f"{report.text}{_OUTSIDE_STEP}" if report.kind == "resize" else report.text
        return WorkerLostError(text, report.index)

    def _hub_is_gone(self) -> str:
        return self._without_hub(
            "is gone: its process was killed, or that machine or its network is down"
        )

    def _hub_is_silent(self) -> str:
        return self._without_hub(
            f"has not answered for {self._hub_patience:.0f} s: the network between here and there"
            " is down, or its process or machine is stopped"
        )

    def _without_hub(self, what: str) -> str:
        return (
            f"The coordinator of all workers (pid {self._hub_pid}, at {self.facts.coordinator}, on"
            f" the machine of {self.describe(0)}) {what}. Start all workers again, from the last"
            " checkpoint."
        )


def end_process(why: str, code: int = 1) -> NoReturn:
    """Exit at once: a thread that is blocked in native code cannot be ended otherwise."""
    reports.say(f"this process ends, as {why}")
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(code)


def _is_runtime_error(error: Exception) -> bool:
    """Whether XLA raised an error: small programs raise ValueError, others JAX's runtime error."""
    text = str(error).lower()
    return (
        "gloo" in text
        or "nccl" in text
        or type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    )


_current: list[Group] = []


def current() -> Group | None:
    """Return the group that this process belongs to, or None."""
    return _current[0] if _current else None


def set_current(group: Group) -> None:
    """Set this process's group, for the rest of its life."""
    _current[:] = [group]


def required() -> Group:
    """Return this process's group.

    Raises:
        ReplicaError: If it is in none.
    """
    if not _current:
        _no_group()
    return _current[0]


def _no_group() -> NoReturn:
    raise ReplicaError(
        "These replicas are of several processes, which replicax did not bring together. Make a"
        " `MultiWorkerMirroredStrategy` instead of calling `jax.distributed.initialize`."
    )


def digest(text: str) -> str:
    """Return a short digest of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
