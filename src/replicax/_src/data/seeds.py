"""Random state of pipelines: seeds, and the run that an iterator belongs to.

The order of a random transformation is a function of its seed, of how often the dataset has been
iterated before (the run), and of its position in the pipeline (the path: which epoch of a `repeat`,
which branch of a `zip`). All three are integers, so an iterator's state is small and restoring it
is exact.

As in TensorFlow, the seed is that of the transformation, the global one, or a mix of both, at the
time the transformation is created. For datasets that a `flat_map` function creates, run and path
are counted from its call: with a seed, or a global one, the order is the same for every element.
"""

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from replicax._src.base.managers import contextmanager
from replicax._src.base.tf_errors import ArgumentTypeError

SeedSource = Callable[[], int]

_MOST = 1 << 62

_lock = threading.Lock()
_source: SeedSource | None = None


class _Scope(NamedTuple):
    """The scope in which transformations are created: the program, or a `flat_map` function.

    Attributes:
        draw: Returns a seed for a transformation created without one.
        global_seed: The global seed in effect.
        depth: The number of nested `flat_map` functions.
    """

    draw: SeedSource
    global_seed: int | None
    depth: int


_UNSEEDED = _Scope(lambda: secrets.randbits(62), None, 0)
_global = _UNSEEDED
_listeners: list[Callable[[int], None]] = []
_function: ContextVar[_Scope | None] = ContextVar("replicax_data_seed", default=None)


def set_global_seed(seed: int | None) -> None:
    """Set the seed of all random transformations created from now on, and of `rx.random`.

    Args:
        seed: The seed; None for the operating system's randomness, which is the default.
    """
    global _global
    if seed is None:
        _global = _UNSEEDED
        return
    generator = _generator(seed)
    _global = _Scope(lambda: _draw_from(generator), seed, 0)
    for restart in _listeners:
        restart(seed)


def follow_global_seed(restart: Callable[[int], None]) -> None:
    """Call ``restart`` with the global seed whenever one is set, and now if one was set before."""
    _listeners.append(restart)
    if _global.global_seed is not None:
        restart(_global.global_seed)


