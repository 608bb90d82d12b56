"""Two things timed side by side, on a machine that others use too.

A time measured here means little an hour later, or a second later. A ratio does, if both sides run
within the same few hundredths of a second: blocks of A and B alternate, each neighbouring pair
gives one ratio, and the median of many of them is reported with its quartiles.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Block = Callable[[int], float]  # runs so many steps; the seconds that they took
Metered = Callable[[int], tuple[float, float]]  # the same, and the seconds of the processors


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


@dataclass(frozen=True)
class Comparison:
    """Seconds for one step of ours and one of theirs, pair by pair."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> Spread:
        return Spread.of([a / b for a, b in zip(self.ours, self.theirs, strict=True)])

    @property
    def medians(self) -> tuple[float, float]:
        return statistics.median(self.ours), statistics.median(self.theirs)

    @property
    def difference(self) -> Spread:
        return Spread.of([a - b for a, b in zip(self.ours, self.theirs, strict=True)])


def compare(ours: Block, theirs: Block, *, pairs: int = 40, seconds: float = 0.05) -> Comparison:
    """Alternate blocks of about ``seconds`` each; which side is first alternates too."""
    clock, _ = compare_both(_clock_only(ours), _clock_only(theirs), pairs=pairs, seconds=seconds)
    return clock


def compare_both(
    ours: Metered, theirs: Metered, *, pairs: int = 40, seconds: float = 0.05
) -> tuple[Comparison, Comparison]:
    """The same, by the clock and of the processors, whose time others do not take."""
    ours(2), theirs(2)  # compiled, and with the buffers that it keeps
    once = max(ours(3)[0], theirs(3)[0]) / 3
    steps = max(1, round(seconds / once))
    took: tuple[list[float], list[float]] = ([], [])
    used: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            clock, processors = (ours, theirs)[side](steps)
            took[side].append(clock / steps)
            used[side].append(processors / steps)
    return Comparison(*took), Comparison(*used)


def metered(run: Block) -> Metered:
    """A block of this process with its processors' time."""

    def both(steps: int) -> tuple[float, float]:
        began = time.process_time()
        return run(steps), time.process_time() - began

    return both


def _clock_only(run: Block) -> Metered:
    return lambda steps: (run(steps), 0.0)


def block(step: Callable[[], object], finish: Callable[[], object] = lambda: None) -> Block:
    """A block of calls of ``step``, ended by ``finish``, which waits for the devices."""

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        finish()
        return time.perf_counter() - began

    return run


def of_thread(run: Block) -> Block:
    """The time that the calling thread spends in a block, without what it waits for."""

    def timed(steps: int) -> float:
        began = time.thread_time()
        run(steps)
        return time.thread_time() - began

    return timed
