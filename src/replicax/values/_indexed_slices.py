"""Slices: some rows of an array, that replicas join instead of adding up whole arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._enums import ReduceOp
from replicax.topology._mesh import Topology
from replicax.values._per_replica import PerReplica
from replicax.values._reduce import Axis, gather_value, reduce_value


@dataclass(frozen=True)
class IndexedSlices:
    """Values for some of the rows of an array.

    Replicas combine them as TensorFlow's do: `all_reduce` and `reduce` join the rows of all of
    them, divided by the number of replicas for a mean; `reduce` along an axis and `gather` take
    them for the whole arrays that they are rows of.

    Args:
        values: One row for each index.
        indices: Which rows of the whole array they are.
        dense_shape: The shape of the whole array, if known.

    Example:
        >>> v = rx.Variable(jnp.zeros(3))
        >>> v.scatter_add(rx.IndexedSlices(jnp.array([5.0]), jnp.array([2]))).numpy()
        array([0., 0., 5.], dtype=float32)
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> rows = strategy.run(lambda: rx.IndexedSlices(jnp.array([5.0]), jnp.array([2])))
        >>> strategy.reduce("SUM", rows, axis=None).values
        Array([5., 5.], dtype=float32)
    """

    values: Any
    indices: Any
    dense_shape: Any = None

    def divided(self, op: ReduceOp, count: int) -> IndexedSlices:
        """Joined rows of ``count`` replicas, as their sum or mean has them."""
        values = self.values / count if op is ReduceOp.MEAN else self.values
        return IndexedSlices(values, self.indices, self.dense_shape)


def is_slices(x: Any) -> bool:
    """Whether ``x`` is rows of an array."""
    return isinstance(x, IndexedSlices)


def reduce_slices(op: ReduceOp, slices: IndexedSlices, axis: Axis, topology: Topology) -> Any:
    """What all replicas' rows make together; along an axis, of the whole arrays.

    Raises:
        ValueError: If there is no component for each replica.
    """
    if axis is not None:
        return reduce_value(op, _dense(slices, topology), axis, topology)
    _require_components(slices, topology)
    if not isinstance(slices.values, PerReplica):
        return slices
    rows, indices = (gather_value(x, 0, topology) for x in (slices.values, slices.indices))
    return IndexedSlices(rows, indices, slices.dense_shape).divided(op, topology.num_replicas)


def gather_slices(slices: IndexedSlices, axis: int, topology: Topology) -> jax.Array:
    """The whole arrays of all replicas, joined along an axis."""
    dense = _dense(slices, topology)
    return gather_value(dense, axis, topology) if isinstance(dense, PerReplica) else dense


def _dense(slices: IndexedSlices, topology: Topology) -> Any:
    _require_components(slices, topology)
    if (shape := slices.dense_shape) is None:
        raise ValueError(
            "IndexedSlices without dense_shape do not say how large the array is that they are rows"
            " of: give `rx.IndexedSlices(values, indices, dense_shape)`, or reduce them with"
            " `axis=None`, which joins the rows."
        )
    place = lambda rows, at: jnp.zeros(shape, rows.dtype).at[at].add(rows)  # noqa: E731
    return jax.tree.map(place, slices.values, slices.indices)


def _require_components(slices: IndexedSlices, topology: Topology) -> None:
    if topology.num_replicas > 1 and not isinstance(slices.values, PerReplica):
        raise ValueError(
            f"{slices!r} are one replica's rows, and there are {topology.num_replicas} replicas."
            " Reduce and gather take what `strategy.run` returned."
        )


def _parts(slices: IndexedSlices) -> tuple[tuple[Any, Any], Any]:
    shape = slices.dense_shape
    known = None if shape is None else tuple(np.asarray(shape).tolist())
    return (_row_list(slices.values), _row_list(slices.indices)), known


def _row_list(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, list | tuple) else x


jax.tree_util.register_pytree_node(
    IndexedSlices, _parts, lambda shape, parts: IndexedSlices(*parts, shape)
)
