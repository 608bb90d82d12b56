"""The hub: the membership service of a run, in a separate process.

It calls the roll before JAX starts, runs JAX's coordination service in another process (so that no
worker is special), receives heartbeats every second, and tells the workers when one of them fails.
It exits after the last worker has left. It ignores signals: a scheduler sends them to every process
of a job, and the workers need the hub to coordinate their last checkpoint.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replicax._lazy import LazyModule
from replicax.cluster._checks import ClusterError
from replicax.workers import _reports, _runs, _watch, _wire
from replicax.workers._council import Council
from replicax.workers._keeper import Keeper
from replicax.workers._reports import Report
from replicax.workers._sessions import Owner, ignore_notices, name_process
from replicax.workers._settings import HubOptions
from replicax.workers._wire import Door, Message, Visitor, allow_visitors

if TYPE_CHECKING:
    from replicax.workers import _metrics
else:
    _metrics = LazyModule("replicax.workers._metrics")  # most runs serve no metrics

_TICK = 0.1
_LINGER = 1.0  # seconds that the hub waits after the last worker has left
_PATIENCE = 10.0  # seconds for a worker that was given up to exit
_TELL_EVERY = 5.0
_MOST_QUESTIONS = 10_000
_TOLD = ("address", "pid", "host", "gpus")  # the facts about a worker that all others receive
AFTER_REFUSAL = 30.0  # seconds that the roll call continues after a worker was refused


@dataclass
class Member:
    """A worker that has joined."""

    visitor: Visitor
    facts: Message
    progress: _watch.Progress = field(default_factory=_watch.Progress)
    raised: str = ""


class Hub:
    """The state of one run, driven by messages and timeouts."""

    def __init__(
        self,
        options: HubOptions,
        door: Door,
        keeper: Keeper | None = None,
        metrics: "_metrics.Metrics | None" = None,
    ) -> None:
        self._options = options
        self._door = door
        self._keeper = keeper
        self._metrics = metrics
        self._members: dict[int, Member] = {}
        self._refused: list[str] = []
        self._hopeless = ""
        self._offers: dict[str, dict[int, Any]] = {}
        self._asked: dict[str, float] = {}
        self._began = self._told = time.monotonic()
        self._deadline = self._began + options.join_timeout
        self._started = False
        self._is_broken = self._is_ending = False
        self._gone: dict[int, Message] = {}  # the last status of workers that are gone
        self._news: list[str] = []
        self._readers = _watch.Readers(door)
        self._council = Council(options.hosts, self._will_not_come)
        self._empty_since: float | None = None

    def serve(self, why_end: Callable[[], str] = lambda: "") -> None:
        """Serve until the last worker has left, the roll call failed, or ``why_end()`` is given."""
        while not self._is_over():
            for visitor in self._door.arrivals(_TICK):
                self._hear(visitor)
            self._door.tidy()
            if why := why_end():
                self._end(why)
            elif self._keeper and (why := self._keeper.why_lost(self._options.ping_timeout)):
                self._break("hub", _reports.keeper_gone(self._keeper.pid, why))
            if self._started:
                self._look_after()
            else:
                self._call_roll()
            self._readers.tell(self._status)
            if self._metrics:
                self._metrics.note(self._status)
        self._door.close()
        self._readers.tell(self._status, at_once=True)

    def _status(self) -> Message:
        """Return the status of the run, for readers and metrics."""
        here = {i: _watch.row(m.facts, m.progress, "here") for i, m in self._members.items()}
        found = {**self._gone, **here}
        return {
            "size": self._options.size,
            "seconds": time.monotonic() - self._began,
            "news": self._news,
            "workers": [found[i] for i in sorted(found)],
        }

    @property
    def has_started(self) -> bool:
        """Whether the roll call is over, successfully or not."""
        return self._started

    def is_deserted(self) -> bool:
        """Whether no worker is connected."""
        return not any(v.index is not None for v in self._door.visitors.values())

    # Connections.

    def _hear(self, visitor: Visitor) -> None:
        try:
            messages = visitor.wire.arrived()
            for message in messages or ():
                if visitor.wire.socket in self._door.visitors:  # not shown out meanwhile
                    self._take(visitor, message)
        except Exception as error:  # a malformed message must not end the hub
            self._left(visitor, f"it sent what no worker sends ({error})")
            return
        if messages is None:
            self._left(
                visitor,
                "its connection closed without a goodbye: its process was killed, or crashed",
            )

    def _take(self, visitor: Visitor, message: Message) -> None:
        if not visitor.trusted:
            self._door.prove(visitor, message)
        elif visitor.reads:
            raise _wire.WireError("a reader says nothing")
        elif visitor.launches:
            self._council.take(visitor, message)
        elif visitor.index is None:
            self._join(visitor, _reports.checked_facts(message.get("join")))
        elif visitor.index in self._members:
            self._talk(self._members[visitor.index], visitor.index, message)

    def _left(self, visitor: Visitor, why: str) -> None:
        self._door.show_out(visitor)
        self._council.leave(visitor)
        index = visitor.index
        if index is None or index not in self._members:
            return
        if not self._started:
            del self._members[index]
            return
        raised = self._members[index].raised
        self._give_up(index, f"it raised {raised}" if raised else why)

    # The roll call.

    def _join(self, visitor: Visitor, facts: Message) -> None:
        present = {i: m.facts for i, m in self._members.items()}
        size, is_over = self._options.size, self._started
        if fault := self._hopeless or _reports.refusal(facts, present, size, is_over=is_over):
            visitor.wire.send({"refused": fault})
            self._door.show_out(visitor)
            self._note_refusal(fault)
            return
        visitor.index = facts["index"]
        self._members[facts["index"]] = Member(visitor, facts)
        if len(self._members) == self._options.size:
            self._start()

    def _will_not_come(self, story: str) -> None:
        """Fail the roll call because workers of another host will not join."""
        if not self._started:
            self.give_up_roll(_reports.ended_early(story))

    def give_up_roll(self, why: str) -> None:
        """Refuse the workers that have joined, and all that try later, because of ``why``."""
        self._hopeless = self._hopeless or why
        for member in self._members.values():
            member.visitor.wire.send({"refused": why})
            self._door.show_out(member.visitor)
        self._members.clear()

    def _note_refusal(self, fault: str) -> None:
        """Warn the waiting workers that one was refused: its place may well stay empty.

        Also shorten the deadline, as a refused worker rarely comes back.
        """
        if self._started:
            return
        self._refused = [*self._refused[-4:], fault]
        self._deadline = min(self._deadline, time.monotonic() + AFTER_REFUSAL)
        left = self._deadline - time.monotonic()
        self._door.tell_workers({"waiting": f"refused: {fault} Waiting for {left:.0f} s more."})

    def _call_roll(self) -> None:
        now = time.monotonic()
        waited = now - self._began
        if now > self._deadline:
            self._fail(
                f"{self._options.size - len(self._members)} of {self._options.size} workers did not"
                f" join within {waited:.0f} s: {self._absent()}. Joined: {self._present()}."
                f"{self._incidents()} Start the missing workers, look at their output, and check"
                f" that they can reach {self._options.address}; REPLICAX_JOIN_TIMEOUT sets the"
                " seconds to wait."
            )
        elif now - self._told > _TELL_EVERY:
            self._told = now
            text = f"waiting for {self._absent()}, {waited:.0f} s"
            self._door.tell_workers({"waiting": text + self._incidents()})

    def _absent(self) -> str:
        places = enumerate(self._options.addresses)
        return ", ".join(_reports.name(i, a) for i, a in places if i not in self._members)

    def _present(self) -> str:
        return ", ".join(self._name(i) for i in sorted(self._members)) or "nobody"

    def _incidents(self) -> str:
        told = [f" Refused: {fault}" for fault in self._refused]
        if places := self._door.turned_away:
            told += [
                f" Somebody at {places[-1]} did not know the token of this run: it is of another"
                " run, or was given another REPLICAX_TOKEN."
            ]
        return "".join(told)

    def _fail(self, why: str) -> None:
        for visitor in list(self._door.visitors.values()):
            if visitor.host is not None:
                continue  # launchers stay connected to agree on whether to restart
            if visitor.trusted:
                visitor.wire.send({"refused": why})
            self._door.show_out(visitor)
        self._door.close()
        self._members.clear()
        self._started = True  # the roll call is over; `serve` returns once the hub is empty

    def _end(self, why: str) -> None:
        """Shut down because of ``why``: tell the workers, and give them a moment to read it."""
        if self._is_ending:
            return
        self._is_ending = True
        if not self._started:
            self._fail(
                f"The coordinator of all workers ended before all had come: {why}. Missing:"
                f" {self._absent()}. Joined: {self._present()}. Start all workers again."
            )
        elif self._members:
            self._break("hub", _reports.hub_ended(os.getpid(), why))
            self._members.clear()
        self._empty_since = time.monotonic() - _PATIENCE + _LINGER  # time for workers to read it

    def _break(self, kind: str, text: str) -> None:
        """Tell all workers that the run cannot continue."""
        self._door.close()
        self._door.tell_workers(Report(kind, None, text).to_message())
        self._note(text)
        self._is_broken = True

    def _start(self) -> None:
        self._started = True
        members = [self._members[i].facts for i in range(self._options.size)]
        if self._keeper:
            self._keeper.watch(members)
        now = time.monotonic()
        for member in self._members.values():
            member.progress.heard = member.progress.moved = now
        self._door.tell_workers(
            {
                "go": {
                    "service": self._keeper.address if self._keeper else "",
                    "hub_pid": os.getpid(),
                    "ping_timeout": self._options.ping_timeout,
                    "members": [{k: m.get(k) for k in _TOLD} for m in members],
                    "same_program": len({m.get("program") for m in members}) == 1,
                }
            }
        )

    # The run.

    def _talk(self, member: Member, index: int, message: Message) -> None:
        match message:
            case {"ping": ping}:
                member.progress.note(ping)
                member.visitor.wire.send({"pong": member.progress.count})
            case {"offer": key, "value": value} if len(self._offers) < _MOST_QUESTIONS:
                self._offer(str(key), index, value)
            case {"withdraw": key}:
                self._offers.pop(str(key), None)
                self._asked.pop(str(key), None)
            case {"raised": text}:
                member.raised = str(text)
                member.progress.note(message["progress"])
                self._give_up(index, f"it raised {text}")
            case {"bye": ping}:
                member.progress.note(ping)
                self._give_up(
                    index,
                    "it came to the end of its program, or called `sys.exit` or"
                    " `strategy.leave()`, while others go on;"
                    " all workers must take the same number of steps",
                    quietly=True,
                )
            case _:
                raise _wire.WireError("a message of no known kind")

    def _offer(self, key: str, index: int, value: Any) -> None:
        offers = self._offers.setdefault(key, {})
        self._asked.setdefault(key, time.monotonic())
        offers[index] = value
        if len(offers) == self._options.size:
            del self._offers[key], self._asked[key]
            self._door.tell_workers({"answer": key, "values": [offers[i] for i in sorted(offers)]})
        elif self._gone.keys() - offers.keys():
            self._door.tell_workers({"never": key})

    def _look_after(self) -> None:
        workers = {i: m.progress for i, m in self._members.items()}
        silent = _watch.silent(workers, self._options.ping_timeout)
        if self._is_broken:  # the workers have been informed already
            for index, _ in silent:
                del self._members[index]
            return
        for index, seconds in silent:
            self._give_up(
                index,
                f"it has not answered for {seconds:.0f} s, so that its process is stopped, or its"
                " machine or network is down",
            )
            return
        limits = self._options.step_timeout, self._options.disk_timeout
        if hangs := _watch.hanging(workers, limits[1]):
            self._report_hanging(*hangs)
        elif found := _watch.stuck(workers, self._silent_on(), *limits):
            self._report_stuck(*found)
        elif differs := _watch.different(workers):
            self._report_different(*differs)

    def _silent_on(self) -> tuple[float, list[int]]:
        """Return when the oldest open exchange began, and the workers that have not answered it."""
        if not self._asked:
            return time.monotonic(), []
        key = min(self._asked, key=self._asked.__getitem__)
        return self._asked[key], [i for i in self._members if i not in self._offers[key]]

    def _report_hanging(self, index: int, seconds: float) -> None:
        self._door.tell_workers({"stacks": index})
        what = self._members[index].progress.disk[0]
        self._give_up(index, _reports.hangs(what, seconds))

    def _report_stuck(self, late: int, waiting: int, seconds: float) -> None:
        ahead = self._members[waiting].progress
        self._door.tell_workers({"stacks": late})
        self._give_up(
            late,
            f"it is alive but stuck: it has not moved for {seconds:.0f} s, while"
            f" {self._name(waiting)} waits for it in collective {ahead.count} ({ahead.what});"
            " REPLICAX_STEP_TIMEOUT sets the seconds that a worker may be late",
        )

    def _report_different(self, number: int, a: int, b: int) -> None:
        first = self._members[a].progress.journal[number][0]
        second = self._members[b].progress.journal[number][0]
        calls = {self._name(a): first, self._name(b): second}
        self._break("mismatch", _reports.different(number, calls))

    def _give_up(self, index: int, why: str, *, quietly: bool = False) -> None:
        """Remove a worker and tell the others why; later reports do not replace this one.

        Args:
            index: The worker.
            why: The cause, for the message.
            quietly: The worker finished: not a failure of the run.
        """
        self._door.close()
        member = self._members[index]
        count = member.progress.count
        step = _reports.at_step(count, member.progress.what)
        text = _reports.gone(self._name(index).capitalize(), step, why)
        self._door.tell_workers(
            Report("left" if quietly else "lost", index, text, count).to_message()
        )
        if not quietly:
            self._note(text)
        del self._members[index]
        self._gone[index] = _watch.row(member.facts, member.progress, "left" if quietly else "lost")
        self._is_broken |= not quietly
        # Exchanges to which it has not contributed can never complete.
        for key in [k for k, offers in self._offers.items() if index not in offers]:
            self._door.tell_workers({"never": key})

    def _note(self, text: str) -> None:
        if not self._is_broken:  # later failures are consequences, not the cause
            self._news.append(text)

    def _name(self, index: int) -> str:
        return _reports.name_of(self._members[index].facts)

    def _is_over(self) -> bool:
        now = time.monotonic()
        someone = not self.is_deserted()
        is_over = self._is_broken and not self._members  # a worker that was given up may never exit
        if not self._started or (someone and not is_over):
            self._empty_since = None
            return False
        if self._council.is_waiting() and not self._is_ending:
            return False
        self._empty_since = self._empty_since or now
        return now - self._empty_since > (_PATIENCE if someone else _LINGER)


@contextlib.contextmanager
def _noted(options: HubOptions) -> Iterator[None]:
    """Register the run for `replicax top`; a launcher registers its runs itself."""
    if not options.program:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ClusterError):  # no writable folder: not registered
            folder = _runs.temporary_folder() / f"{_runs.FOLDER}{secrets.token_hex(8)}"
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            _runs.sweep()
            _runs.write_token(options.token, folder)
            _runs.note(folder, options.address, options.program, _runs.BY_HUB, os.getpid())
        yield


def _first_line() -> bytes:
    """Read the first line of standard input, byte by byte: the rest is for `Owner` to read."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def main() -> None:
    """Run the hub that standard input describes; print "here" once it is ready.

    The last command-line argument lists the descriptors of the listening sockets: the one for
    workers, and the one for metrics if they are served.
    """
    ignore_notices()
    options = HubOptions(**json.loads(_first_line()))
    allow_visitors(options.size)
    listener, *others = (socket.socket(fileno=int(n)) for n in sys.argv[-1].split(","))
    owner = Owner(options.owner)
    sys.stdout.write("here\n")
    sys.stdout.flush()
    name_process(f"replicax hub at {options.address}")
    host, port = _wire.split_address(options.address)[0], options.service_port
    keeper = Keeper(host, options.size, listener, *others, bind=options.bind, port=port)
    metrics = None
    if others:  # this starts a thread, so only after the keeper has forked
        metrics = _metrics.Metrics(others[0], options.token)
    hub = Hub(options, Door(listener, options.token), keeper, metrics)
    if keeper.fault:
        place = f"{options.bind or host}:{port or '(any port)'}"
        hub.give_up_roll(_reports.no_service(place, keeper.fault))

    def told(story: str) -> None:
        hub.give_up_roll(_reports.ended_early(story))

    with _noted(options):
        hub.serve(lambda: owner.why_end(None if hub.has_started else told))
    if hub.is_deserted():
        keeper.end()
