"""Reduce and gather per-replica values, and `IndexedSlices`, which are concatenated instead."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax._src.base.errors import TracingError
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import ReduceOp
from replicax._src.topology.devices import current_device
from replicax._src.topology.mesh import (
    REPLICA_AXIS,
    Topology,
    on_all_replicas,
    sum_between_cpus,
)
from replicax._src.values.per_replica import (
    InBody,
    Mirrored,
    PerReplica,
    Pieces,
    Stacked,
    in_body,
    is_distributed,
    pieces,
    stacked,
)
from replicax._src.values.placement import (
    as_array,
    first,
    is_array,
    is_staging,
    is_traced,
    on_device,
    per_replica_map,
    refuse_other_mesh,
    replicate,
)
from replicax._src.values.replica_functions import (
    all_shapes,
    first_replica_value,
    gather_across,
    local_piece,
    mean_dtype,
    stacked_array,
    sum_across,
    summand,
)
from replicax._src.workers.elastic import cached_until_resize

Axis = int | Sequence[int] | None


def reduce_value(op: ReduceOp, value: PerReplica, axis: Axis, topology: Topology) -> jax.Array:
    """Combine the components of ``value``, and the entries along ``axis`` of each.

    A mean along an axis divides by the total number of entries, even if the replicas hold
    different numbers of them.
    """
    value = _as_staged(value, topology)
    form = value.form
    if isinstance(form, InBody):
        return _reduce_in_body(op, form, axis)
    shapes = component_shapes(value)
    axes = tuple(_normalized(axis, len(s)) for s in shapes)
    if isinstance(form, Pieces) and not topology.is_fully_addressable:
        return _reduce_across(op, value, axes, topology)
    if len(set(shapes)) > 1:
        return _reduce_ragged(op, value, axis, axes[0])
    rows = stacked_array(value, topology)
    over = (0, *(a + 1 for a in axes[0]))
    if is_traced(rows):
        return _reduce_rows(rows, op, over, topology)
    refuse_other_mesh(topology)
    with on_all_replicas(
        topology, f"reduce({op.name}) of {rows.dtype}{list(rows.shape)}"
    ) as finished:
        reduced = finished(_row_reducer(op, over, topology)(rows))
    return _to_current_device(first(reduced))


def gather_value(value: PerReplica, axis: int, topology: Topology) -> jax.Array:
    """Concatenate the components of ``value`` along ``axis``."""
    value = _as_staged(value, topology)
    form = value.form
    if isinstance(form, InBody):
        piece = jnp.asarray(form.piece)
        return form.across.gather(piece, _one_axis(axis, piece.ndim))
    shapes = component_shapes(value)
    at = _one_axis(axis, min(len(s) for s in shapes))
    if any(map(is_traced, form.values)):
        return concatenate(form.values, at, shapes)
    if not topology.is_fully_addressable:
        everyone = all_shapes(shapes, topology, f"gather(axis={axis})")
        check_joinable(everyone, at)
        sizes = [s[at] for s in everyone]
        return _to_current_device(gather_across(value.values, at, sizes, topology)[0])
    pieces = [_to_current_device(as_array(v)) for v in value.values]
    return concatenate(pieces, at, shapes)


def rows_of(value: PerReplica, topology: Topology) -> jax.Array:
    """Return all replicas' rows as one global array.

    It is sharded over the replicas if they hold equally many rows, and replicated otherwise.
    """
    form = value.form
    if isinstance(form, Stacked) and form.topology == topology:
        rows: jax.Array = _flattener(topology)(form.array)
        return rows
    return replicate(gather_value(value, 0, topology), topology)


@cached_until_resize
def _flattener(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), out_shardings=topology.stacked
    )


def concatenate(pieces: Sequence[Any], axis: int, shapes: Sequence[tuple[int, ...]]) -> jax.Array:
    """Concatenate pieces along `axis`.

    Raises:
        InvalidArgumentError: If they differ in another axis.
    """
    check_joinable(shapes, axis)
    return jnp.concatenate([as_array(p) for p in pieces], axis=axis)


def check_joinable(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Check that shapes differ only along `axis`.

    Raises:
        InvalidArgumentError: If they do not; also a ValueError.
    """
    rest = {(*s[:axis], *s[axis + 1 :]) for s in shapes}
    if len(rest) > 1:
        raise InvalidArgumentError(
            f"The replicas hold values of shapes {list(shapes)}, which can only differ along the"
            f" gathered axis, {axis}."
        )


