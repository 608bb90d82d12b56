"""Worker progress: measured in each worker, evaluated by the hub, and shown to readers.

- `Progress` and the functions below it run in the hub: they detect workers that are silent, stuck,
  blocked in file I/O, or running another program.
- `Load` and `Disk` count in a worker. The step itself only increments counters, without a lock or a
  message; the thread that pings the hub reads them.
- `Readers` are clients that may only observe the run. They authenticate in another role than
  workers, and any message from one ends its connection. The hub never blocks on a reader: it keeps
  at most one unsent message for it.
"""

import itertools
import json
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from replicax._src.workers.wire import Acceptor, Connection, Message

_REMEMBERED = 64
_EVERY = 0.9  # seconds; below 1, so that a poll every second always sees new rates
# A worker is slow if it needs this many times the median, over this many steps and seconds; it is
# reported again only after it was below the second factor.
_SLOW_TIMES = 1.3
STILL_SLOW_TIMES = 1.15
_SLOW_STEPS = 20
_SLOW_SECONDS = 5.0
_SLOW_SAMPLES = 32
FIGURES = (
    *("steps", "rate", "waited", "waits", "memory", "device_memory"),
    *("blocked", "reading", "mfu", "goodput"),
)


@dataclass
class Progress:
    """The progress of one worker, as the hub knows it.

    Attributes:
        count: The number of collectives it has started.
        what: The description of the last one.
        inside: Whether it is still in that collective.
        pace: Its median time between two collectives, in seconds.
        moved: When ``count`` or ``inside`` last changed.
        heard: When its last message arrived.
        compiled: When it was last compiling a step.
        journal: Its last collectives by number: the description, and a digest of all up to it.
        load: Its last counters of steps, waits and memory; see `Load`.
        disk: The file I/O that it is doing, or "", and a counter of its progress; see `Disk`.
        disk_moved: When ``disk`` last changed.
        samples: Its counters over about the last half minute, one per second; see `slow`.
    """

    count: int = 0
    what: str = ""
    inside: bool = False
    pace: float = 0.0
    moved: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    compiled: float = 0.0
    journal: dict[int, tuple[str, int]] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    disk: tuple[str, int] = ("", 0)
    disk_moved: float = field(default_factory=time.monotonic)
    samples: "deque[_Sample]" = field(default_factory=lambda: deque(maxlen=_SLOW_SAMPLES))

    def note(self, ping: dict[str, Any]) -> None:
        """Update from a ping."""
        now = time.monotonic()
        count, inside, pace = int(ping["count"]), bool(ping["inside"]), float(ping["pace"])
        calls = [(int(n), str(what), int(chain)) for n, what, chain in ping["journal"]]
        self.load = _parse_load(ping.get("load", {}))
        self._sample(now)
        reads, far = ping.get("disk", ("", 0))
        if (disk := (str(reads)[:_LONGEST], int(far))) != self.disk:
            self.disk, self.disk_moved = disk, now
        self.heard = now
        if ping.get("compiles"):
            self.compiled = now
        if (count, inside) != (self.count, self.inside):
            self.moved = now
        self.count, self.inside, self.pace = count, inside, pace
        for number, what, chain in calls:
            self.what = what
            self.journal[number] = (what, chain)
        for number in sorted(self.journal)[:-_REMEMBERED]:
            del self.journal[number]

    def _sample(self, now: float) -> None:
        sample = _Sample(now, *(self.load[name] for name in ("steps", "blocked", "reading")))
        if self.samples and sample.steps < self.samples[-1].steps:  # another process
            self.samples.clear()
        # Start-up and the first step, which compiles, would hide what a usual step takes.
        is_due = not self.samples or now - self.samples[-1].at >= _EVERY
        if sample.steps and is_due:
            self.samples.append(sample)

    def is_stalled(self, step_patience: float, disk_patience: float) -> bool:
        """Whether it made no progress for ``step_patience``; during file I/O, ``disk_patience``."""
        if self.disk[0]:
            return time.monotonic() - max(self.moved, self.disk_moved) > disk_patience
        return time.monotonic() - self.moved > step_patience


class _Sample(NamedTuple):
    """Counters of one worker at one time, in seconds."""

    at: float
    steps: float
    blocked: float
    reading: float


def _parse_load(load: dict[str, Any]) -> dict[str, float]:
    """Return the counters named in `FIGURES`; raise ValueError if one is not a finite number."""
    found = {name: float(load.get(name, 0.0)) for name in FIGURES}
    if not all(map(math.isfinite, found.values())):
        raise ValueError(f"no numbers: {found}")
    return found


def silent(workers: dict[int, Progress], patience: float) -> list[tuple[int, float]]:
    """Return the workers that were silent for longer than ``patience``, and for how long."""
    now = time.monotonic()
    return [(i, now - p.heard) for i, p in workers.items() if now - p.heard > patience]


