"""Arrays that are divided over the workers of an elastic run, and how to make them again.

A worker's part of such an array is lost with the worker. An array that was made from something that
every worker can read again, such as a batch of a dataset, is made again for the workers that are
left.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from replicax._src.workers import elastic

# By id, because arrays are not hashable; only in elastic runs.
_origins: dict[int, tuple[weakref.ref[jax.Array], Callable[[], jax.Array]]] = {}


def divided(make: Callable[[], jax.Array]) -> jax.Array:
    """Return ``make()``, and let `remade` call it again after a resize of an elastic run.

    Args:
        make: Returns the array. It refers to all objects that it needs.
    """
    array = make()
    if elastic.is_on():
        number = id(array)
        # Bound now, as the names of modules are gone when the interpreter exits. The callback's
        # argument, the reference, is the default of `pop`.
        _origins[number] = (weakref.ref(array, partial(_origins.pop, number)), make)
    return array


def has_origin(x: Any) -> bool:
    """Whether `remade` can make ``x`` again."""
    found = _origins.get(id(x))
    return found is not None and found[0]() is x


def remade(x: Any) -> Any:
    """Return an array that `divided` made, made again for the current workers; else ``x``."""
    return divided(_origins[id(x)][1]) if has_origin(x) else x
