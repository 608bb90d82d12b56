"""Group: this process among its workers, from the roll-call to the goodbye.

Every cross-process collective passes through one gate, `Group.collective`. It counts, so that the
hub sees who is late and who does something else; it refuses to begin when a worker is gone; and it
turns what XLA says when a connection breaks into the story that the hub tells.
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
from types import TracebackType
from typing import Any, NoReturn

from replicax._errors import ReplicaError, ReplicaxError
from replicax._faults import fault_point
from replicax._jax_private import disconnect_distributed
from replicax.cluster._checks import WorkerLostError
from replicax.cluster._spec import ClusterFacts
from replicax.workers import _reports, _sockets, _wire
from replicax.workers._reports import Report
from replicax.workers._watch import disk, load
from replicax.workers._wire import Message, Wire

_PING_EVERY = 1.0
_TELL_EVERY = 0.2  # how often, at most, a new collective is told at once
_NEWS_PATIENCE = 5.0  # how long the hub may take to say why a connection broke
_SHOWN = 32
_LAST_RESORT = 8.0  # how long a collective may go on whose connections are cut
_MOVE_ON = 5.0  # how long a stuck worker has to end by itself
_log = logging.getLogger("replicax")
_FORKED = (
    "This process was forked from a worker, and is none itself: JAX and the connections to the"
    " other workers are its parent's. Start processes of your own with the method 'spawn', and"
    " let them compute with NumPy only."
)

_DEPARTED = (
    "This process has left its cluster by `strategy.leave()`, and cannot take part in anything that"
    " all workers do. It can still read its variables; to train again, start a new process."
)


class Cancelled(Exception):  # noqa: N818 - a signal, not an error
    """Nobody waits for the agreement any more."""


class Group:
    """The workers that train together, seen from one of them.

    Attributes:
        facts: The cluster, with an address for every worker once JAX has started.
        local_host: The address of this machine on the network of the workers.
    """

    def __init__(self, facts: ClusterFacts, wire: Wire, go: Message) -> None:
        self.facts = facts
        self.local_host: str = wire.socket.getsockname()[0]
        self._wire = wire
        self._members: list[Message] = go["members"]
        self._hub_pid = go["hub_pid"]
        self._hub_patience: float = go["ping_timeout"]
        self._unanswered = 0
        self._report: Report | None = None
        self._lost_at = 0.0
        self._departed: list[Report] = []
        self._never: set[str] = set()
        self._answers: dict[str, list[Any]] = {}
        self._news = threading.Condition()
        self._ports: list[int] = []
        self._count = 0
        self._completed = 0
        self._inside = False
        self._journal: deque[tuple[int, str, int]] = deque(maxlen=_SHOWN)
        self._chain = 0
        self._began = self._told = time.monotonic()
        self._paces: deque[float] = deque(maxlen=32)
        self._is_leaving = False
        self._lock = threading.Lock()
        self._feeds = 0
        self._threads = [
            threading.Thread(target=target, name=f"replicax-{target.__name__[1:]}", daemon=True)
            for target in (self._listen, self._ping)
        ]

    def start(self) -> None:
        """Listen to the hub, speak to it, and tell it when this process ends."""
        for thread in self._threads:
            thread.start()
        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self._be_forked)
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            self.tell(error)
            before(kind, error, trace)
            news = self._report
            if news and news.index != self.facts.index and not isinstance(error, ReplicaxError):
                _reports.say(f"the cause: {news.text}")

        sys.excepthook = hook

    def _be_forked(self) -> None:
        """In a forked child: the connection, and what is said over it, is the parent's."""
        self._is_leaving = True
        self._wire.forget()
        self._news = threading.Condition()
        self._lock = threading.Lock()
        self._report = Report("fork", None, _FORKED)

    def watch_sockets(self, ports: list[int]) -> None:
        """Know the ports of all workers' collectives, to be able to end one that waits."""
        self._ports = ports

    # The gate.

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Do something that all workers do together, as their next collective.

        Args:
            what: What it is, in words; the same on all workers.

        Raises:
            WorkerLostError: If a worker is gone, or is lost meanwhile.
            ReplicaError: If the workers do different things.
        """
        self._begin(what)
        if self._news_for(self._count) is not None:
            self._inside = False
            raise self._error()
        try:
            fault_point("collective")
            yield
            fault_point("collected")
            self._completed = self._count
        except StopIteration:  # the end of the data, which all workers reach together
            self._completed = self._count
            raise
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._inside = False

    def agree(self, what: str, value: Any) -> list[Any]:
        """Every worker's ``value``, in the order of the workers; a collective of the main thread.

        Args:
            what: What it is about, in words; the same on all workers.
            value: Anything that JSON can hold, and small.
        """
        with self.collective(f"an agreement on {what}"):
            return self.exchange(f"main {self._count}", value, lambda: False)

    def exchange(self, key: str, value: Any, is_cancelled: Callable[[], bool]) -> list[Any]:
        """Every worker's ``value`` under ``key``; from any thread, and no collective.

        Raises:
            WorkerLostError: If a worker is gone, and will not answer.
            Cancelled: When ``is_cancelled()`` says so.
        """
        self.offer(key, value)
        with self._news:
            while key not in self._answers:
                if self._report is not None or key in self._never:
                    raise self._error()
                if is_cancelled():
                    self._wire.send({"withdraw": key})
                    raise Cancelled
                self._news.wait(0.1)
            return self._answers.pop(key)

    def offer(self, key: str, value: Any) -> None:
        """Say ``value`` to those who wait for it in `exchange`, without waiting for theirs."""
        self._wire.send({"offer": key, "value": value})

    def give_up(self, patience: float) -> None:
        """For one who waits for what may need others, and has ``patience`` when one is gone.

        Raises:
            WorkerLostError: When so many seconds have passed since.
        """
        if self._report is not None and time.monotonic() - self._lost_at > patience:
            raise self._error()

    def new_feed(self) -> int:
        """A number for a stream that workers read side by side; the same on all workers."""
        self._feeds += 1
        return self._feeds

    def describe(self, index: int) -> str:
        """A worker, for a message."""
        return self.facts.describe(index)

    # What is told to the hub.

    def tell(self, error: BaseException) -> None:
        """Tell the others that this worker cannot go on, and why."""
        if isinstance(error, WorkerLostError) or self._report is not None:
            return  # they know
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        lines = traceback.format_exception_only(type(error), error)
        text = lines[0].strip() if lines else type(error).__name__
        if isinstance(error, SyntaxError):  # it begins with where it is
            text = f"{type(error).__name__}: {error}"
        self._wire.send({"raised": text[:1000], "progress": self._progress()})

    def leave(self) -> None:
        """Say goodbye; called when the process ends."""
        # A collective that raised here may raise the same on all workers: let the others see that.
        self._say_goodbye(self._count)

    def _say_goodbye(self, last: int) -> None:
        """Notify the others that ``last`` is the last collective of this worker."""
        if not self._is_leaving:
            fault_point("leave")
            self._is_leaving = True
            self._wire.send({"bye": {**self._progress(), "count": last}})
            self._wire.close()

    def depart(self, error: BaseException | None) -> None:
        """Leave while the process lives on, and take part in nothing any more.

        Args:
            error: Why this worker cannot go on; None if it has done its work.
        """
        if self._is_leaving:
            return
        if error is not None:
            self.tell(error)
        # Others may wait in a collective that failed here, with an error that was caught.
        self._say_goodbye(self._completed)
        with self._news:
            self._report = self._report or Report("over", self.facts.index, _DEPARTED)
            self._news.notify_all()
        if not self.facts.is_connected:
            # JAX would end this process when the coordination service ends with the last worker.
            disconnect_distributed()

    def _ping(self) -> None:
        since: float | None = None
        while not self._is_leaving:
            self._wire.send({"ping": self._progress()})
            self._unanswered += 1  # counted, so that a time in which this process is stopped is not
            if self._unanswered * _PING_EVERY > self._hub_patience and self._report is None:
                self._learn(Report("hub", None, self._hub_is_silent()))
            news = self._news_for(self._count) if self._inside else None
            since = None if news is None else since or time.monotonic()
            if news is not None and since is not None:
                _sockets.cut(self._ports)
                if time.monotonic() - since > _LAST_RESORT:
                    end_process(f"a collective could not be ended otherwise. {news.text}")
            time.sleep(_PING_EVERY)

    def _progress(self) -> Message:
        with self._lock:
            return {
                "count": self._count,
                "inside": self._inside,
                "pace": statistics.median(self._paces) if self._paces else 0.0,
                "journal": list(self._journal),
                "load": load.told(),
                "disk": disk.told(),
            }

    def _begin(self, what: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._count += 1
            self._chain = zlib.crc32(what.encode(), self._chain)
            self._journal.append((self._count, what, self._chain))
            self._paces.append(now - self._began)
            self._began = now
            self._inside = True
        if now - self._told > _TELL_EVERY:
            self._told = now
            self._wire.send({"ping": self._progress()})

    # What the hub tells.

    def _listen(self) -> None:
        while True:
            try:
                message = self._wire.receive()
            except _wire.WireError:
                message = None
            if message is None:
                break
            self._unanswered = 0
            self._take(message)
        if not self._is_leaving:
            self._learn(Report("hub", None, self._hub_is_gone()))

    def _take(self, message: Message) -> None:
        match message:
            case {"answer": key, "values": values}:
                with self._news:
                    self._answers[key] = values
                    self._news.notify_all()
            case {"never": key}:
                with self._news:
                    self._never.add(key)
                    self._news.notify_all()
            case {"report": _}:
                self._learn(Report.from_message(message))
            case {"stacks": late}:
                self._show_stacks(int(late))

    def _learn(self, report: Report) -> None:
        with self._news:
            if report.kind == "left":  # it may have answered all that we want of it
                self._departed.append(report)
            elif self._report is None:
                self._report, self._lost_at = report, time.monotonic()
            self._news.notify_all()
        if report.kind != "left":
            _sockets.cut(self._ports)
        if report.kind == "lost" and report.index == self.facts.index:
            self._end_if_stuck(report)

    def _end_if_stuck(self, report: Report) -> None:
        count = self._count
        time.sleep(_MOVE_ON)
        if (count == self._count or disk.told()[0]) and not self._is_leaving:
            end_process(f"the others gave this worker up. {report.text}")

    def _show_stacks(self, late: int) -> None:
        told = _reports.stacks({t.ident for t in self._threads})
        _reports.say(f"{self.describe(late)} is late; the threads of this worker:\n{told}")

    def _explain(self, error: Exception) -> None:
        """Raise what the hub knows, if a broken connection is what ``error`` is about."""
        if isinstance(error, ReplicaxError) or not _is_of_runtime(error):
            return
        deadline = time.monotonic() + _NEWS_PATIENCE
        with self._news:
            while self._news_for(self._count) is None and time.monotonic() < deadline:
                self._news.wait(0.05)
        if self._news_for(self._count) is not None:
            raise self._error() from error

    def _news_for(self, count: int) -> Report | None:
        """Why the collective with this number cannot be, if it cannot."""
        early = (r for r in self._departed if r.count < count)
        return self._report or next(early, None)

    def _error(self) -> Exception:
        report = self._report or self._departed[0]
        if report.kind in ("mismatch", "fork", "over"):
            return ReplicaError(report.text)
        return WorkerLostError(report.text, report.index)

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


def end_process(why: str) -> NoReturn:
    """End the process: nothing else ends a thread that never comes back."""
    _reports.say(f"this process ends, as {why}")
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    os._exit(1)


def _is_of_runtime(error: Exception) -> bool:
    """Whether XLA raised it: small programs give a ValueError, others an error of JAX's."""
    text = str(error).lower()
    return (
        "gloo" in text
        or "nccl" in text
        or type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    )


_current: list[Group] = []


def current() -> Group | None:
    """The group that this process belongs to, if it is in one."""
    return _current[0] if _current else None


def set_current(group: Group) -> None:
    """Make ``group`` the one of this process, for the rest of its life."""
    _current[:] = [group]


def required() -> Group:
    """The group of this process, for code that runs only in one."""
    if not _current:
        _no_group()
    return _current[0]


def _no_group() -> NoReturn:
    raise ReplicaError(
        "These replicas are of several processes, which replicax did not bring together. Make a"
        " `MultiWorkerMirroredStrategy` instead of calling `jax.distributed.initialize`."
    )


def digest(text: str) -> str:
    """A short name for a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