def first_value(value: PerReplica) -> Any:
    """Return the first replica's component; inside compiled code, on all replicas."""
    form = value.form
    if not isinstance(form, InBody):
        where = form.topology
        return value.values[0] if where is None else first_replica_value(value, where)
    piece = jnp.asarray(form.piece)
    if not jnp.issubdtype(piece.dtype, jnp.number):
        return value.values[0]
    mine = jnp.where(form.across.index() == 0, piece, jnp.zeros_like(piece))
    return form.across.sum([mine])[0]


def agree(pieces: Sequence[Any]) -> bool:
    """Whether all pieces are bitwise equal."""
    arrays = [np.asarray(p) for p in pieces]
    return all(
        a.shape == arrays[0].shape and a.tobytes() == arrays[0].tobytes() for a in arrays[1:]
    )


def component_shapes(value: PerReplica | Mirrored) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each component."""
    form = value.form
    if isinstance(form, Stacked):
        return (tuple(form.array.shape[1:]),) * len(form.topology.local_replicas)
    return tuple(tuple(np.shape(_numeric(v))) for v in value.values)


def _as_staged(value: PerReplica, topology: Topology) -> PerReplica:
    """Convert components known only to this process to the form in traced multi-process code."""
    if topology.is_fully_addressable or not isinstance(value.form, Pieces) or not is_staging():
        return value
    return stacked(stacked_array(value, topology), topology)


def _numeric(v: Any) -> Any:
    if isinstance(v, jax.Array | np.ndarray | np.generic | int | float | complex | bool):
        return v
    raise TypeError(
        f"A replica holds {v!r} ({type(v).__name__}), which is not a number or an array and cannot"
        " be reduced or gathered. `strategy.experimental_local_results(value)` returns it as is."
    )


def _reduce_in_body(op: ReduceOp, form: InBody, axis: Axis) -> jax.Array:
    """Reduce inside a replica body."""
    piece = jnp.asarray(form.piece)
    over = _normalized(axis, piece.ndim)
    local = _local_sum(op, piece, over)
    if op is ReduceOp.SUM:
        reduced: jax.Array = form.across.sum([local])[0]
        return reduced
    total, entries = form.across.sum([local, _entries(piece.shape, over)])
    return _mean(total, entries, piece.dtype)


def _local_sum(op: ReduceOp, x: jax.Array, over: tuple[int, ...]) -> jax.Array:
    """Return one replica's contribution to a sum or mean, in the accumulation dtype."""
    x = summand(op, x)
    if op is ReduceOp.MEAN and x.dtype.itemsize < 4:
        x = x.astype(jnp.float32)
    return jnp.sum(x, axis=over, dtype=x.dtype)


def _mean(total: jax.Array, entries: Any, dtype: Any) -> jax.Array:
    mean: jax.Array = total / entries
    return mean.astype(mean_dtype(dtype))


def _reduce_rows(
    rows: jax.Array, op: ReduceOp, over: tuple[int, ...], topology: Topology
) -> jax.Array:
    """Reduce rows, one for each replica, over axis 0 and more."""
    if topology.is_between_cpus and topology.cores == 1:
        return _reduce_between_cpus(rows, op, over, topology)
    if op is ReduceOp.MEAN:
        return jnp.mean(rows, axis=over)
    rows = summand(op, rows)
    return jnp.sum(rows, axis=over, dtype=rows.dtype)


@cached_until_resize
def _row_reducer(
    op: ReduceOp, over: tuple[int, ...], topology: Topology
) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(partial(_reduce_rows, op=op, over=over, topology=topology))


