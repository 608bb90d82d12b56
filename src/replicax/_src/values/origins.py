"""Arrays that can be built again after a worker of an elastic run is lost.

A worker's part of an array that is sharded over the workers is lost with the worker. If the array
was built from data that every worker can read again, such as a batch of a dataset, it is rebuilt
for the workers that are left.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from replicax._src.workers import elastic

# By id, because arrays are not hashable; only in elastic runs.
_origins: dict[int, tuple[weakref.ref[jax.Array], Callable[[], jax.Array]]] = {}


def rebuildable(make: Callable[[], jax.Array]) -> jax.Array:
    """Return ``make()``, which `rebuilt` calls again after a resize of an elastic run.

    Args:
        make: Builds the array. It keeps a reference to all objects that it needs.
    """
    array = make()
    if elastic.is_on():
        number = id(array)
        # Bound now, as the names of modules are gone when the interpreter exits. The callback's
        # argument, the reference, is the default of `pop`.
        _origins[number] = (weakref.ref(array, partial(_origins.pop, number)), make)
    return array


def is_rebuildable(x: Any) -> bool:
    """Whether `rebuilt` can build ``x`` again."""
    found = _origins.get(id(x))
    return found is not None and found[0]() is x


def rebuilt(x: Any) -> Any:
    """Return an array of `rebuildable`, built again for the current workers; else ``x`` itself."""
    return rebuildable(_origins[id(x)][1]) if is_rebuildable(x) else x