def hanging(workers: dict[int, Progress], patience: float) -> tuple[int, float] | None:
    """Return a worker whose file I/O stalled for longer than ``patience``, and for how long."""
    now = time.monotonic()
    still = {i: now - p.disk_moved for i, p in workers.items() if p.disk[0]}
    return next(((i, seconds) for i, seconds in still.items() if seconds > patience), None)


def stuck(
    workers: dict[int, Progress],
    question: tuple[float, list[int]],
    patience: float,
    disk_patience: float,
) -> tuple[int, int, float] | None:
    """Find a worker that blocks others: return it, one that waits for it, and since how long.

    Args:
        workers: The progress of each worker.
        question: When the oldest open exchange began, and the workers that have not answered it.
        patience: Seconds that a worker may be late; raised to 20 times the usual step time.
        disk_patience: The same for a worker that reads or writes a checkpoint, from its last
            progress.
    """
    now = time.monotonic()
    limit = max(patience, 20 * max((p.pace for p in workers.values()), default=0.0))
    waiting = {i: p for i, p in workers.items() if p.inside and now - p.moved > limit}
    if not waiting:
        return None
    goal = max(p.count for p in waiting.values())
    still = [i for i, p in workers.items() if p.is_stalled(limit, max(limit, disk_patience))]
    late = [i for i in still if workers[i].count < goal]
    asked, unanswered = question
    if not late and now - asked > limit:  # all are inside, but one never got its input
        late = [i for i in unanswered if i in still or not workers[i].disk[0]]
    if not late:
        return None
    latest = min(late, key=lambda i: (workers[i].count, i))
    others = {i: p for i, p in waiting.items() if i not in late} or waiting
    first = min(others, key=lambda i: others[i].moved)
    return latest, first, now - workers[latest].moved


def different(workers: dict[int, Progress]) -> tuple[int, int, int] | None:
    """Return the first collective on which two workers disagree, and those workers.

    The digests cover all collectives so far, so a disagreement stays visible after the call itself
    has dropped out of the journals.
    """
    order = sorted(workers)
    for a, b in itertools.pairwise(order):
        mine, theirs = workers[a].journal, workers[b].journal
        for number in sorted(mine.keys() & theirs.keys()):
            if mine[number][1] != theirs[number][1]:
                return number, a, b
    return None


class Slow(NamedTuple):
    """A worker for which the others wait.

    Attributes:
        worker: Its index.
        times: How many times as long as the median worker it takes for a step.
        seconds: Its time for a step, in seconds.
        cause: "input" if it waits for its own data, else "host": its Python code, or operations
            outside of compiled steps.
    """

    worker: int
    times: float
    seconds: float
    cause: str


def slow(
    workers: dict[int, Progress], times: float = _SLOW_TIMES, steps: int = _SLOW_STEPS
) -> list[Slow]:
    """Return the workers that need more than ``times`` the median worker's time for a step.

    Synchronous workers all finish a step together, so their rates are equal. What differs is the
    time that each spends blocked in collectives, waiting for the others: the slowest worker arrives
    last and is blocked least. A worker's time is what it spends outside of collectives, plus the
    least that any worker is blocked. A device that is slow inside of a compiled step is not found:
    its worker is blocked as long as the others.

    Args:
        workers: The progress of each worker.
        times: The factor above which a worker is slow.
        steps: How many steps the comparison must cover.
    """
    spans = {i: _span(p) for i, p in workers.items()}
    if len(spans) < 2 or any(s.steps < steps or s.at < _SLOW_SECONDS for s in spans.values()):
        return []
    own = {i: max(s.at - s.blocked, 0.0) / s.steps for i, s in spans.items()}
    reading = {i: s.reading / s.steps for i, s in spans.items()}
    least_blocked = min(s.blocked / s.steps for s in spans.values())
    # The lower median: of two workers, the faster one.
    usual, usual_reading = (statistics.median_low(x.values()) for x in (own, reading))
    found = []
    for index, seconds in own.items():
        factor = (seconds + least_blocked) / max(usual + least_blocked, 1e-9)
        if factor > times:
            is_input = reading[index] - usual_reading >= (seconds - usual) / 2
            cause = "input" if is_input else "host"
            found.append(Slow(index, factor, seconds + least_blocked, cause))
    return found


def _span(progress: Progress) -> _Sample:
    """Return the increase of a worker's counters over its samples."""
    if not progress.samples:
        return _Sample(0.0, 0.0, 0.0, 0.0)
    first, last = progress.samples[0], progress.samples[-1]
    return _Sample(*(b - a for a, b in zip(first, last, strict=True)))


_SAMPLES = 10  # samples over which rates are averaged
_STATM = Path("/proc/self/statm")