def _reduce_between_cpus(
    rows: jax.Array, op: ReduceOp, over: tuple[int, ...], topology: Topology
) -> jax.Array:
    """Reduce on each replica first, so that little is sent, then between them."""
    inside = tuple(a - 1 for a in over if a > 0)

    def summed(local_rows: jax.Array) -> jax.Array:
        return sum_between_cpus(_local_sum(op, local_rows[0], inside))

    total: jax.Array = per_replica_map(
        summed, topology, PartitionSpec(REPLICA_AXIS), PartitionSpec()
    )(rows)
    if op is ReduceOp.SUM:
        return total
    return _mean(total, _entries(rows.shape, over), rows.dtype)


def _reduce_across(
    op: ReduceOp, value: PerReplica, axes: Sequence[tuple[int, ...]], topology: Topology
) -> jax.Array:
    """Sum locally first: the shapes exchanged then do not depend on each worker's row count."""
    parts = [
        (_local_sum(op, as_array(v), over), _entries(jnp.shape(v), over))
        for v, over in zip(value.values, axes, strict=True)
    ]
    reduced = _to_current_device(sum_across(op, parts, topology))
    return reduced if op is ReduceOp.SUM else _mean(reduced, 1, jnp.result_type(value.values[0]))


def _entries(shape: tuple[int, ...], over: tuple[int, ...]) -> int:
    return int(np.prod([shape[a] for a in over]))


def _reduce_ragged(op: ReduceOp, value: PerReplica, axis: Axis, over: tuple[int, ...]) -> jax.Array:
    """Reduce components of different shapes over axes that make them equal."""
    shapes = component_shapes(value)
    left = {tuple(n for i, n in enumerate(s) if i not in over) for s in shapes}
    if len(left) > 1:
        raise InvalidArgumentError(
            f"The replicas hold values of shapes {list(shapes)}, which cannot be combined element"
            f" by element with axis={axis}. After a short last batch, also reduce over the batch"
            " with `axis=0`, or batch with `drop_remainder=True`."
        )
    sums = [_to_current_device(_local_sum(op, as_array(v), over)) for v in value.values]
    total = sum(sums[1:], sums[0])
    if op is ReduceOp.SUM:
        return total
    return _mean(total, sum(_entries(s, over) for s in shapes), jnp.result_type(value.values[0]))


def _normalized(axis: Axis, rank: int) -> tuple[int, ...]:
    # Not `if axis`: the axis may be NumPy's 0.
    axes = () if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    return tuple(_one_axis(a, rank) for a in axes)


def _one_axis(axis: int, rank: int) -> int:
    """Return a nonnegative axis; raise `ValueError` if it does not exist."""
    axis = operator.index(axis)
    if not -rank <= axis < rank:
        raise ValueError(
            f"axis={axis} does not exist: each replica's value has {rank}"
            f" {'axis' if rank == 1 else 'axes'}."
            + ("" if rank else " Scalars are combined with `reduce(op, value, axis=None)`.")
        )
    return axis % rank


def _to_current_device(x: jax.Array) -> jax.Array:
    """Move a result to the device of `rx.device`, by default the first CPU device."""
    device = current_device() or jax.local_devices(backend="cpu")[0]
    return x if not x.committed and x.devices() == {device} else on_device(x, device)


@dataclass(frozen=True)
class IndexedSlices:
    """Values for some of the rows of an array.

    Replicas combine them as in TensorFlow: `all_reduce` and `reduce` concatenate the rows of all
    replicas, divided by the number of replicas for a mean; `reduce` along an axis and `gather`
    convert them to dense arrays first.

    Args:
        values: One row for each index.
        indices: Their row numbers in the dense array.
        dense_shape: The shape of the dense array, if known.

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

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of the dense array; ``None`` for the number of rows if it is unknown."""
        if self.dense_shape is None:
            return (None, *self.values.shape[1:])
        return tuple(int(size) for size in np.asarray(self.dense_shape))

    def divided(self, op: ReduceOp, count: int) -> IndexedSlices:
        """Return the concatenated rows of `count` replicas, divided by `count` for a mean."""
        values = self.values / count if op is ReduceOp.MEAN else self.values
        return IndexedSlices(values, self.indices, self.dense_shape)