def set_seed_source(source: SeedSource | None) -> SeedSource | None:
    """Set the function that provides seeds for datasets without one.

    Workers that must see the same order need equal sources, for example generators with the same
    seed.

    Args:
        source: Called once for each random transformation created without a seed; returns a
            non-negative int. ``None`` restores the seed of `rx.random.set_seed`, or the operating
            system's randomness.

    Returns:
        The previous source, for restoring it.

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
    """Make seeds drawn in the block reproducible; used around a call of a `flat_map` function.

    Args:
        run: The run, at the element that the function is called for.
        seeds: The seeds of the `flat_map`.
    """
    origin = run.origin(seeds)
    # TensorFlow traces the function once, which fixes its seeds if there is a global one.
    generator = run.generator(seeds) if origin.global_seed is None else _generator(origin.seed)
    scope = _Scope(lambda: _draw_from(generator), origin.global_seed, seeds.depth + 1)
    token = _function.set(scope)
    try:
        yield
    finally:
        _function.reset(token)


def is_in_function() -> bool:
    """Whether a `flat_map` function is running, that is, creating the dataset of one element."""
    return _function.get() is not None


class Origin(NamedTuple):
    """The random state of a transformation at the start of a run.

    Attributes:
        seed: The transformation's seed, mixed with the global one.
        number: How often it was iterated before.
        global_seed: The global seed when it was created, for datasets that its function creates.
    """

    seed: int
    number: int
    global_seed: int | None = None


class Seeds:
    """The seed of one random transformation, and the number of runs started with it.

    Attributes:
        is_free: Whether it was drawn at random: the user set neither a seed for this
            transformation nor a global seed or source.
        depth: The number of `flat_map` functions around its creation.
    """

    def __init__(self, seed: int | None, *, reshuffle: bool = True) -> None:
        if seed is not None and not isinstance(seed, (int, np.integer)):
            raise ArgumentTypeError(
                f"A seed must be an int, got {seed!r:.60} of type {type(seed).__name__}."
            )
        scope = _function.get() or _global
        source = None if scope.depth else _source
        self.is_free = seed is None and scope.global_seed is None and source is None
        if seed is None:
            self.seed = scope.draw() if source is None else int(source())
        else:
            local = int(seed) & ((1 << 64) - 1)
            self.seed = (
                local
                if scope.global_seed is None
                else _draw_from(_generator(scope.global_seed, local))
            )
        self.global_seed = scope.global_seed
        self.depth = scope.depth
        self.reshuffle = reshuffle
        self._runs = 0
        self._lock = threading.Lock()

    def begin(self) -> Origin:
        """Start a run; return its random state."""
        with self._lock:
            self._runs += 1
            return Origin(self.seed, self._runs - 1, self.global_seed)

    def resume(self, origin: Origin, replaced: Origin) -> None:
        """Continue a restored run, so that later runs have the orders that would have followed it.

        Args:
            origin: The origin of the restored run.
            replaced: The origin of the run that was started here and is replaced by it.
        """
        with self._lock:
            # Do not count the replaced run if no other has started since.
            begun = self._runs - (replaced.number == self._runs - 1)
            self.seed, self._runs = origin.seed, max(begun, origin.number + 1)


class CapturedSeeds:
    """Replacements for the free seeds of datasets that a `flat_map` function captures.

    Such datasets are not in the iterator's graph, so their seeds are neither in its state nor equal
    on all workers. The run derives a replacement from the seed of the `flat_map`, which is in the
    graph, and from the position at which the captured dataset is first opened.
    """

    def __init__(self) -> None:
        self._seeds: dict[Seeds, int] = {}
        self._lock = threading.Lock()

    def seed(self, seeds: Seeds, outer: int, path: tuple[int, ...]) -> int:
        """Return the replacement seed of a transformation, constant during the run."""
        with self._lock:
            if seeds not in self._seeds:
                self._seeds[seeds] = _draw_from(_generator(outer, len(self._seeds), *path))
            return self._seeds[seeds]


@dataclass(frozen=True)
class Run:
    """One pass of one iterator: the seeds in effect and the current position in the pipeline.

    Attributes:
        origins: The origins of the transformations in the iterator's graph.
        path: Indices of the epochs, branches and elements that lead to this position.
        is_fixed: Whether the order must be the same in every run, as below a cache.
        outer: The origin of the outermost enclosing `flat_map`.
        floors: The length of the path at each enclosing `flat_map`, by depth.
        captured: Replacement seeds of datasets that are not in the graph.
        new: Allocates the arrays of the final batches; NumPy if None.
    """

    origins: Mapping[Seeds, Origin] = field(default_factory=dict)
    path: tuple[int, ...] = ()
    is_fixed: bool = False
    outer: Origin | None = None
    floors: tuple[int, ...] = (0,)
    captured: CapturedSeeds = field(default_factory=CapturedSeeds)
    new: Callable[[tuple[int, ...], Any], Any] | None = None

    def at(self, *steps: int) -> "Run":
        """Return the run at an epoch or a branch, with `steps` appended to the path."""
        return replace(self, path=(*self.path, *steps))

    def inside(self, seeds: Seeds, index: int) -> "Run":
        """Return the run inside the dataset that a `flat_map` function created for an element.

        Args:
            seeds: The seeds of the `flat_map`.
            index: The index of the element.
        """
        path = (*self.path, index)
        floors = (*self.floors[: seeds.depth + 1], len(path))
        outer = self.outer if seeds.depth else self.origin(seeds)
        return replace(self, path=path, outer=outer, floors=floors)

    def fixed(self) -> "Run":
        """Return a run with the same random order in each epoch, for elements that are cached."""
        return replace(self, path=(), is_fixed=True, floors=(0,) * len(self.floors))

    def origin(self, seeds: Seeds) -> Origin:
        """Return the random state of a transformation at the start of this run."""
        in_graph = self.origins.get(seeds)
        if in_graph is not None:
            return in_graph
        outer = self.outer
        if seeds.depth or outer is None:
            return Origin(seeds.seed, 0, seeds.global_seed)
        is_free = seeds.is_free
        seed = self.captured.seed(seeds, outer.seed, self.path) if is_free else seeds.seed
        return Origin(seed, outer.number, seeds.global_seed)

    def generator(self, seeds: Seeds) -> np.random.Generator:
        """Return the random generator of a transformation at this position."""
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
