"""The hub's side of a resize: each survivor's last step, and the next coordination service."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from replicax._src.workers.keeper import Keeper
from replicax._src.workers.watchdog import Progress


@dataclass
class Resizes:
    """The resizes of an elastic run; see `replicax._src.workers.elastic`.

    Attributes:
        least: The fewest workers that go on; 0 if the run is not elastic.
        wait: Seconds that fewer of them wait for workers that join.
        new_keeper: Starts the coordination service for a number of workers.
        generation: How many resizes are complete.
        cause: Why one is in progress; "" if none is.
        has_lost: Whether a worker was lost in it, so that no exchange can complete any more.
    """

    least: int
    new_keeper: Callable[[int], Keeper] | None = None
    wait: float = 0.0
    generation: int = 0
    cause: str = ""
    has_lost: bool = False
    _began: float = 0.0
    _until: float | None = None  # how long fewer workers than the least wait for others
    # For each survivor: the last collective whose results it has, and the last it has completed.
    _survivors: dict[int, tuple[int, int]] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)  # the steps that each has taken
    # The calls that each has begun, and the number of workers when it began the last one.
    _calls: dict[int, tuple[int, int]] = field(default_factory=dict)
    _completed_by_others: int = 0  # by workers that finished and left
    _retired: list[Keeper] = field(default_factory=list)

    def allows(self, left: int) -> bool:
        """Whether ``left`` workers may go on after a loss."""
        return self.least > 0 and left >= self.least and self.new_keeper is not None

    def hold(self, size: int) -> bool:
        """Whether ``size`` workers are too few to go on; if so, start the clock of `has_waited`."""
        if not self.is_on or size >= self.least:
            self._until = None
        elif self._until is None:
            self._until = time.monotonic() + self.wait
        return self._until is not None

    def has_waited(self) -> bool:
        """Whether too few workers have waited long enough; True once."""
        is_over = self._until is not None and time.monotonic() > self._until and not self.cause
        if is_over:
            self._until = None
        return is_over

    @property
    def is_on(self) -> bool:
        """Whether the run is elastic."""
        return self.least > 0 and self.new_keeper is not None

    def plan(self, cause: str) -> None:
        """Begin a resize to which all members have agreed; or extend the one in progress."""
        if not self.cause:
            self._began = time.monotonic()
        self.cause = self.cause or cause

    def begin(self, index: int, cause: str) -> None:
        """Begin a resize without worker ``index``, or extend the one in progress."""
        self.plan(cause)
        self.has_lost = True
        self._survivors.pop(index, None)

    def note(self, index: int, generation: int, has: int, completed: int, steps: int = 0) -> bool:
        """Note a survivor's last collective; return False for a report of an earlier generation."""
        if not self.cause or generation != self.generation:
            return False
        self._survivors[index] = (has, completed)
        self._counts[index] = steps
        return True

    def note_calls(self, index: int, calls: int, workers: int) -> None:
        """Note how many calls a survivor has begun, and the number of workers at the last one."""
        self._calls[index] = calls, workers

    def calls(self) -> dict[str, Any]:
        """Return the largest number of calls that a survivor has begun, to send to all survivors.

        ``workers`` is the number of workers at that call. ``apart`` is whether another survivor
        has begun fewer calls: it has yet to run code between two steps that the others have run.
        """
        found = [self._calls.get(i, (0, 0)) for i in self._survivors]
        calls, workers = max(found)
        return {"calls": calls, "workers": workers, "apart": min(found)[0] < calls}

    def counts(self, last: int) -> dict[int, int]:
        """Return how many steps each survivor has taken when all continue after ``last``."""
        # A survivor that has the results of the last step, but has not committed it, now does.
        return {
            i: self._counts[i] + (has == last and has > completed)
            for i, (has, completed) in self._survivors.items()
        }

    def leave(self, index: int, count: int) -> None:
        """Note that a worker left after ``count`` collectives."""
        self._survivors.pop(index, None)
        self._completed_by_others = max(self._completed_by_others, count)

    def late(self, members: Mapping[int, Progress], patience: float) -> list[tuple[int, float]]:
        """Return the members that have not reported for more than ``patience`` seconds.

        A compilation cannot be interrupted, and may take longer.
        """
        now = time.monotonic()
        left = {i: p for i, p in members.items() if i not in self._survivors}
        waited = {i: now - max(self._began, p.compiled) for i, p in left.items()}
        return [(i, seconds) for i, seconds in waited.items() if seconds > patience]

    def is_ready(self, members: Collection[int]) -> bool:
        """Whether a resize is in progress and all members have reported."""
        return bool(self.cause and members) and self._survivors.keys() == set(members)

    def last(self) -> int | None:
        """Return the collective after which all survivors can continue; None if one is past it."""
        last = min(has for has, _ in self._survivors.values())
        completed = max(completed for _, completed in self._survivors.values())
        # A step can be repeated, but not undone once a worker has completed it.
        return last if last >= max(completed, self._completed_by_others) else None

    def next_keeper(self, old: Keeper | None, size: int) -> Keeper | None:
        """Begin the next generation: return its keeper; a worker that is alone needs none."""
        self.generation += 1
        self.cause, self._survivors, self._completed_by_others = "", {}, 0
        self._calls = {}
        self.has_lost = False
        if old is not None:
            old.retire()  # it ends when all have disconnected, which this must not wait for
            self._retired.append(old)
        return self.new_keeper(size) if size > 1 and self.new_keeper is not None else None

    def reap(self) -> None:
        """Collect the keepers of earlier generations that have exited."""
        self._retired = [keeper for keeper in self._retired if not keeper.is_reaped()]
