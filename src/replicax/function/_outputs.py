"""Outputs: what a traced function returned -> arrays, and back on every call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._errors import TracingError
from replicax.function._reach import Edge, Reach
from replicax.topology._mesh import Topology
from replicax.values._per_replica import (
    DistributedValues,
    Joined,
    Stacked,
    is_opaque,
)
from replicax.values._pieces import stacked_array
from replicax.values._placement import first, is_array, is_traced
from replicax.values._structures import closed, has_records, opened
from replicax.variables._held import value_of

_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)


@dataclass
class Outputs:
    """The structure that a traced function returned, without its arrays."""

    treedef: Any = None
    parts: list[Any] = field(default_factory=list)
    stacked: list[bool] = field(default_factory=list)
    has_records: bool = False

    def take(self, result: Any, topology: Callable[[], Topology | None]) -> list[Any]:
        """Note the structure of ``result``; its arrays."""
        tree = opened(result)
        self.has_records = has_records(tree)
        paths, self.treedef = jax.tree.flatten_with_path(tree, is_leaf=_is_leaf)
        arrays: list[Any] = []
        for path, x in paths:
            part, array, is_stacked = _part(x, topology)
            if isinstance(part, _Static):
                _refuse_traced(part.value, path)
            self.parts.append(part)
            if array is not None:
                arrays.append(array)
                self.stacked.append(is_stacked)
        return arrays

    def rebuild(self, arrays: Sequence[Any], *, local: bool) -> Any:
        """The structure with new arrays in it.

        Args:
            arrays: What a call returned.
            local: Whether plain results are copies on all devices, of which the first is wanted.
        """
        rest = iter(arrays)
        leaves = [part(next(rest), local) if callable(part) else part.value for part in self.parts]
        made = jax.tree.unflatten(self.treedef, leaves)
        return closed(made) if self.has_records else made


@dataclass(frozen=True)
class _Static:
    value: Any


def _is_leaf(x: Any) -> bool:
    return x is None or is_opaque(x)


def _refuse_traced(x: Any, path: Any) -> None:
    """Refuse an object that would carry values of the trace out of it."""
    where = f"result{jax.tree_util.keystr(path)}"
    if x is not None and (found := Reach(Edge(where, x), everything=True).traced):
        raise TypeError(
            f"A traced function returned an object of type {type(x).__name__!r} that holds an array"
            f" in `{found[0]}`, which exists only while the function is traced. Return the array"
            " itself, or a structure that JAX knows: a tuple, a list, a dictionary, a dataclass, or"
            " a class given to `jax.tree_util.register_pytree_node`."
        )


def _plain(x: Any, local: Any) -> Any:
    return first(x) if local else x


def _part(x: Any, topology: Callable[[], Topology | None]) -> tuple[Any, Any, bool]:
    x = value_of(x)  # a snapshot, as every result is
    if is_array(x):
        return _plain, x, False
    if isinstance(x, DistributedValues):
        return _distributed(x, topology)
    if isinstance(x, _NUMBERS):
        return _plain, jnp.asarray(x), False
    return _Static(x), None, False


def _distributed(
    x: DistributedValues, topology: Callable[[], Topology | None]
) -> tuple[Any, Any, bool]:
    form = x.form
    kind = type(x)
    if isinstance(form, Joined):
        where = form.topology
        return lambda a, _: kind.of(Joined(a, where)), form.array, False
    if isinstance(form, Stacked):
        place: Topology | None = form.topology
    elif any(map(is_traced, form.values)):
        place = topology()
    else:
        return _Static(x), None, False
    if place is None or place.num_replicas != len(x.values):
        raise TracingError(
            f"A traced function returned a per-replica value of {len(x.values)} components without"
            " using a strategy that has as many replicas."
        )
    return lambda a, _: kind.of(Stacked(a, place)), stacked_array(x, place), True  # type: ignore[arg-type]
