"""Where randomness comes from: seeds, and the run that an iterator belongs to.

An order depends on the seed, on how often the dataset was iterated before (the run), and on the
place in the pipeline (the path: which epoch of a `repeat`, which branch of a `zip`). All three are
plain numbers, so that an iterator's state is small and restoring it is exact.

As in TensorFlow, a seed is the transformation's own, the global one, or both mixed, as they are
when the transformation is made. What a function given to `flat_map` makes counts from there: with a
seed, or a global one, its orders are the same for every element.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from replicax._blocks import contextmanager
from replicax.data._errors import ArgumentTypeError

SeedSource = Callable[[], int]

_MOST = 1 << 62

_lock = threading.Lock()
_source: SeedSource | None = None


class _Scope(NamedTuple):
    """Where transformations are being made: in the program, or in a function of `flat_map`.

    Attributes:
        draw: Draws a seed for a transformation that was given none.
        under: The global seed in force.
        depth: How many functions we are in.
    """

    draw: SeedSource
    under: int | None
    depth: int


_FREE = _Scope(lambda: secrets.randbits(62), None, 0)
_global = _FREE
_followers: list[Callable[[int], None]] = []
_function: ContextVar[_Scope | None] = ContextVar("replicax_data_seed", default=None)


def set_global_seed(seed: int | None) -> None:
    """Seed every random transformation that is made from now on, and `rx.random`.

    Args:
        seed: The seed; None for the operating system's randomness, as before the first call.
    """
    global _global
    if seed is None:
        _global = _FREE
        return
    generator = _generator(seed)
    _global = _Scope(lambda: _draw_from(generator), seed, 0)
    for restart in _followers:
        restart(seed)


def follow_global_seed(restart: Callable[[int], None]) -> None:
    """Call ``restart`` with the global seed whenever one is set, and now if one was set before."""
    _followers.append(restart)
    if _global.under is not None:
        restart(_global.under)


def set_seed_source(source: SeedSource | None) -> SeedSource | None:
    """Choose where datasets without a seed draw one.

    Workers that must see the same order share one source, for example a generator that every
    worker seeds alike.

    Args:
        source: Called once for each unseeded random transformation, when it is made; returns a
            non-negative int. ``None`` goes back to the seed of `rx.random.set_seed`, or to the
            operating system's randomness.

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


@contextmanager
def nested_seeds(run: "Run", seeds: "Seeds") -> Iterator[None]:
    """While a function of `flat_map` runs: seeds that replay alike.

    Args:
        run: The run, at the element that the function is called for.
        seeds: The seeds of the `flat_map`.
    """
    origin = run.origin(seeds)
    # A function that TensorFlow traces has fixed seeds inside, if there is a global one.
    generator = run.generator(seeds) if origin.under is None else _generator(origin.seed)
    scope = _Scope(lambda: _draw_from(generator), origin.under, seeds.depth + 1)
    token = _function.set(scope)
    try:
        yield
    finally:
        _function.reset(token)


def is_in_function() -> bool:
    """Whether a function of `flat_map` is running: a dataset is being made for one element."""
    return _function.get() is not None


class Origin(NamedTuple):
    """What the random numbers of a transformation start from, in one run.

    Attributes:
        seed: The transformation's seed, with the global one mixed in.
        number: How often it was iterated before.
        under: The global seed when it was made, for what its function makes.
    """

    seed: int
    number: int
    under: int | None = None


class Seeds:
    """The seed of one random transformation, and how many runs have used it.

    Attributes:
        is_free: Whether nobody gave it, neither for this transformation nor for all.
        depth: In how many functions of `flat_map` it was made.
    """

    def __init__(self, seed: int | None, *, reshuffle: bool = True) -> None:
        if seed is not None and not isinstance(seed, (int, np.integer)):
            raise ArgumentTypeError(
                f"A seed must be an int, got {seed!r:.60} of type {type(seed).__name__}."
            )
        scope = _function.get() or _global
        source = None if scope.depth else _source
        self.is_free = seed is None and scope.under is None and source is None
        if seed is None:
            self.seed = scope.draw() if source is None else int(source())
        else:
            own = int(seed) & ((1 << 64) - 1)
            self.seed = own if scope.under is None else _draw_from(_generator(scope.under, own))
        self.under = scope.under
        self.depth = scope.depth
        self.reshuffle = reshuffle
        self._runs = 0
        self._lock = threading.Lock()

    def begin(self) -> Origin:
        """What the run that starts now starts from."""
        with self._lock:
            self._runs += 1
            return Origin(self.seed, self._runs - 1, self.under)

    def go_on(self, origin: Origin, instead: Origin) -> None:
        """A run is continued: those that begin later follow it, as they would have.

        Args:
            origin: That of the run.
            instead: That of the run which began here in order to become that one.
        """
        with self._lock:
            begun = self._runs - (instead.number == self._runs - 1)
            self.seed, self._runs = origin.seed, max(begun, origin.number + 1)


