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


@dataclass(frozen=True)
class Comparison:
    """Seconds for one step of ours and one of theirs, pair by pair."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> Spread:
        return Spread.of([a / b for a, b in zip(self.ours, self.theirs, strict=True)])

    @property
    def difference(self) -> Spread:
        return Spread.of([a - b for a, b in zip(self.ours, self.theirs, strict=True)])


def compare(ours: Block, theirs: Block, *, pairs: int = 40, seconds: float = 0.05) -> Comparison:
    """Alternate blocks of about ``seconds`` each; which side is first alternates too."""
    ours(2), theirs(2)  # compiled, and with the buffers that it keeps
    once = max(ours(3), theirs(3)) / 3
    steps = max(1, round(seconds / once))
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            times[side].append((ours, theirs)[side](steps) / steps)
    return Comparison(*times)


def block(step: Callable[[], object], finish: Callable[[], object] = lambda: None) -> Block:
    """A block of calls of ``step``, ended by ``finish``, which waits for the devices."""

    def run(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        finish()
        return time.perf_counter() - began

    return run
