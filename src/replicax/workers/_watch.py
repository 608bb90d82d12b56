"""Watch: what each worker says of its progress and its load -> who is stuck, and who is told.

Load: what this process has done, what it waited for, and what it holds.

The program counts; what speaks to the hub, mostly a thread, looks at the counts. Nothing is sent or
locked on the way of a step for them.

Disk: what this process reads or writes, so that a disk that hangs is told from one that is slow.

Readers: those who know the token and only look are told once a second how the run is.

A reader proves itself in another role than a worker, and what it says after that ends its
connection. The hub never waits for one: what a reader does not take in is kept until it does, one
message at most.
"""

import itertools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicax.workers._wire import Door, Message, Visitor

_REMEMBERED = 64
FIGURES = ("steps", "rate", "waited", "waits", "memory", "device_memory")


@dataclass
class Progress:
    """How far one worker is.

    Attributes:
        count: How many collectives it has begun.
        what: The last of them, in words.
        inside: Whether it is still in it.
        pace: Its usual time between two, in seconds.
        moved: When ``count`` or ``inside`` last changed.
        heard: When it last said anything.
        journal: Its last collectives, by number: what each was, and a digest of all up to it.
        load: What it said of its steps, waits and memory; see `replicax.workers._watch`.
        disk: What it reads or writes, in words, or nothing; and a count of how far it is.
        got_on: When ``disk`` last changed.
    """

    count: int = 0
    what: str = ""
    inside: bool = False
    pace: float = 0.0
    moved: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    journal: dict[int, tuple[str, int]] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    disk: tuple[str, int] = ("", 0)
    got_on: float = field(default_factory=time.monotonic)

    def note(self, ping: dict[str, Any]) -> None:
        """Take in what the worker says."""
        now = time.monotonic()
        count, inside, pace = int(ping["count"]), bool(ping["inside"]), float(ping["pace"])
        calls = [(int(n), str(what), int(chain)) for n, what, chain in ping["journal"]]
        self.load = _numbers(ping.get("load", {}))
        reads, far = ping.get("disk", ("", 0))
        if (disk := (str(reads)[:_LONGEST], int(far))) != self.disk:
            self.disk, self.got_on = disk, now
        self.heard = now
        if (count, inside) != (self.count, self.inside):
            self.moved = now
        self.count, self.inside, self.pace = count, inside, pace
        for number, what, chain in calls:
            self.what = what
            self.journal[number] = (what, chain)
        for number in sorted(self.journal)[:-_REMEMBERED]:
            del self.journal[number]

    def is_still(self, step_patience: float, disk_patience: float) -> bool:
        """Whether it has done nothing for too long; who is at the disk may take longer."""
        if self.disk[0]:
            return time.monotonic() - max(self.moved, self.got_on) > disk_patience
        return time.monotonic() - self.moved > step_patience


def _numbers(load: dict[str, Any]) -> dict[str, float]:
    """The figures that are known; ValueError if one is no number."""
    found = {name: float(load.get(name, 0.0)) for name in FIGURES}
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"no numbers: {found}")
    return found


def silent(workers: dict[int, Progress], patience: float) -> list[tuple[int, float]]:
    """Workers that have said nothing for too long, and for how long."""
    now = time.monotonic()
    return [(i, now - p.heard) for i, p in workers.items() if now - p.heard > patience]


def hanging(workers: dict[int, Progress], patience: float) -> tuple[int, float] | None:
    """A worker whose disk does nothing for it any more, and for how long."""
    now = time.monotonic()
    still = {i: now - p.got_on for i, p in workers.items() if p.disk[0]}
    return next(((i, seconds) for i, seconds in still.items() if seconds > patience), None)


def stuck(
    workers: dict[int, Progress],
    question: tuple[float, list[int]],
    patience: float,
    disk_patience: float,
) -> tuple[int, int, float] | None:
    """A worker that another has been waiting for too long: who, for whom, how long.

    Args:
        workers: How far each is.
        question: Since when the oldest question is open, and who has not answered it.
        patience: Seconds that a worker may be late, if steps do not take longer anyway.
        disk_patience: The same for one that reads or writes a checkpoint, from when it last got on.
    """
    now = time.monotonic()
    limit = max(patience, 20 * max((p.pace for p in workers.values()), default=0.0))
    waiting = {i: p for i, p in workers.items() if p.inside and now - p.moved > limit}
    if not waiting:
        return None
    goal = max(p.count for p in waiting.values())
    still = [i for i, p in workers.items() if p.is_still(limit, max(limit, disk_patience))]
    late = [i for i in still if workers[i].count < goal]
    asked, unanswered = question
    if not late and now - asked > limit:  # all wait, but one for itself: its data never come
        late = [i for i in unanswered if i in still or not workers[i].disk[0]]
    if not late:
        return None
    latest = min(late, key=lambda i: (workers[i].count, i))
    others = {i: p for i, p in waiting.items() if i not in late} or waiting
    first = min(others, key=lambda i: others[i].moved)
    return latest, first, now - workers[latest].moved


