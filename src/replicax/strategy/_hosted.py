"""Runs inside a function that Python drives: each is compiled, and found again.

A replica function that is defined inside the loop is a new object on every step. It is the same
program if its code is the same and what it closes over means the same; arrays that it closes over
become inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from replicax.context._current import entered
from replicax.function._function import Function
from replicax.function._signature import static_key
from replicax.values._per_replica import is_distributed

if TYPE_CHECKING:
    from replicax.strategy._base import StrategyBase

_MOST = 256


class HostedRuns:
    """The compiled runs of one strategy, the latest used ones."""

    def __init__(self) -> None:
        self._functions: OrderedDict[Any, Function] = OrderedDict()

    def find(self, key: Any, make: Callable[[], Function]) -> Function:
        """The function for ``key``."""
        found = self._functions.pop(key, None)
        self._functions[key] = found = make() if found is None else found
        if len(self._functions) > _MOST:
            self._functions.popitem(last=False)
        return found


def run_hosted(
    strategy: StrategyBase, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``fn`` on every replica, compiled."""
    key, arrays, rebuild = _taken_apart(fn)

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
    leaves = jax.tree.leaves(x, is_leaf=is_distributed)
    return any(isinstance(v, jax.Array | np.ndarray) or is_distributed(v) for v in leaves)