class Load:
    """Counters of this process; as a context manager, it times a wait for input.

    Attributes:
        steps: Functions and strategy runs that have completed.
        batches: Elements of distributed datasets that were waited for.
        waited: Seconds spent waiting for such elements, not including a wait in progress.
        reading: The part of ``waited`` in which this worker read its own data, and did not wait
            for the data of others.
        blocked: Seconds in collectives, without ``reading``.
        useful: Seconds that the arithmetic of all steps would take at the devices' peak rate.
        device_memory: Returns the bytes in use on this process's accelerators.
    """

    def __init__(self) -> None:
        self.steps = self.batches = 0
        self.waited = self.reading = self.blocked = self.useful = 0.0
        self._began = time.monotonic()
        self._recent: dict[str, float] = {}
        self.device_memory: Callable[[], float] = lambda: 0.0
        self._open: dict[int, float] = {}  # the start of each thread's wait in progress
        self._first: tuple[float, float] | None = None  # after the first step: time, waited
        self._samples: deque[tuple[float, int, float, float]] = deque(maxlen=_SAMPLES + 1)

    def __enter__(self) -> None:
        self._open[threading.get_ident()] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        now = time.monotonic()
        self.waited += now - self._open.pop(threading.get_ident(), now)
        self.batches += 1

    @contextmanager
    def reads(self) -> Iterator[None]:
        """Count the time for which the block reads while the program waits for an element."""
        began = time.monotonic()
        try:
            yield
        finally:
            waits = list(self._open.values())
            if waits:
                self.reading += max(time.monotonic() - max(began, min(waits)), 0.0)

    def figures(self) -> dict[str, float]:
        """Return the current counters, by their names in `FIGURES`.

        Rates cover about the last ten seconds; they and the memory are updated once a second.
        """
        now = time.monotonic()
        waited = self.waited + sum(now - since for since in list(self._open.values()))
        if not self._samples or now - self._samples[-1][0] >= _EVERY:
            self._samples.append((now, self.steps, waited, self.useful))
            then, steps, before, useful = self._samples[0]
            span = max(now - then, 1e-9)
            self._recent = {
                "rate": (self.steps - steps) / span,
                "waits": min(max((waited - before) / span, 0.0), 1.0),
                "mfu": (self.useful - useful) / span,
                "goodput": self._goodput(now, waited),
                "memory": _resident_memory(),
                "device_memory": self.device_memory(),
            }
        counters = {"blocked": self.blocked, "reading": self.reading}
        return {"steps": self.steps, "waited": waited, **counters, **self._recent}

    def _goodput(self, now: float, waited: float) -> float:
        """Return the fraction of this process's time after the first step, less input waits."""
        if self.steps and self._first is None:
            self._first = now, waited
        if self._first is None:
            return 0.0
        then, before = self._first
        productive = now - then - (waited - before)
        return min(max(productive / max(now - self._began, 1e-9), 0.0), 1.0)


def _resident_memory() -> float:
    """Return the resident memory of this process in bytes; 0 where the system has no statm."""
    try:
        return int(_STATM.read_text().split()[1]) * float(os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return 0.0


load = Load()


class Disk:
    """The file I/O of this process that other workers may wait for, and its progress."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._far = 0
        self.moved_at = time.monotonic()

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Mark the block as file I/O described by ``what``."""
        self.note_progress()
        self._open.append(what)
        try:
            yield
        finally:
            self._open.remove(what)
            self.note_progress()

    def note_progress(self) -> None:
        """Count progress: something was read or written."""
        self._far += 1
        self.moved_at = time.monotonic()

    def status(self) -> tuple[str, int]:
        """Return the description of the oldest I/O in progress, or "", and the progress counter."""
        return next(iter(tuple(self._open)), ""), self._far


disk = Disk()


EVERY = 1.0
_LONGEST = 300  # characters of a text from a worker


class Readers:
    """The clients of a hub that only observe the run."""

    def __init__(self, acceptor: Acceptor) -> None:
        self._acceptor = acceptor
        self._sent_at = 0.0

    def publish(self, status: Callable[[], Message], *, at_once: bool = False) -> None:
        """Send ``status()`` to the readers, if there are any, at most once per `EVERY` seconds."""
        if not (readers := self._acceptor.readers()):
            return
        now = time.monotonic()
        news = b""
        if at_once or now - self._sent_at >= EVERY:
            self._sent_at = now
            news = json.dumps({"status": status()}).encode() + b"\n"
        for connection in readers:
            self._send(connection, news)

    def _send(self, connection: Connection, news: bytes) -> None:
        data = connection.unsent or news
        try:
            connection.wire.socket.setblocking(False)
            sent = connection.wire.socket.send(data) if data else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._acceptor.disconnect(connection)
            return
        connection.unsent = data[sent:]


def status_row(facts: Message, progress: Any, state: str) -> Message:
    """Return the status of one worker, as readers receive it.

    Args:
        facts: The facts that it sent when it joined.
        progress: Its `Progress`.
        state: "here", "left" when it finished, or "lost".
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
