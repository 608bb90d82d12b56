"""Where randomness comes from: seeds, and the run that an iterator belongs to.

An order depends on the seed, on how often the dataset was iterated before (the run), and on the
place in the pipeline (the path: which epoch of a `repeat`, which branch of a `zip`). All three are
plain numbers, so that an iterator's state is small and restoring it is exact.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import numpy as np

SeedSource = Callable[[], int]

_lock = threading.Lock()
_source: SeedSource | None = None
_derived: ContextVar[SeedSource | None] = ContextVar("replicax_data_seed", default=None)


def set_seed_source(source: SeedSource | None) -> SeedSource | None:
    """Choose where datasets without a seed draw one.

    Workers that must see the same order share one source, for example a generator that every
    worker seeds alike.

    Args:
        source: Called once for each unseeded random transformation, when it is made; returns a
            non-negative int. ``None`` goes back to the operating system's randomness.

    Returns:
        The source before this one, to put back.

    Example:
        >>> before = rx.data.set_seed_source(lambda: 7)
        >>> a = list(rx.data.Dataset.range(5).shuffle(5))
        >>> b = list(rx.data.Dataset.range(5).shuffle(5))
        >>> a == b
        True
        >>> _ = rx.data.set_seed_source(before)
    """
    global _source
    with _lock:
        before, _source = _source, source
    return before


def draw_seed() -> int:
    """A seed for a transformation that was given none."""
    source = _derived.get() or _source
    return secrets.randbits(62) if source is None else int(source())


@contextmanager
def derived_seeds(generator: np.random.Generator) -> Iterator[None]:
    """Draw seeds from ``generator``: datasets made by a user function replay alike."""
    token = _derived.set(lambda: int(generator.integers(1 << 62)))
    try:
        yield
    finally:
        _derived.reset(token)


class Seeds:
    """The seed of one random transformation, and how many runs have used it."""

    def __init__(self, seed: int | None, *, reshuffle: bool = True) -> None:
        self.seed = draw_seed() if seed is None else int(seed) & ((1 << 64) - 1)
        self.reshuffle = reshuffle
        self._runs = 0
        self._lock = threading.Lock()

    def begin(self) -> int:
        """The number of the run that starts now."""
        with self._lock:
            self._runs += 1
            return self._runs - 1


@dataclass(frozen=True)
class Run:
    """One pass of one iterator: which seeds are in force, and where in the pipeline we are."""

    seeds: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    path: tuple[int, ...] = ()
    is_fixed: bool = False

    def at(self, *steps: int) -> "Run":
        """The run as seen from an epoch or a branch."""
        return replace(self, path=(*self.path, *steps))

    def fixed(self) -> "Run":
        """The run for what is kept and seen again, such as the input of a cache."""
        return replace(self, path=(), is_fixed=True)

    def generator(self, seeds: Seeds) -> np.random.Generator:
        """The random numbers of one transformation at this place."""
        seed, number = self.seeds.get(id(seeds), (seeds.seed, 0))
        place = [0 if self.is_fixed else number + 1, *self.path]
        key = [seed, *place] if seeds.reshuffle else [seed]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
