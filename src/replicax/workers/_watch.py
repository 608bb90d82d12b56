"""Watch: what each worker last said of its progress -> who is silent, stuck, or does otherwise."""

import itertools
import math
import time
from dataclasses import dataclass, field
from typing import Any

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
        load: What it said of its steps, waits and memory; see `replicax.workers._load`.
    """

    count: int = 0
    what: str = ""
    inside: bool = False
    pace: float = 0.0
    moved: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    journal: dict[int, tuple[str, int]] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)

    def note(self, ping: dict[str, Any]) -> None:
        """Take in what the worker says."""
        now = time.monotonic()
        count, inside, pace = int(ping["count"]), bool(ping["inside"]), float(ping["pace"])
        calls = [(int(n), str(what), int(chain)) for n, what, chain in ping["journal"]]
        self.load = _numbers(ping.get("load", {}))
        self.heard = now
        if (count, inside) != (self.count, self.inside):
            self.moved = now
        self.count, self.inside, self.pace = count, inside, pace
        for number, what, chain in calls:
            self.what = what
            self.journal[number] = (what, chain)
        for number in sorted(self.journal)[:-_REMEMBERED]:
            del self.journal[number]


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


def stuck(
    workers: dict[int, Progress], question: tuple[float, list[int]], patience: float
) -> tuple[int, int, float] | None:
    """A worker that another has been waiting for too long: who, for whom, how long.

    Args:
        workers: How far each is.
        question: Since when the oldest question is open, and who has not answered it.
        patience: Seconds that a worker may be late, if steps do not take longer anyway.
    """
    now = time.monotonic()
    limit = max(patience, 20 * max((p.pace for p in workers.values()), default=0.0))
    waiting = {i: p for i, p in workers.items() if p.inside and now - p.moved > limit}
    if not waiting:
        return None
    goal = max(p.count for p in waiting.values())
    late = [i for i, p in workers.items() if p.count < goal and now - p.moved > limit]
    asked, unanswered = question
    if not late and now - asked > limit:
        late = unanswered  # all wait, but one for itself: its data, for example, never come
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