class SeedsMet:
    """Free seeds that a run meets on its way: of datasets that a function refers to.

    They are not in the iterator's graph, and so neither in its state nor known to other workers.
    Such a seed is drawn anew from that of the function's `flat_map`, which is, and from the place
    where it is first met.
    """

    def __init__(self) -> None:
        self._seeds: dict[Seeds, int] = {}
        self._lock = threading.Lock()

    def seed(self, seeds: Seeds, outer: int, path: tuple[int, ...]) -> int:
        """The seed of a transformation, the same in the whole run."""
        with self._lock:
            if seeds not in self._seeds:
                self._seeds[seeds] = _draw_from(_generator(outer, len(self._seeds), *path))
            return self._seeds[seeds]


@dataclass(frozen=True)
class Run:
    """One pass of one iterator: which seeds are in force, and where in the pipeline we are.

    Attributes:
        origins: Those of the transformations in the iterator's graph.
        path: Which epochs, branches and elements led here.
        is_fixed: Whether this is what a cache keeps, the same in every run.
        outer: That of the outermost function that we are in.
        floors: How long the path was at each function that we are in.
        captured: Seeds that are not in the graph.
        new: Makes the arrays of the batches at the end of the pipeline; NumPy, if None.
    """

    origins: Mapping[Seeds, Origin] = field(default_factory=dict)
    path: tuple[int, ...] = ()
    is_fixed: bool = False
    outer: Origin | None = None
    floors: tuple[int, ...] = (0,)
    captured: SeedsMet = field(default_factory=SeedsMet)
    new: Callable[[tuple[int, ...], Any], Any] | None = None

    def at(self, *steps: int) -> "Run":
        """The run as seen from an epoch or a branch."""
        return replace(self, path=(*self.path, *steps))

    def inside(self, seeds: Seeds, index: int) -> "Run":
        """The run as seen from the dataset that a function makes for an element.

        Args:
            seeds: The seeds of the `flat_map`.
            index: Which element.
        """
        path = (*self.path, index)
        floors = (*self.floors[: seeds.depth + 1], len(path))
        outer = self.outer if seeds.depth else self.origin(seeds)
        return replace(self, path=path, outer=outer, floors=floors)

    def fixed(self) -> "Run":
        """The run for what is kept and seen again, such as the input of a cache."""
        return replace(self, path=(), is_fixed=True, floors=(0,) * len(self.floors))

    def origin(self, seeds: Seeds) -> Origin:
        """What the random numbers of a transformation start from."""
        known = self.origins.get(seeds)
        if known is not None:
            return known
        outer = self.outer
        if seeds.depth or outer is None:
            return Origin(seeds.seed, 0, seeds.under)
        is_free = seeds.is_free
        seed = self.captured.seed(seeds, outer.seed, self.path) if is_free else seeds.seed
        return Origin(seed, outer.number, seeds.under)

    def generator(self, seeds: Seeds) -> np.random.Generator:
        """The random numbers of one transformation at this place."""
        origin = self.origin(seeds)
        if not seeds.reshuffle:
            return _generator(origin.seed)
        number = 0 if self.is_fixed else origin.number + 1
        return _generator(origin.seed, number, *self.path[self.floors[seeds.depth] :])


def _generator(*key: int) -> np.random.Generator:
    entropy = [part & ((1 << 64) - 1) for part in key]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def _draw_from(generator: np.random.Generator) -> int:
    return int(generator.integers(_MOST))
