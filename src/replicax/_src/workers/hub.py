"""The hub: the membership service of a run, in a separate process.

It calls the roll before JAX starts, runs JAX's coordination service in another process (so that no
worker is special), receives heartbeats every second, and notifies the workers when one fails.
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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replicax._src.base.lazy import LazyModule
from replicax._src.cluster.checks import ClusterError
from replicax._src.workers import reports, run_registry, watchdog, wire
from replicax._src.workers.candidates import Candidates
from replicax._src.workers.council import Council
from replicax._src.workers.keeper import Keeper
from replicax._src.workers.membership import MembershipLog
from replicax._src.workers.reports import Report
from replicax._src.workers.resizes import Resizes
from replicax._src.workers.sessions import Owner, ignore_notices, name_process
from replicax._src.workers.settings import HubOptions
from replicax._src.workers.wire import Acceptor, Connection, Message, raise_file_limit

if TYPE_CHECKING:
    from replicax._src.workers import prometheus
else:
    prometheus = LazyModule("replicax._src.workers.prometheus")  # most runs serve no metrics

_TICK = 0.1
_LINGER = 1.0  # seconds that the hub waits after the last worker has left
_PATIENCE = 10.0  # seconds for a worker that was given up to exit
_REPORT_EVERY = 5.0
_MOST_QUESTIONS = 10_000
_REGISTERED = 2  # the first collective of a generation that begins after all have registered
# Sent to all workers.
_SHARED_FACTS = ("index", "address", "pid", "host", "gpus", "machine", "cores", "quotas")
_FINISHES = "The run has come to its end."
AFTER_REFUSAL = 30.0  # seconds that the roll call continues after a worker was refused


@dataclass
class Member:
    """A worker that has joined."""

    connection: Connection
    facts: Message
    progress: watchdog.Progress = field(default_factory=watchdog.Progress)
    raised: str = ""
    can_wait: bool = False  # whether it stops between two steps to wait for others


class Hub:
    """The state of one run, driven by messages and timeouts."""

    def __init__(
        self,
        options: HubOptions,
        acceptor: Acceptor,
        keeper: Keeper | None = None,
        metrics: "prometheus.Metrics | None" = None,
        new_keeper: Callable[[int], Keeper] | None = None,
    ) -> None:
        self._options = options
        self._resizes = Resizes(options.least_workers, new_keeper, options.wait)
        self._membership = MembershipLog()
        self._size = options.size
        self._acceptor = acceptor
        self._keeper = keeper
        self._metrics = metrics
        self._members: dict[int, Member] = {}
        self._refused: list[str] = []
        self._failure = ""
        self._offers: dict[str, dict[int, Any]] = {}
        self._asked_at: dict[str, float] = {}
        self._began = self._announced_at = time.monotonic()
        self._deadline = self._began + options.join_timeout
        self._started = False
        self._is_broken = self._is_ending = False
        self._gone: dict[int, Message] = {}  # the last status of workers that are gone
        self._absentees: set[int] = set()  # workers of this generation that are gone
        self._news: list[str] = []
        self._slow: dict[int, str] = {}  # a message for each worker that is slow now
        self._readers = watchdog.Readers(acceptor)
        self._candidates = Candidates(acceptor)
        # The generation in which each worker took its place: newcomers rank behind the others, so
        # that the first worker stays the first.
        self._joined: dict[int, int] = {}
        self._order: list[int] = []  # the workers of this generation, by their ranks
        self._council = Council(options.hosts, self._abandon_roll_call, options.least_hosts)
        self._empty_since: float | None = None

    def serve(self, why_end: Callable[[], str] = lambda: "") -> None:
        """Serve until the last worker has left, the roll call failed, or ``why_end()`` is given."""
        while not self._is_over():
            # Messages first: if the hub itself was stopped for a while, heartbeats wait there, and
            # their senders must not count as silent.
            for connection in self._acceptor.poll(_TICK):
                self._receive(connection)
            self._acceptor.drop_stale()
            if why := why_end():
                self._shut_down(why)
            elif self._keeper and (why := self._keeper.why_lost(self._options.ping_timeout)):
                self._fail_run("hub", reports.keeper_gone(self._keeper.pid, why))
            self._resizes.reap()
            if self._started:
                self._check_workers()
                for index, lost in self._candidates.lost(self._options):
                    self._drop_candidate(index, lost)
                self._end_if_too_few()
            else:
                self._call_roll()
            self._readers.publish(self._status)
            if self._metrics:
                self._metrics.note(self._status)
        self._acceptor.close()
        self._readers.publish(self._status, at_once=True)

    def _status(self) -> Message:
        """Return the status of the run, for readers and metrics."""
        here = {
            i: watchdog.status_row(m.facts, m.progress, "here") for i, m in self._members.items()
        }
        joining = {i: watchdog.status_row(f, p, "joining") for i, f, p in self._candidates.rows()}
        found = {**self._gone, **joining, **here}
        return {
            "size": self._size,
            "most": self._options.size if self._resizes.is_on else 0,
            "generation": self._resizes.generation,
            "membership": self._membership.entries,
            "seconds": time.monotonic() - self._began,
            "news": self._news,
            "slow": [self._slow[i] for i in sorted(self._slow)],
            "workers": [found[i] for i in sorted(found)],
        }

    @property
    def has_started(self) -> bool:
        """Whether the roll call is over, successfully or not."""
        return self._started

    def is_deserted(self) -> bool:
        """Whether no worker is connected."""
        return not any(v.index is not None for v in self._acceptor.connections.values())

    # Connections.

    def _receive(self, connection: Connection) -> None:
        """Read the available messages of a connection, and handle them; drop it if it is closed."""
        try:
            messages = connection.wire.read_available()
            for message in messages or ():
                if connection.wire.socket in self._acceptor.connections:  # not closed meanwhile
                    self._dispatch(connection, message)
        except Exception as error:  # a malformed message must not end the hub
            self._disconnected(connection, f"it violated the protocol ({error})")
            return
        if messages is None:
            self._disconnected(
                connection,
                "its connection closed without a goodbye: its process was killed, or crashed",
            )

    def _dispatch(self, connection: Connection, message: Message) -> None:
        """Route a message by the state of its connection."""
        if not connection.trusted:
            self._acceptor.prove(connection, message)
        elif connection.reads:
            raise wire.WireError("readers must not send messages")
        elif connection.launches:
            self._council.handle(connection, message)
        elif connection.candidate is not None:
            self._handle_candidate(connection.candidate, message)
        elif connection.index is None:
            self._join(connection, reports.checked_facts(message.get("join")))
        elif connection.index in self._members:
            self._handle(self._members[connection.index], connection.index, message)

    def _disconnected(self, connection: Connection, why: str) -> None:
        """Handle a closed connection: a worker's is a failure of the run once it has started."""
        self._acceptor.disconnect(connection)
        self._council.leave(connection)
        if connection.candidate is not None:
            self._drop_candidate(connection.candidate, "it ended before it took part")
        index = connection.index
        if index is None or index not in self._members:
            return
        if not self._started:
            del self._members[index]
            return
        raised = self._members[index].raised
        self._give_up(index, f"it raised {raised}" if raised else why)

    # The roll call.

    def _join(self, connection: Connection, facts: Message) -> None:
        """Accept a worker or refuse it; start the run when all have joined."""
        present = {i: m.facts for i, m in self._members.items()}
        size, is_over = self._options.size, self._started
        if facts.get("joins"):
            self._admit(connection, facts, present)
            return
        if fault := self._failure or reports.refusal(facts, present, size, is_over=is_over):
            connection.wire.send({"refused": fault})
            self._acceptor.disconnect(connection)
            self._note_refusal(fault)
            return
        connection.index = facts["index"]
        self._members[facts["index"]] = Member(connection, facts)
        if len(self._members) == self._options.size:
            self._membership.add(0, time.monotonic() - self._began, self._members.keys())
            self._start()

    def _abandon_roll_call(self, story: str) -> None:
        """Fail the roll call because workers of another host will not join."""
        if not self._started:
            self.fail_roll_call(reports.ended_early(story))

    def fail_roll_call(self, why: str) -> None:
        """Refuse the workers that have joined, and all that try later, because of ``why``."""
        self._failure = self._failure or why
        for member in self._members.values():
            member.connection.wire.send({"refused": why})
            self._acceptor.disconnect(member.connection)
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
        self._acceptor.broadcast({"waiting": f"refused: {fault} Waiting for {left:.0f} s more."})

    def _call_roll(self) -> None:
        """Fail the roll call at its deadline; until then, report regularly who is missing."""
        now = time.monotonic()
        waited = now - self._began
        if now > self._deadline:
            self._abort_roll_call(
                f"{self._options.size - len(self._members)} of {self._options.size} workers did not"
                f" join within {waited:.0f} s: {self._absent()}. Joined: {self._present()}."
                f"{self._incidents()} Start the missing workers, look at their output, and check"
                f" that they can reach {self._options.address}; REPLICAX_JOIN_TIMEOUT sets the"
                " seconds to wait."
            )
        elif now - self._announced_at > _REPORT_EVERY:
            self._announced_at = now
            text = f"waiting for {self._absent()}, {waited:.0f} s"
            self._acceptor.broadcast({"waiting": text + self._incidents()})

    def _absent(self) -> str:
        places = enumerate(self._options.addresses)
        return ", ".join(reports.name(i, a) for i, a in places if i not in self._members)

    def _present(self) -> str:
        return ", ".join(self._name(i) for i in sorted(self._members)) or "nobody"

    def _incidents(self) -> str:
        lines = [f" Refused: {fault}" for fault in self._refused]
        if places := self._acceptor.rejected_peers:
            lines += [
                f" A process at {places[-1]} did not know the token of this run: it belongs to"
                " another run, or has another REPLICAX_TOKEN."
            ]
        return "".join(lines)

    def _abort_roll_call(self, why: str) -> None:
        """Refuse all workers, and stop listening."""
        for connection in list(self._acceptor.connections.values()):
            if connection.host is not None:
                continue  # launchers stay connected to agree on whether to restart
            if connection.trusted:
                connection.wire.send({"refused": why})
            self._acceptor.disconnect(connection)
        self._acceptor.close()
        self._members.clear()
        self._started = True  # the roll call is over; `serve` returns once the hub is empty

    def _shut_down(self, why: str) -> None:
        """Shut down because of ``why``: notify the workers, and let them read it."""
        if self._is_ending:
            return
        self._is_ending = True
        if not self._started:
            self._abort_roll_call(
                f"The coordinator ended before all workers had joined: {why}. Missing:"
                f" {self._absent()}. Joined: {self._present()}. Start all workers again."
            )
        elif self._members:
            self._fail_run("hub", reports.hub_ended(os.getpid(), why))
            self._members.clear()
        self._empty_since = time.monotonic() - _PATIENCE + _LINGER  # time for workers to read it

    def _fail_run(self, kind: str, text: str) -> None:
        """Notify all workers that the run cannot continue."""
        self._acceptor.close()
        self._candidates.dismiss(text)
        self._acceptor.broadcast(Report(kind, None, text).to_message())
        self._add_news(text)
        self._is_broken = True  # after the news, which keep the first failure only

    def _start(self, last: int = 0, **resize: Any) -> None:
        """Send the start message with the facts of all workers.

        Args:
            last: The collective after which an elastic run continues.
            **resize: Further entries of the message, about the preceding resize.
        """
        self._started = True
        self._order = self._ranked(self._members)
        members = [self._members[i].facts for i in self._order]
        self._size = len(members)
        if self._keeper:
            self._keeper.watch(members)
        # The time for which the first workers waited for the last ones must not count as silence.
        now = time.monotonic()
        for member in self._members.values():
            member.progress.heard = member.progress.moved = now
        self._acceptor.broadcast(
            {
                "go": {
                    "service": self._keeper.address if self._keeper else "",
                    "hub_pid": os.getpid(),
                    "ping_timeout": self._options.ping_timeout,
                    "members": [{k: m.get(k) for k in _SHARED_FACTS} for m in members],
                    "same_program": len({m.get("program") for m in members}) == 1,
                    "elastic": self._options.least_workers > 0,
                    "least": self._options.least_workers,
                    "newcomers": self._candidates.is_waiting(),
                    "holds": self._resizes.hold(len(members)),
                    "generation": self._resizes.generation,
                    "last": last,
                    **resize,
                }
            }
        )

    # The run.

    def _handle(self, member: Member, index: int, message: Message) -> None:
        """Handle a message of a worker that has joined."""
        match message:
            case {"ping": ping}:
                # Each generation counts its collectives from 0. A ping of an earlier one says no
                # more than that the worker is alive.
                if message.get("generation", 0) == self._resizes.generation:
                    member.progress.note(ping)
                member.progress.heard = time.monotonic()
                member.connection.wire.send({"pong": member.progress.count})
            case {"offer": key, "value": value} if len(self._offers) < _MOST_QUESTIONS:
                # A thread may still offer to an exchange of before a resize: the worker itself ends
                # that exchange, and an answer by the workers that are left would be wrong. Nor is
                # one answered after a loss: some workers would take it, and others the loss.
                is_of_now = message.get("generation", 0) == self._resizes.generation
                if is_of_now and not self._resizes.has_lost:
                    self._offer(str(key), index, value)
            case {"withdraw": key}:
                self._offers.pop(str(key), None)
                self._asked_at.pop(str(key), None)
            case {"raised": text}:
                member.raised = str(text)
                member.progress.note(message["progress"])
                self._give_up(index, f"it raised {text}")
            case {"bye": ping}:
                member.progress.note(ping)
                self._resizes.leave(index, int(message.get("completed", 0)))
                self._give_up(
                    index,
                    "it reached the end of its program, or called `sys.exit` or"
                    " `strategy.leave()`, while the others continue;"
                    " all workers must take the same number of steps",
                    quietly=True,
                )
            case _:
                self._handle_survivor(index, message)

    def _handle_survivor(self, index: int, message: Message) -> None:
        """Handle a report of a survivor of an elastic run, after another worker was lost."""
        match message:
            case {"ready": int(generation), "has": int(has), "completed": int(completed)}:
                steps = int(message.get("steps", 0))
                self._note_ready(index, message, generation, (has, completed, steps))
            case {"goodbye": dict(ping)}:
                self._members[index].progress.note(ping)
                self._part(index)
            case {"waits": bool(can_wait)}:
                self._members[index].can_wait = can_wait
            case {"no newcomers": str(why)}:
                self._candidates.dismiss(reports.cannot_join(why), is_error=True)
            case {"cannot": text}:
                self._cannot_resize(index, str(text))
            case _:
                raise wire.WireError("unknown message")

    def _note_ready(
        self, index: int, message: Message, generation: int, steps: tuple[int, int, int]
    ) -> None:
        """Note that a worker is ready to re-form, and start the next generation if all are."""
        if message.get("planned") and generation == self._resizes.generation:
            self._resizes.plan(str(message["planned"]))
        if self._resizes.note(index, generation, *steps):
            calls, workers = int(message.get("calls", 0)), int(message.get("workers", 0))
            self._resizes.note_calls(index, calls, workers)
            if message.get("gave_up"):
                self._stand_in(index)
            if message.get("state"):
                self._candidates.hand_over(str(message["state"]))
            self._resize_if_ready()

    def _offer(self, key: str, index: int, value: Any) -> None:
        """Add a worker's value to an exchange, and broadcast the result when it is complete."""
        offers = self._offers.setdefault(key, {})
        self._asked_at.setdefault(key, time.monotonic())
        offers[index] = value
        if len(offers) == self._size:
            del self._offers[key], self._asked_at[key]
            values = [offers[i] for i in self._ranked(offers)]
            self._acceptor.broadcast({"answer": key, "values": values})
        elif self._absentees - offers.keys():
            self._acceptor.broadcast({"never": key})

    def _check_workers(self) -> None:
        """Detect workers that are silent, blocked in file I/O, stuck, or running other code."""
        workers = {i: m.progress for i, m in self._members.items()}
        silent = watchdog.silent(workers, self._options.ping_timeout)
        if self._is_broken:  # the workers have been informed already
            for index, _ in silent:
                del self._members[index]
            return
        if self._resizes.cause and not silent:
            limit = max(self._options.step_timeout, 20 * max(p.pace for p in workers.values()))
            silent = self._resizes.late(workers, limit)
        for index, seconds in silent:  # one at a time: the run then ends, or goes on without it
            self._give_up(
                index,
                f"it has not answered for {seconds:.0f} s: its process is stopped, or its machine"
                " or network is down",
            )
            return
        # The cause before its consequence: others wait in a collective for a worker whose file I/O
        # has stalled, so it looks stuck too.
        limits = self._options.step_timeout, self._options.disk_timeout
        if hangs := watchdog.hanging(workers, limits[1]):
            self._report_hanging(*hangs)
        elif found := watchdog.stuck(workers, self._oldest_exchange(), *limits):
            self._report_stuck(*found)
        elif differs := watchdog.different(workers):
            self._report_different(*differs)
        else:
            self._note_slow(workers)

    def _note_slow(self, workers: dict[int, watchdog.Progress]) -> None:
        """Have worker 0 report slow workers, each once until it has recovered."""
        found = {s.worker: s for s in watchdog.slow(workers)}
        still = {s.worker for s in watchdog.slow(workers, watchdog.STILL_SLOW_TIMES)}
        for index in self._slow.keys() - still:
            del self._slow[index]
        for index in found.keys() - self._slow.keys():
            times, seconds, cause = found[index][1:]
            self._slow[index] = reports.slow(self._name(index), times, seconds, cause)
            self._acceptor.broadcast({"slow": self._slow[index]})

    def _oldest_exchange(self) -> tuple[float, list[int]]:
        """Return when the oldest open exchange began, and the workers that have not answered it."""
        if not self._asked_at:
            return time.monotonic(), []
        key = min(self._asked_at, key=self._asked_at.__getitem__)
        return self._asked_at[key], [i for i in self._members if i not in self._offers[key]]

    def _report_hanging(self, index: int, seconds: float) -> None:
        self._acceptor.broadcast({"stacks": index})
        what = self._members[index].progress.disk[0]
        self._give_up(index, reports.hangs(what, seconds))

    def _report_stuck(self, late: int, waiting: int, seconds: float) -> None:
        ahead = self._members[waiting].progress
        self._acceptor.broadcast({"stacks": late})
        self._give_up(
            late,
            f"it is alive but stuck: it has made no progress for {seconds:.0f} s, while"
            f" {self._name(waiting)} waits for it in collective {ahead.count} ({ahead.what});"
            " REPLICAX_STEP_TIMEOUT sets the seconds that a worker may be late",
        )

    def _report_different(self, number: int, a: int, b: int) -> None:
        first = self._members[a].progress.journal[number][0]
        second = self._members[b].progress.journal[number][0]
        calls = {self._name(a): first, self._name(b): second}
        self._fail_run("mismatch", reports.different(number, calls))

    def _give_up(self, index: int, why: str, *, quietly: bool = False) -> None:
        """Remove a worker and notify the others; later reports do not replace this one.

        Args:
            index: The worker.
            why: The cause, for the message.
            quietly: The worker finished: not a failure of the run.
        """
        member = self._members[index]
        count = member.progress.count
        step = reports.at_step(count, member.progress.what)
        name, left = self._name(index).capitalize(), len(self._members) - 1
        if self._may_go_on(index) and not quietly and not self._is_broken:
            self._shrink(index, reports.shrunk(name, step, why, left) + self._must_wait(left))
            return
        self._acceptor.close()  # frees the address: a launcher may restart all workers at once
        text = reports.gone(name, step, why)
        self._candidates.dismiss(_FINISHES if quietly else text)
        message = Report("left" if quietly else "lost", index, text, count).to_message()
        if quietly:  # members of a later generation do not wait for it
            message["generation"] = self._resizes.generation
        self._acceptor.broadcast(message)
        if not quietly:
            self._add_news(text)
        del self._members[index]
        self._absentees.add(index)
        self._gone[index] = watchdog.status_row(
            member.facts, member.progress, "left" if quietly else "lost"
        )
        self._is_broken |= not quietly
        # Exchanges to which it has not contributed can never complete.
        for key in [k for k, offers in self._offers.items() if index not in offers]:
            self._acceptor.broadcast({"never": key})
        self._resize_if_ready()

    # Resizes of an elastic run.

    def _shrink(self, index: int, text: str) -> None:
        """Remove a lost worker, and ask the others to re-form without it."""
        member = self._members.pop(index)
        self._gone[index] = watchdog.status_row(member.facts, member.progress, "lost")
        # It may be alive but stuck: let it read that it was given up, and end itself.
        member.connection.wire.send(Report("lost", index, text).to_message())
        member.connection.index = None
        self._news.append(text)
        self._resizes.begin(index, text)
        self._stand_in(index)
        message = Report("resize", index, text).to_message()
        self._acceptor.broadcast({**message, "generation": self._resizes.generation})
        self._resize_if_ready()

    def _stand_in(self, index: int) -> None:
        """Register at JAX's service in place of a lost worker, for which the others would wait.

        A worker's second collective of a generation begins when all have registered.
        """
        if self._keeper and all(m.progress.count < _REGISTERED for m in self._members.values()):
            self._keeper.stand_in(self._order.index(index))

    def _may_go_on(self, without: int) -> bool:
        """Whether the others go on without a worker, or can wait for another one."""
        others = [member for i, member in self._members.items() if i != without]
        if self._resizes.allows(len(others)):
            return True
        can_wait = bool(others) and all(member.can_wait for member in others)
        return self._resizes.is_on and self._options.wait > 0 and can_wait

    def _must_wait(self, left: int) -> str:
        """Return a message if ``left`` workers are too few to go on and must wait; else ""."""
        least = self._options.least_workers
        return "" if left >= least else reports.must_wait(least, self._options.wait)

    def _end_if_too_few(self) -> None:
        """End the run if too few workers have waited for others long enough."""
        if self._candidates.is_waiting() or self._is_broken or not self._resizes.has_waited():
            return
        text = reports.too_few(len(self._members), self._options.least_workers, self._options.wait)
        self._candidates.dismiss(text)
        self._acceptor.close()
        self._acceptor.broadcast({"too few": text})
        self._add_news(text)

    def _part(self, index: int) -> None:
        """Remove a preempted worker that has left after the step on which all workers agreed."""
        left = len(self._members) - 1
        if not self._may_go_on(index) or self._is_broken:
            self._give_up(index, "it was preempted, and has left")
            return
        text = reports.parted(self._name(index).capitalize(), left) + self._must_wait(left)
        member = self._members.pop(index)
        self._gone[index] = watchdog.status_row(member.facts, member.progress, "left")
        self._acceptor.disconnect(member.connection)
        self._news.append(text)
        self._resizes.begin(index, text)
        self._resize_if_ready()

    def _resize_if_ready(self) -> None:
        """Start the next generation when all members have reported their last steps."""
        if self._is_broken or not self._resizes.is_ready(self._members):
            return
        if self._candidates.are_restoring():
            return  # this is called again when they are done, or lost
        last = self._resizes.last()
        if last is None:
            self._cannot_resize(min(self._members), "the survivors ended different steps.")
            return
        cause, steps = self._resizes.cause, self._membership.total(self._resizes.counts(last))
        calls = self._resizes.calls()
        promoted = self._candidates.promoted()
        for index, candidate in promoted.items():
            self._members[index] = Member(candidate.connection, candidate.facts)
            self._joined[index] = self._resizes.generation + 1
            self._gone.pop(index, None)
            name = self._name(index).capitalize()
            self._news.append(reports.joined(name, len(self._members)))
        self._offers.clear()
        self._asked_at.clear()
        self._absentees.clear()
        self._keeper = self._resizes.next_keeper(self._keeper, len(self._members))
        if self._keeper is not None and self._keeper.fault:
            fault = reports.no_service(self._options.address, self._keeper.fault)
            self._fail_run("hub", fault)
            return
        for member in self._members.values():
            member.progress = watchdog.Progress()
        seconds = time.monotonic() - self._began
        self._membership.add(steps, seconds, self._members.keys(), promoted.keys(), cause)
        self._start(last, joined=sorted(promoted), **calls)

    def _ranked(self, indices: Collection[int]) -> list[int]:
        """Return workers in the order of their ranks."""
        return sorted(indices, key=lambda i: (self._joined.get(i, 0), i))

    # Workers that join an elastic run.

    def _admit(self, connection: Connection, facts: Message, present: dict[int, Message]) -> None:
        """Accept a worker as a candidate, which prepares itself alone, or refuse it."""
        known = {**present, **{i: f for i, f, _ in self._candidates.rows()}}
        fault = self._failure or reports.join_refusal(
            facts, known, self._options.size, is_elastic=self._resizes.is_on
        )
        if not fault and (not self._started or self._is_broken or not self._members):
            fault = reports.cannot_join("the run has not begun, or is over.")
        if fault:
            connection.wire.send({"refused": fault})
            self._acceptor.disconnect(connection)
            return
        self._candidates.add(connection, facts)
        programs = {f.get("program") for f in present.values()}
        connection.wire.send(
            {
                "go": {
                    "service": "",
                    "hub_pid": os.getpid(),
                    "ping_timeout": self._options.ping_timeout,
                    "members": [{k: facts.get(k) for k in _SHARED_FACTS}],
                    "same_program": facts.get("program") in programs,
                    "elastic": True,
                    "least": self._options.least_workers,
                    "joins": True,
                    "generation": -1,
                    "last": 0,
                }
            }
        )

    def _handle_candidate(self, index: int, message: Message) -> None:
        """Handle a message of a worker that does not take part yet."""
        match message:
            case {"newcomer": "waits"}:
                self._candidates.note_waiting(index)
                self._acceptor.broadcast({"newcomers": True})
            case {"newcomer": "restored"}:
                self._candidates.note_restored(index)
                self._resize_if_ready()
            case {"ping": ping}:
                self._candidates.note_ping(index, ping)
            case {"raised": text}:
                self._drop_candidate(index, f"it raised {text}")
            case {"bye": _}:
                self._drop_candidate(index, "it reached the end of its program before it took part")
            case _:
                raise wire.WireError("unknown message")

    def _drop_candidate(self, index: int, why: str) -> None:
        """Forget a worker that wanted to join; the others go on as they are."""
        facts = self._candidates.drop(index)
        if facts is not None and not self._is_broken:
            self._news.append(f"{reports.name_of(facts).capitalize()} did not join: {why}.")
            self._resize_if_ready()

    def _cannot_resize(self, index: int, why: str) -> None:
        """End the run, because a survivor cannot go on without a lost worker."""
        if self._is_broken:
            return
        if self._resizes.cause:
            text = reports.cannot_go_on(self._resizes.cause, self._name(index), why)
            self._fail_run("lost", text)
        else:  # the others are in the next generation already, and connect to it
            self._give_up(index, f"it could not go on without the worker lost before. {why}")

    def _add_news(self, text: str) -> None:
        if not self._is_broken:  # later failures are consequences, not the cause
            self._news.append(text)

    def _name(self, index: int) -> str:
        return reports.name_of(self._members[index].facts)

    def _is_over(self) -> bool:
        """Whether the hub can exit: no worker is left, and no launcher decides on a restart."""
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
def _registered(options: HubOptions) -> Iterator[None]:
    """Register the run for `replicax top`; a launcher registers its runs itself."""
    if not options.program:
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, ClusterError):  # no writable folder: not registered
            folder = (
                run_registry.temporary_folder() / f"{run_registry.FOLDER}{secrets.token_hex(8)}"
            )
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            run_registry.sweep()
            run_registry.write_token(options.token, folder)
            run_registry.note(
                folder, options.address, options.program, run_registry.BY_HUB, os.getpid()
            )
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
    raise_file_limit(options.size)
    listener, *others = (socket.socket(fileno=int(n)) for n in sys.argv[-1].split(","))
    owner = Owner(options.owner)
    sys.stdout.write("here\n")
    sys.stdout.flush()
    name_process(f"replicax hub at {options.address}")
    host, port = wire.split_address(options.address)[0], options.service_port
    keeper = Keeper(host, options.size, listener, *others, bind=options.bind, port=port)
    metrics = None
    if others:  # this starts a thread, so only after the keeper has forked
        metrics = prometheus.Metrics(others[0], options.token)
    acceptor = Acceptor(listener, options.token)

    def new_keeper(size: int) -> Keeper:
        """Fork a keeper for the next generation; a fixed port may still be in use."""
        inherited = [c.wire.socket for c in acceptor.connections.values()]
        sockets = listener, *others, *inherited
        return Keeper(host, size, *sockets, bind=options.bind, meanwhile=acceptor.greet)

    hub = Hub(options, acceptor, keeper, metrics, new_keeper)
    if keeper.fault:
        place = f"{options.bind or host}:{port or '(any port)'}"
        hub.fail_roll_call(reports.no_service(place, keeper.fault))

    def on_exit(story: str) -> None:
        hub.fail_roll_call(reports.ended_early(story))

    with _registered(options):
        hub.serve(lambda: owner.why_end(None if hub.has_started else on_exit))
    # While a worker is connected, such as one that was given up, do not wait for it: the keeper
    # outlives the hub until the last one has exited.
    if hub.is_deserted():
        keeper.end()