def different(workers: dict[int, Progress]) -> tuple[int, int, int] | None:
    """Two workers that did different things as the same collective: which, and who.

    The digests make a difference visible for ever, also when it is no longer in the journals.
    """
    order = sorted(workers)
    for a, b in itertools.pairwise(order):
        mine, theirs = workers[a].journal, workers[b].journal
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number][1] != theirs[number][1]:
                return number, a, b
    return None


_EVERY = 0.9  # seconds, so that who asks once a second gets new ones each time
_LATELY = 10  # looks over which rates are taken
_STATM = Path("/proc/self/statm")


class Load:
    """Counts of one process; as a context, it counts time in which the program waits for its input.

    Attributes:
        steps: Calls of functions, and runs outside of them, that all workers finished together.
        batches: Elements of distributed datasets that were waited for.
        waited: Seconds in which the program waited for such elements, those that are over.
        device_memory: How many bytes this process's accelerators hold.
    """

    def __init__(self) -> None:
        self.steps = self.batches = 0
        self.waited = 0.0
        self._lately: dict[str, float] = {}
        self.device_memory: Callable[[], float] = lambda: 0.0
        self._open: dict[int, float] = {}  # since when a thread waits
        self._looks: deque[tuple[float, int, float]] = deque(maxlen=_LATELY + 1)

    def __enter__(self) -> None:
        self._open[threading.get_ident()] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self.waited += now - self._open.pop(threading.get_ident(), now)
        self.batches += 1

    def told(self) -> dict[str, float]:
        """The figures of now, by their names in `replicax.workers._watch.FIGURES`.

        Rates are those of the last ten seconds or so; they and the memory are found once a second.
        """
        now = time.monotonic()
        waited = self.waited + sum(now - since for since in list(self._open.values()))
        if not self._looks or now - self._looks[-1][0] >= _EVERY:
            self._looks.append((now, self.steps, waited))
            then, steps, before = self._looks[0]
            span = max(now - then, 1e-9)
            self._lately = {
                "rate": (self.steps - steps) / span,
                "waits": min(max((waited - before) / span, 0.0), 1.0),
                "memory": _resident(),
                "device_memory": self.device_memory(),
            }
        return {"steps": self.steps, "waited": waited, **self._lately}


def _resident() -> float:
    """How many bytes of memory this process holds; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return 0.0


load = Load()


class Disk:
    """What this process reads or writes just now, and others may wait for; and that it gets on."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._far = 0
        self.got_on_at = time.monotonic()

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Read or write something, which is named in words."""
        self.got_on()
        self._open.append(what)
        try:
            yield
        finally:
            self._open.remove(what)
            self.got_on()

    def got_on(self) -> None:
        """Something was read or written."""
        self._far += 1
        self.got_on_at = time.monotonic()

    def told(self) -> tuple[str, int]:
        """What is read or written since the longest time, or nothing; and how far that is."""
        return next(iter(tuple(self._open)), ""), self._far


disk = Disk()


EVERY = 1.0
_LONGEST = 300  # letters of a text that a worker gave


class Readers:
    """All readers of a hub."""

    def __init__(self, door: Door) -> None:
        self._door = door
        self._told = 0.0

    def tell(self, status: Callable[[], Message], *, at_once: bool = False) -> None:
        """Tell the readers the status, if there are any and it is time."""
        if not (readers := self._door.readers()):
            return
        now = time.monotonic()
        news = b""
        if at_once or now - self._told >= EVERY:
            self._told = now
            news = json.dumps({"status": status()}).encode() + b"\n"
        for visitor in readers:
            self._send(visitor, news)

    def _send(self, visitor: Visitor, news: bytes) -> None:
        data = visitor.unsent or news
        try:
            visitor.wire.socket.setblocking(False)
            sent = visitor.wire.socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._door.show_out(visitor)
            return
        visitor.unsent = data[sent:]


def row(facts: Message, progress: Any, state: str) -> Message:
    """One worker, as readers are told of it.

    Args:
        facts: What it said of itself when it joined.
        progress: What it said since.
        state: "here", "left" at its end, or "lost".
    """
    return {
        "index": facts["index"],
        "address": str(facts.get("address") or "")[:_LONGEST],
        "host": str(facts.get("host") or "")[:_LONGEST],
        "pid": facts["pid"],
        "state": state,
        "collectives": progress.count,
        "doing": progress.what[:_LONGEST] if progress.inside else progress.disk[0],
        "silent": time.monotonic() - progress.heard,
        **progress.load,
    }
