"""Hub: the place where workers meet, in a process of its own.

It takes the roll before JAX starts, has JAX's coordination service kept in another process (so
that no worker is more important than another), hears every second how far each worker is, and tells
all what became of one. It ends by itself when the last worker has left.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from replicax.workers import _reports, _roll, _watch, _wire
from replicax.workers._keeper import start_keeper
from replicax.workers._reports import Report
from replicax.workers._wire import Message, Wire

_TICK = 0.1
_LINGER = 1.0  # seconds that the hub outlives its last worker
_PATIENCE = 10.0  # seconds that one which was given up has to end by itself
_TELL_EVERY = 5.0


@dataclass(frozen=True)
class HubOptions:
    """What the hub is told when it starts.

    Attributes:
        address: Where to listen.
        size: How many workers are to come.
        token: What they must know.
        addresses: Where they live, None where that is not known.
        join_timeout: Seconds that they may take to come.
        ping_timeout: Seconds of silence after which a worker is given up.
        step_timeout: Seconds after which one that others wait for is given up.
    """

    address: str
    size: int
    token: str
    addresses: tuple[str | None, ...]
    join_timeout: float
    ping_timeout: float
    step_timeout: float


@dataclass
class Visitor:
    """A connection: a stranger first, then one that knows the token, then a worker."""

    wire: Wire
    challenge: str
    trusted: bool = False
    index: int | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass
class Member:
    """A worker that has joined."""

    visitor: Visitor
    facts: Message
    progress: _watch.Progress = field(default_factory=_watch.Progress)
    raised: str = ""


class Hub:
    """The state of one run, changed by messages and by time."""

    def __init__(self, options: HubOptions, listener: socket.socket, service: str) -> None:
        self._options = options
        self._service = service
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._is_open = True
        self._visitors: dict[socket.socket, Visitor] = {}
        self._members: dict[int, Member] = {}
        self._offers: dict[str, dict[int, Any]] = {}
        self._asked: dict[str, float] = {}
        self._began = time.monotonic()
        self._told = self._began
        self._started = False
        self._is_broken = False
        self._gone: set[int] = set()
        self._empty_since: float | None = None

    def serve(self) -> None:
        """Work until the last worker has left, or the roll-call has failed."""
        while not self._is_over():
            for key, _ in self._selector.select(_TICK):
                # What was closed a moment ago has no news.
                if key.fileobj is self._listener and self._is_open:
                    self._accept()
                elif visitor := self._visitors.get(key.fileobj):  # type: ignore[call-overload]
                    self._hear(visitor)
            if self._started:
                self._look_after()
            else:
                self._call_roll()

    # Connections.

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        visitor = Visitor(Wire(sock), _wire.nonce())
        self._visitors[sock] = visitor
        self._selector.register(sock, selectors.EVENT_READ)
        visitor.wire.send({"challenge": visitor.challenge})

    def _hear(self, visitor: Visitor) -> None:
        try:
            messages = visitor.wire.arrived()
            if messages is None:
                self._left(visitor)
                return
            for message in messages:
                self._take(visitor, message)
        except (_wire.WireError, KeyError, TypeError, ValueError):
            self._left(visitor)  # no worker of ours speaks like that

    def _take(self, visitor: Visitor, message: Message) -> None:
        if not visitor.trusted:
            self._trust(visitor, message)
        elif visitor.index is None:
            self._join(visitor, message["join"])
        else:
            self._talk(self._members[visitor.index], visitor.index, message)

    def _trust(self, visitor: Visitor, message: Message) -> None:
        theirs = str(message["nonce"])
        token, mine = self._options.token, visitor.challenge
        if not _wire.is_proof(message["proof"], token, "worker", mine, theirs):
            visitor.wire.send({"refused": "token"})
            raise _wire.WireError("a wrong proof")
        visitor.trusted = True
        visitor.wire.send({"proof": _wire.proof(token, "hub", theirs, mine)})

    def _close(self, visitor: Visitor) -> None:
        sock = visitor.wire.socket
        if self._visitors.pop(sock, None) is not None:
            self._selector.unregister(sock)
        visitor.wire.close()

    def _left(self, visitor: Visitor) -> None:
        self._close(visitor)
        index = visitor.index
        if index is None or index not in self._members:
            return
        member = self._members[index]
        if not self._started:
            del self._members[index]
            return
        why = (
            f"it raised {member.raised}"
            if member.raised
            else "its connection closed without a goodbye: its process was killed, or crashed"
        )
        self._give_up(index, why)

    # The roll.

    def _join(self, visitor: Visitor, facts: Message) -> None:
        index = int(facts["index"])
        present = {i: m.facts for i, m in self._members.items()}
        fault = _roll.refusal(facts, present, self._options.size, is_over=self._started)
        if fault:
            visitor.wire.send({"refused": fault})
            self._close(visitor)
            return
        visitor.index = index
        self._members[index] = Member(visitor, facts)
        if len(self._members) == self._options.size:
            self._start()

    def _call_roll(self) -> None:
        now = time.monotonic()
        waited = now - self._began
        if waited > self._options.join_timeout:
            self._fail(waited)
        elif now - self._told > _TELL_EVERY:
            self._told = now
            self._tell_all({"waiting": f"waiting for {self._absent()}, {waited:.0f} s"})

    def _absent(self) -> str:
        places = enumerate(self._options.addresses)
        return ", ".join(_reports.name(i, a) for i, a in places if i not in self._members)

    def _fail(self, waited: float) -> None:
        size = self._options.size
        present = ", ".join(self._name(i) for i in sorted(self._members)) or "nobody"
        self._tell_all(
            {
                "refused": f"{size - len(self._members)} of {size} workers did not join within"
                f" {waited:.0f} s: {self._absent()}. Joined: {present}. Start the missing workers,"
                f" look at their output, and check that they can reach {self._options.address};"
                " REPLICAX_JOIN_TIMEOUT sets the seconds to wait."
            }
        )
        for visitor in list(self._visitors.values()):
            self._close(visitor)
        self._close_door()
        self._members.clear()
        self._started = True  # over: it ends when it is empty

    def _start(self) -> None:
        self._started = True
        programs = {m.facts.get("program") for m in self._members.values()}
        members = [self._members[i].facts for i in range(self._options.size)]
        now = time.monotonic()
        for member in self._members.values():
            member.progress.heard = member.progress.moved = now
        self._tell_all(
            {
                "go": {
                    "service": self._service,
                    "hub_pid": os.getpid(),
                    "ping_timeout": self._options.ping_timeout,
                    "members": [{k: m.get(k) for k in ("address", "pid", "host")} for m in members],
                    "same_program": len(programs) == 1,
                }
            }
        )

    # The run.

    def _talk(self, member: Member, index: int, message: Message) -> None:
        match message:
            case {"ping": ping}:
                member.progress.note(ping)
                member.visitor.wire.send({"pong": member.progress.count})
            case {"offer": key, "value": value}:
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
                    "it came to the end of its program, or called `sys.exit`, while others go on;"
                    " all workers must take the same number of steps",
                    quietly=True,
                )

    def _offer(self, key: str, index: int, value: Any) -> None:
        offers = self._offers.setdefault(key, {})
        self._asked.setdefault(key, time.monotonic())
        offers[index] = value
        if len(offers) == self._options.size:
            del self._offers[key], self._asked[key]
            self._tell_all({"answer": key, "values": [offers[i] for i in sorted(offers)]})
        elif self._gone - offers.keys():
            self._tell_all({"never": key})

    def _look_after(self) -> None:
        workers = {i: m.progress for i, m in self._members.items()}
        silent = _watch.silent(workers, self._options.ping_timeout)
        if self._is_broken:  # the news is out already
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
        if found := _watch.stuck(workers, self._silent_on(), self._options.step_timeout):
            self._report_stuck(*found)
        elif differs := _watch.different(workers):
            self._report_different(*differs)

    def _silent_on(self) -> tuple[float, list[int]]:
        """Since when the oldest question is open, and who has not answered it."""
        if not self._asked:
            return time.monotonic(), []
        key = min(self._asked, key=self._asked.__getitem__)
        return self._asked[key], [i for i in self._members if i not in self._offers[key]]

    def _report_stuck(self, late: int, waiting: int, seconds: float) -> None:
        ahead = self._members[waiting].progress
        self._tell_all({"stacks": late})
        self._give_up(
            late,
            f"it is alive but stuck: it has not moved for {seconds:.0f} s, while"
            f" {self._name(waiting)} waits for it in collective {ahead.count} ({ahead.what});"
            " REPLICAX_STEP_TIMEOUT sets the seconds that a worker may be late",
        )

    def _report_different(self, number: int, a: int, b: int) -> None:
        first = self._members[a].progress.journal[number][0]
        second = self._members[b].progress.journal[number][0]
        when = "as" if first != second else "some time before"
        text = (
            f"The workers run different programs: {when} collective {number}. There,"
            f" {self._name(a)} calls {first}, and {self._name(b)} calls {second}. All workers must"
            " call the same functions, reductions and variable creations, with the same shapes and"
            " the same Python numbers, in the same order; do not put them under an `if` that"
            " depends on the worker."
        )
        self._close_door()
        self._tell_all(Report("mismatch", None, text).to_message())
        self._is_broken = True

    def _close_door(self) -> None:
        """Let nobody in any more: the address is free for the next run."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._listener)
            self._listener.close()

    def _give_up(self, index: int, why: str, *, quietly: bool = False) -> None:
        """Tell all that a worker is gone; only the first such news counts."""
        self._close_door()
        member = self._members[index]
        count = member.progress.count
        step = _reports.at_step(count, member.progress.what)
        text = _reports.gone(self._name(index).capitalize(), step, why)
        self._tell_all(Report("left" if quietly else "lost", index, text, count).to_message())
        del self._members[index]
        self._gone.add(index)
        self._is_broken |= not quietly
        for key in [k for k, offers in self._offers.items() if index not in offers]:
            self._tell_all({"never": key})

    def _tell_all(self, message: Message) -> None:
        for visitor in list(self._visitors.values()):
            if visitor.index is not None:
                visitor.wire.send(message)

    def _name(self, index: int) -> str:
        return _roll.name_of(self._members[index].facts)

    def _is_over(self) -> bool:
        now = time.monotonic()
        for visitor in list(self._visitors.values()):
            if visitor.index is None and now - visitor.since > self._options.ping_timeout:
                self._close(visitor)
        someone = any(v.index is not None for v in self._visitors.values())
        is_over = self._is_broken and not self._members  # one that was given up may stay for ever
        if not self._started or (someone and not is_over):
            self._empty_since = None
            return False
        self._empty_since = self._empty_since or now
        return now - self._empty_since > (_PATIENCE if someone else _LINGER)


def main() -> None:
    """Be the hub that standard input describes; say on standard output whether it listens."""
    options = HubOptions(**json.loads(sys.stdin.readline()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the workers leave first
    try:
        listener = _wire.listen(options.address)
    except OSError as error:
        _say({"failed": error.strerror or str(error)})
        return
    _say({"listening": os.getpid()})
    service = start_keeper(_wire.split_address(options.address)[0], options.size, listener)
    Hub(options, listener, service).serve()


def _say(message: Message) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