def is_slices(x: Any) -> bool:
    """Whether `x` is an `IndexedSlices`."""
    return isinstance(x, IndexedSlices)


def reduce_slices(op: ReduceOp, slices: IndexedSlices, axis: Axis, topology: Topology) -> Any:
    """Combine all replicas' rows; along an axis, reduce the dense arrays instead.

    Raises:
        ValueError: If there is no component for each replica.
    """
    if axis is not None:
        return reduce_value(op, _dense(slices, topology), axis, topology)
    _require_components(slices, topology)
    if not isinstance(slices.values, PerReplica):
        return slices
    rows, indices = (gather_value(x, 0, topology) for x in (slices.values, slices.indices))
    shape = slices.dense_shape
    shape = first_value(shape) if isinstance(shape, PerReplica) else shape
    return IndexedSlices(rows, indices, shape).divided(op, topology.num_replicas)


def gather_slices(slices: IndexedSlices, axis: int, topology: Topology) -> jax.Array:
    """Concatenate the dense arrays of all replicas along an axis."""
    dense = _dense(slices, topology)
    return gather_value(dense, axis, topology) if isinstance(dense, PerReplica) else dense


def _dense(slices: IndexedSlices, topology: Topology) -> Any:
    """Convert slices to dense arrays; raise if the dense shape is unknown."""
    _require_components(slices, topology)
    if (shape := slices.dense_shape) is None:
        raise ValueError(
            "IndexedSlices without dense_shape do not define the size of the dense array: pass"
            " `rx.IndexedSlices(values, indices, dense_shape)`, or reduce them with `axis=None`,"
            " which concatenates the rows."
        )
    if is_traced(shape) or is_distributed(shape):
        raise TracingError(
            "The dense_shape of IndexedSlices is a traced array, and the dense array needs a size"
            " that is known while tracing: pass it as a tuple of numbers, such as"
            " `rx.IndexedSlices(values, indices, (4, 2))`."
        )
    place = lambda rows, at: jnp.zeros(shape, rows.dtype).at[at].add(rows)  # noqa: E731
    rows, at = slices.values, slices.indices
    if not isinstance(rows, PerReplica):
        return place(rows, at)
    form = rows.form
    if isinstance(form, InBody):
        whole = place(jnp.asarray(form.piece), jnp.asarray(local_piece(at)))
        return in_body(whole, form.topology, form.across)
    both = zip(rows.values, at.values, strict=True)
    return pieces([place(as_array(r), as_array(i)) for r, i in both], topology)


def _require_components(slices: IndexedSlices, topology: Topology) -> None:
    if topology.num_replicas > 1 and not isinstance(slices.values, PerReplica):
        raise ValueError(
            f"{slices!r} are one replica's rows, and there are {topology.num_replicas} replicas."
            " Reduce and gather take what `strategy.run` returned."
        )


def _parts(slices: IndexedSlices) -> tuple[tuple[Any, ...], Any]:
    """Return the pytree children, and the dense shape as static data if it is known."""
    shape, parts = slices.dense_shape, (_row_list(slices.values), _row_list(slices.indices))
    if shape is None or isinstance(shape, tuple | list | np.ndarray):
        return parts, None if shape is None else tuple(np.asarray(shape).tolist())
    if is_array(shape) and not is_traced(shape):
        return parts, tuple(np.asarray(shape).tolist())
    return (*parts, shape), _A_LEAF


def _row_list(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, list | tuple) else x


def _joined(shape: Any, parts: tuple[Any, ...]) -> IndexedSlices:
    values, indices, *leaf = parts
    return IndexedSlices(values, indices, leaf[0] if shape == _A_LEAF else shape)


_A_LEAF = "the shape is a leaf"
jax.tree_util.register_pytree_node(IndexedSlices, _parts, _joined)
