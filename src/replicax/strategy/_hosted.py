"""Runs inside a function that Python drives: each is compiled, and found again.

A replica function that is defined inside the loop is a new object on every step. It is the same
program if its code is the same and what it closes over means the same; arrays that it closes over
become inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from replicax.context._current import entered
from replicax.function._function import Function
from replicax.function._signature import static_key
from replicax.strategy._ragged import CannotTrace, run_ragged
from replicax.values._per_replica import is_distributed, is_opaque, is_ragged, is_text

if TYPE_CHECKING:
    from replicax.strategy._base import StrategyBase
    from replicax.topology._mesh import Topology

_MOST = 256
T = TypeVar("T")


class LatestUsed(Generic[T]):
    """Things by key; the latest used ones are kept."""

    def __init__(self) -> None:
        self._things: OrderedDict[Any, T] = OrderedDict()

    def find(self, key: Any, make: Callable[[], T]) -> T:
        """The thing for ``key``."""
        found = self._things.pop(key, None)
        self._things[key] = found = make() if found is None else found
        if len(self._things) > _MOST:
            self._things.popitem(last=False)
        return found


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
    key, arrays, rebuild = _taken_apart(fn)
    leaves = jax.tree.leaves((args, kwargs, arrays), is_leaf=is_opaque)
    if any(map(is_text, leaves)):
        raise CannotTrace
    if any(map(is_ragged, leaves)):
        held_key = (key, tuple(map(static_key, jax.tree.leaves(arrays))))
        return run_ragged(strategy, topology, fn, (args, kwargs), held_key)

    def run(held: Any, a: Any, k: Any) -> Any:
        with entered(hosted=False):
            return strategy.run(rebuild(held), a, k)

    return strategy.hosted_runs.find(key, lambda: Function(run))(arrays, args, kwargs)


def _taken_apart(fn: Callable[..., Any]) -> tuple[Any, list[Any], Callable[[Any], Any]]:
    """A function as a key, the arrays that it closes over, and how to put others in."""
    if not isinstance(fn, FunctionType) or fn.__closure__ is None:
        return static_key(fn), [], lambda _: fn
    contents = [c.cell_contents for c in fn.__closure__]
    is_dynamic = [_has_arrays(x) for x in contents]
    statics = tuple(None if d else static_key(x) for x, d in zip(contents, is_dynamic, strict=True))
    defaults = tuple(map(static_key, fn.__defaults__ or ()))
    key = (fn.__code__, id(fn.__globals__), tuple(is_dynamic), statics, defaults)

    def rebuild(held: list[Any]) -> Any:
        rest = iter(held)
        cells = tuple(
            CellType(next(rest) if d else x) for x, d in zip(contents, is_dynamic, strict=True)
        )
        made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
        made.__kwdefaults__ = fn.__kwdefaults__
        return made

    return key, [x for x, d in zip(contents, is_dynamic, strict=True) if d], rebuild


def _has_arrays(x: Any) -> bool:
    leaves = jax.tree.leaves(x, is_leaf=is_opaque)
    return any(isinstance(v, jax.Array | np.ndarray) or is_distributed(v) for v in leaves)
