"""Runs inside a function that Python drives: each is compiled, and found again.

A replica function that is defined inside the loop is a new object on every step. It is the same
program if its code is the same and all that it can reach means the same; arrays that it closes over
become inputs.
"""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from replicax.context._current import entered
from replicax.function._function import Function
from replicax.function._reach import Edge, Reach, first_difference
from replicax.function._signature import static_key
from replicax.strategy._ragged import CannotTrace, run_ragged
from replicax.values._per_replica import is_distributed, is_opaque, is_ragged, is_text

if TYPE_CHECKING:
    from replicax.strategy._base import StrategyBase
    from replicax.topology._mesh import Topology

_MOST = 256
_MANY = 6
_log = logging.getLogger("replicax")
T = TypeVar("T")


class LatestUsed(Generic[T]):
    """Things by key; the latest used ones are kept."""

    def __init__(self) -> None:
        self._things: OrderedDict[Any, T] = OrderedDict()

    def find(self, key: Any, make: Callable[[], T]) -> T:
        """The thing for ``key``, made if there is none."""
        found = self._things.pop(key, None)
        return self.put(key, make() if found is None else found)

    def get(self, key: Any) -> T | None:
        """The thing for ``key``, if there is one."""
        return self._things.get(key)

    def put(self, key: Any, thing: T) -> T:
        """Keep the thing, as the one that was used last."""
        self._things[key] = thing
        if len(self._things) > _MOST:
            self._things.popitem(last=False)
        return thing


@dataclass
class HostedRun:
    """A replica function, and the program of each meaning that it had."""

    statics: tuple[Any, ...]
    reach: Reach
    function: Callable[..., Any]
    meanings: int = 1
    is_new: bool = True


def run_hosted(
    strategy: StrategyBase,
    topology: Topology,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run ``fn`` on every replica, compiled.

    Raises:
        CannotTrace: If the function can only run op by op: it takes strings, or replicas hold
            different shapes and it needs their values.
    """
    held = _Held.of(fn)
    found = _found(strategy, fn, held)
    leaves = jax.tree.leaves((args, kwargs, held.arrays), is_leaf=is_opaque)
    if any(map(is_text, leaves)):
        raise CannotTrace
    is_short = any(map(is_ragged, leaves))
    if is_short:
        held_key = (found.function, tuple(map(static_key, jax.tree.leaves(held.arrays))))
        result = run_ragged(strategy, topology, fn, (args, kwargs), held_key)
    else:
        result = found.function(held.arrays, args, kwargs)
    if found.is_new or (is_short and not found.reach.is_unchanged()):
        # What the trace itself did to Python objects is no change that calls for another one.
        _remember(strategy, held, replace(found, reach=Reach(*held.edges(fn)), is_new=False))
    return result


def _found(strategy: StrategyBase, fn: Callable[..., Any], held: _Held) -> HostedRun:
    """The program for what ``fn`` means now."""
    latest = strategy.hosted_latest
    run = latest.get(held.place)
    if (
        run is not None
        and all(map(operator.is_, run.statics, held.statics))
        and run.reach.is_unchanged()
    ):
        return run
    reach = Reach(*held.edges(fn))
    key = (held.place, reach.key)

    def call(arrays: Any, a: Any, k: Any) -> Any:
        with entered(hosted=False):
            return strategy.run(held.rebuild(fn, arrays), a, k)

    function = strategy.hosted_runs.get(key)
    found = HostedRun(held.statics, reach, function or Function(call), is_new=function is None)
    if run is not None:
        found.meanings = run.meanings + found.is_new
        if found.meanings == _MANY and run.meanings < _MANY:
            _log.warning(
                "%r is compiled anew whenever a Python value that it reads changes, for the %dth"
                " time now. Last, %s. Keep numbers that change in an rx.Variable, or pass them to"
                " `strategy.run` as arrays.",
                getattr(fn, "__name__", fn),
                _MANY,
                first_difference(run.reach, reach),
            )
    return _remember(strategy, held, found)


def _remember(strategy: StrategyBase, held: _Held, run: HostedRun) -> HostedRun:
    strategy.hosted_runs.put((held.place, run.reach.key), run.function)
    return strategy.hosted_latest.put(held.place, run)


@dataclass(frozen=True)
class _Held:
    """What a function holds itself: arrays, which are inputs, and the rest.

    Attributes:
        place: Equal for functions that the same line of code made.
    """

    place: Any
    names: tuple[str, ...]
    contents: tuple[Any, ...]
    is_dynamic: tuple[bool, ...]

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> _Held:
        """Take ``fn`` apart."""
        if isinstance(fn, MethodType):
            pair = (fn.__func__, fn.__self__)
            return cls(("method", fn.__func__), ("function", "self"), pair, (False, False))
        if not isinstance(fn, FunctionType):
            return cls(static_key(fn), ("function",), (fn,), (False,))
        extras = {**(fn.__kwdefaults__ or {}), "__defaults__": fn.__defaults__}
        cells = [c.cell_contents for c in fn.__closure__ or ()]
        is_dynamic = (*map(_has_arrays, cells), *(False for _ in extras))
        place = (fn.__code__, id(fn.__globals__), is_dynamic)
        names = (*fn.__code__.co_freevars, *extras)
        return cls(place, names, (*cells, *extras.values()), is_dynamic)

    @property
    def arrays(self) -> list[Any]:
        """What becomes an input."""
        return [x for x, d in zip(self.contents, self.is_dynamic, strict=True) if d]

    @property
    def statics(self) -> tuple[Any, ...]:
        """The rest."""
        return tuple(x for x, d in zip(self.contents, self.is_dynamic, strict=True) if not d)

    def edges(self, fn: Callable[..., Any]) -> list[Edge]:
        """Where the function leads, but for its inputs."""
        named = zip(self.names, self.contents, self.is_dynamic, strict=True)
        own = [Edge(name, x) for name, x, is_input in named if not is_input]
        if not isinstance(fn, FunctionType):
            return own
        # Its code and its globals, without what its closure holds.
        empty = tuple(CellType(None) for _ in fn.__code__.co_freevars)
        bare = FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, empty)
        return [Edge(fn.__name__, bare), *own]

    def rebuild(self, fn: Callable[..., Any], arrays: list[Any]) -> Any:
        """The function, with other arrays in it."""
        if not arrays or not isinstance(fn, FunctionType):
            return fn
        rest = iter(arrays)
        cells = tuple(
            CellType(next(rest) if d else c.cell_contents)
            for c, d in zip(fn.__closure__ or (), self.is_dynamic, strict=False)
        )
        made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
        made.__kwdefaults__ = fn.__kwdefaults__
        return made


def _has_arrays(x: Any) -> bool:
    leaves = jax.tree.leaves(x, is_leaf=is_opaque)
    return any(isinstance(v, jax.Array | np.ndarray) or is_distributed(v) for v in leaves)
