"""Functions of `tf` that make arrays and change their shapes."""

import builtins
import operator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.tf_ops.core import (
    StaticShape,
    as_tensor,
    axes,
    ints,
    library,
    result_dtype,
    shaped,
)


def shape(input: Any, out_type: Any = None, name: str | None = None) -> Any:
    """Return the shape as an int32 array whose values are known while JAX traces.

    Example:
        >>> tf.shape(jnp.ones((2, 3))).tolist()
        [2, 3]
    """
    return np.asarray(np.shape(input), out_type or np.int32).view(StaticShape)


def shape_n(input: Any, out_type: Any = np.int32, name: str | None = None) -> Any:
    """Return the shapes of several arrays.

    Example:
        >>> [s.tolist() for s in tf.shape_n([1.0, jnp.ones(2)])]
        [[], [2]]
    """
    return [shape(each, out_type) for each in input]


def size(input: Any, out_type: Any = None, name: str | None = None) -> Any:
    """Return the number of entries.

    Example:
        >>> int(tf.size(jnp.ones((2, 3))))
        6
    """
    return np.dtype(out_type or np.int32).type(np.prod(np.shape(input), dtype=np.int64))


def rank(input: Any, name: str | None = None) -> Any:
    """Return the number of dimensions.

    Example:
        >>> int(tf.rank(jnp.ones((2, 3))))
        2
    """
    return np.int32(len(np.shape(input)))


def convert_to_tensor(
    value: Any, dtype: Any = None, dtype_hint: Any = None, name: str | None = None
) -> Any:
    """Return a value as an array.

    Example:
        >>> tf.convert_to_tensor([1.5, 2])
        Array([1.5, 2. ], dtype=float32)
    """
    return as_tensor(value, dtype)


def cast(x: Any, dtype: Any, name: str | None = None) -> Any:
    """Convert an array to another dtype.

    Example:
        >>> tf.cast(2.7, jnp.int32)
        Array(2, dtype=int32)
    """
    value, wanted = as_tensor(x), result_dtype(dtype)
    if value.dtype.kind == "c" and wanted.kind != "c":
        value = value.real
    if value.dtype.kind == "f" and wanted.kind in "iu":
        value = library(value).trunc(value)
    return shaped(value.astype(wanted), x)


def saturate_cast(value: Any, dtype: Any, name: str | None = None) -> Any:
    """Convert an array to another dtype, with values clipped to its range.

    Example:
        >>> tf.saturate_cast(300.0, jnp.uint8)
        Array(255, dtype=uint8)
    """
    x, wanted = as_tensor(value), result_dtype(dtype)
    if wanted.kind in "iu":
        info = np.iinfo(wanted)
        x = library(x).clip(x, info.min, info.max)
    return cast(x, wanted)


def bitcast(input: Any, type: Any, name: str | None = None) -> Any:
    """Return the bits of an array as another dtype.

    Example:
        >>> tf.bitcast(jnp.float32(1.0), jnp.int32)
        Array(1065353216, dtype=int32)
    """
    x = as_tensor(input)
    return x.view(type) if library(x) is np else jax.lax.bitcast_convert_type(x, type)


def reshape(tensor: Any, shape: Any, name: str | None = None) -> Any:
    """Return an array with another shape.

    Example:
        >>> tf.reshape(jnp.arange(4), [2, -1]).shape
        (2, 2)
    """
    return library(tensor).reshape(as_tensor(tensor), ints(shape))


def expand_dims(input: Any, axis: Any, name: str | None = None) -> Any:
    """Insert an axis of size 1.

    Example:
        >>> tf.expand_dims(jnp.ones(3), -1).shape
        (3, 1)
    """
    return library(input).expand_dims(as_tensor(input), operator.index(axis))


def squeeze(input: Any, axis: Any = None, name: str | None = None) -> Any:
    """Remove axes of size 1.

    Example:
        >>> tf.squeeze(jnp.ones((1, 3, 1)), [0]).shape
        (3, 1)
    """
    dims = None if axis is None or (np.ndim(axis) and not len(axis)) else axes(axis)
    return library(input).squeeze(as_tensor(input), dims)


def transpose(
    a: Any, perm: Any = None, conjugate: Any = False, name: str | None = "transpose"
) -> Any:
    """Permute the axes, or reverse their order.

    Example:
        >>> tf.transpose(jnp.ones((2, 3)), [1, 0]).shape
        (3, 2)
    """
    x = library(a).transpose(as_tensor(a), None if perm is None else ints(perm))
    return library(x).conj(x) if conjugate else x


def concat(values: Any, axis: Any, name: str | None = "concat") -> Any:
    """Join arrays along an axis.

    Example:
        >>> tf.concat([[1, 2], [3]], 0)
        Array([1, 2, 3], dtype=int32)
    """
    parts = list(values) if isinstance(values, (list, tuple)) else [values]
    dtype = next((p.dtype for p in parts if hasattr(p, "dtype")), None)
    xp = library(parts)
    arrays = [as_tensor(p, None if hasattr(p, "dtype") else dtype, xp) for p in parts]
    return shaped(xp.concatenate(arrays, operator.index(axis)), parts)


def stack(values: Any, axis: Any = 0, name: str | None = "stack") -> Any:
    """Join arrays along a new axis.

    Example:
        >>> tf.stack([[1, 2], [3, 4]], axis=1)
        Array([[1, 3],
               [2, 4]], dtype=int32)
    """
    if isinstance(values, (list, tuple)) and values and all(_is_number(v) for v in values):
        return np.asarray([int(v) for v in values], np.int32).view(StaticShape)
    parts = [as_tensor(v) for v in values]
    return shaped(library(parts).stack(parts, axis), values)


def _is_number(value: Any) -> bool:
    """Whether a value is a whole number that is known in a trace, such as a size."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def parallel_stack(values: Any, name: str | None = "parallel_stack") -> Any:
    """Join arrays along a new first axis.

    Example:
        >>> tf.parallel_stack([1.0, 2.0])
        Array([1., 2.], dtype=float32)
    """
    return stack([as_tensor(v) for v in values])


def unstack(value: Any, num: Any = None, axis: Any = 0, name: str | None = "unstack") -> Any:
    """Return the slices along an axis as a list.

    Example:
        >>> tf.unstack(jnp.arange(3))
        [Array(0, dtype=int32), Array(1, dtype=int32), Array(2, dtype=int32)]
    """
    if isinstance(value, StaticShape):
        return [int(v) for v in value]
    x = as_tensor(value)
    return [library(x).take(x, i, axis) for i in builtins.range(x.shape[axis])]


def split(
    value: Any, num_or_size_splits: Any, axis: Any = 0, num: Any = None, name: str | None = "split"
) -> Any:
    """Split an array along an axis, into equal parts or into parts of given sizes.

    Example:
        >>> tf.split(jnp.arange(4), [1, -1])
        [Array([0], dtype=int32), Array([1, 2, 3], dtype=int32)]
    """
    x, axis = as_tensor(value), operator.index(axis)
    total = x.shape[axis]
    if np.ndim(num_or_size_splits) == 0:
        count = int(num_or_size_splits)
        if total % count:
            raise InvalidArgumentError(
                f"split: axis {axis} has size {total}, which {count} equal parts do not divide."
                " Pass the sizes of the parts."
            )
        sizes = (total // count,) * count
    else:
        sizes = ints(num_or_size_splits)
        rest = total - sum(s for s in sizes if s >= 0)
        sizes = tuple(rest if s < 0 else s for s in sizes)
    if sum(sizes) != total:
        raise InvalidArgumentError(f"split: sizes {sizes} do not add up to {total}.")
    return list(library(x).split(x, np.cumsum(sizes)[:-1].tolist(), axis))


def tile(input: Any, multiples: Any, name: str | None = None) -> Any:
    """Repeat an array along each axis.

    Example:
        >>> tf.tile(jnp.arange(2), [2])
        Array([0, 1, 0, 1], dtype=int32)
    """
    return library(input).tile(as_tensor(input), ints(multiples))


def repeat(input: Any, repeats: Any, axis: Any = None, name: str | None = None) -> Any:
    """Repeat the entries of an array.

    Example:
        >>> tf.repeat(jnp.arange(2), 2)
        Array([0, 0, 1, 1], dtype=int32)
    """
    if isinstance(repeats, list | tuple):  # known in a trace, where their sum is a size
        repeats = np.asarray(repeats)
    return library(input).repeat(as_tensor(input), repeats, axis)


def reverse(tensor: Any, axis: Any, name: str | None = None) -> Any:
    """Reverse the order of entries along axes.

    Example:
        >>> tf.reverse(jnp.arange(3), [0])
        Array([2, 1, 0], dtype=int32)
    """
    return library(tensor).flip(as_tensor(tensor), axes(axis))


def reverse_sequence(
    input: Any,
    seq_lengths: Any,
    seq_axis: Any = None,
    batch_axis: Any = None,
    name: str | None = None,
) -> Any:
    """Reverse the first ``seq_lengths`` entries of each sequence.

    Example:
        >>> tf.reverse_sequence(jnp.arange(4).reshape(1, 4), [3], seq_axis=1, batch_axis=0)
        Array([[2, 1, 0, 3]], dtype=int32)
    """
    x, xp = as_tensor(input), library(input)
    axis, batch = operator.index(seq_axis), operator.index(batch_axis or 0)
    moved = xp.moveaxis(x, (batch, axis), (0, 1))
    position = xp.arange(moved.shape[1])[None]
    length = as_tensor(seq_lengths)[:, None]
    index = xp.where(position < length, length - 1 - position, position)
    rows = xp.arange(moved.shape[0])[:, None]
    return xp.moveaxis(moved[rows, index], (0, 1), (batch, axis))


def roll(input: Any, shift: Any, axis: Any, name: str | None = None) -> Any:
    """Roll entries along axes, wrapping around at the ends.

    Example:
        >>> tf.roll(jnp.arange(4), 1, 0)
        Array([3, 0, 1, 2], dtype=int32)
    """
    is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(shift))
    move = jnp.asarray(shift) if is_traced else ints(shift) if np.ndim(shift) else shift
    return library(input).roll(as_tensor(input), move, axes(axis))


def pad(
    tensor: Any,
    paddings: Any,
    mode: Any = "CONSTANT",
    constant_values: Any = 0,
    name: str | None = None,
) -> Any:
    """Pad an array before and after each axis.

    Example:
        >>> tf.pad(jnp.ones(2), [[1, 0]])
        Array([0., 1., 1.], dtype=float32)
    """
    widths = [tuple(int(w) for w in pair) for pair in paddings]
    x, xp = as_tensor(tensor), library(tensor)
    kind = mode.upper()
    if kind == "CONSTANT":
        return xp.pad(x, widths, constant_values=constant_values)
    return xp.pad(x, widths, mode={"REFLECT": "reflect", "SYMMETRIC": "symmetric"}[kind])


def fill(dims: Any, value: Any, name: str | None = None, layout: Any = None) -> Any:
    """Return an array filled with one value.

    Example:
        >>> tf.fill([2], 3.0)
        Array([3., 3.], dtype=float32)
    """
    x = as_tensor(value)
    return library(dims if library(x) is np else x).full(ints(dims), x, x.dtype)


def zeros(shape: Any, dtype: Any = np.float32, name: str | None = None, layout: Any = None) -> Any:
    """Return an array of zeros.

    Example:
        >>> tf.zeros([2])
        Array([0., 0.], dtype=float32)
    """
    return library().zeros(ints(shape), result_dtype(dtype))


def ones(shape: Any, dtype: Any = np.float32, name: str | None = None, layout: Any = None) -> Any:
    """Return an array of ones.

    Example:
        >>> tf.ones([2], jnp.int32)
        Array([1, 1], dtype=int32)
    """
    return library().ones(ints(shape), result_dtype(dtype))


def zeros_like(input: Any, dtype: Any = None, name: str | None = None, layout: Any = None) -> Any:
    """Return zeros with the shape and dtype of another array.

    Example:
        >>> tf.zeros_like(jnp.ones(2))
        Array([0., 0.], dtype=float32)
    """
    return library().zeros_like(as_tensor(input), result_dtype(dtype))


def ones_like(input: Any, dtype: Any = None, name: str | None = None, layout: Any = None) -> Any:
    """Return ones with the shape and dtype of another array.

    Example:
        >>> tf.ones_like(jnp.zeros(2))
        Array([1., 1.], dtype=float32)
    """
    return library().ones_like(as_tensor(input), result_dtype(dtype))


def eye(
    num_rows: Any,
    num_columns: Any = None,
    batch_shape: Any = None,
    dtype: Any = np.float32,
    name: str | None = None,
) -> Any:
    """Return identity matrices.

    Example:
        >>> tf.eye(2)
        Array([[1., 0.],
               [0., 1.]], dtype=float32)
    """
    xp, rows = library(), int(num_rows)
    columns = rows if num_columns is None else int(num_columns)
    result = xp.eye(rows, columns, dtype=result_dtype(dtype))
    return xp.broadcast_to(result, (*ints(batch_shape), rows, columns))


def one_hot(
    indices: Any,
    depth: Any,
    on_value: Any = None,
    off_value: Any = None,
    axis: Any = None,
    dtype: Any = None,
    name: str | None = None,
) -> Any:
    """Return one-hot vectors for class indices.

    Example:
        >>> tf.one_hot(1, 3)
        Array([0., 1., 0.], dtype=float32)
    """
    xp, x = library(indices), as_tensor(indices)
    known = next((as_tensor(v).dtype for v in (on_value, off_value) if v is not None), np.float32)
    kind = result_dtype(known if dtype is None else dtype)
    new_axis = -1 if axis is None else axis
    is_on = xp.expand_dims(x, new_axis)
    rank = is_on.ndim
    spread = xp.arange(int(depth), dtype=x.dtype).reshape(
        [-1 if i == new_axis % rank else 1 for i in builtins.range(rank)]
    )
    on = 1 if on_value is None else on_value
    off = 0 if off_value is None else off_value
    return xp.where(is_on == spread, xp.asarray(on, kind), xp.asarray(off, kind))


def range(
    start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None, name: str | None = "range"
) -> Any:
    """Return evenly spaced numbers.

    Example:
        >>> tf.range(3)
        Array([0, 1, 2], dtype=int32)
    """
    first, last = (0, start) if limit is None else (start, limit)
    values = [first, last, delta]
    kind = dtype
    if kind is None:
        kind = np.result_type(*(as_tensor(value).dtype for value in values))
    known = [
        v.item() if hasattr(v, "item") and not isinstance(v, jax.core.Tracer) else v for v in values
    ]
    return library().arange(*known, dtype=result_dtype(kind))


def linspace(start: Any, stop: Any, num: Any, name: str | None = None, axis: Any = 0) -> Any:
    """Return ``num`` evenly spaced numbers, including both ends.

    Example:
        >>> tf.linspace(0.0, 1.0, 3)
        Array([0. , 0.5, 1. ], dtype=float32)
    """
    first, last = as_tensor(start), as_tensor(stop)
    dtype = first.dtype if first.dtype.kind == "f" else np.float64
    return library(first).linspace(first, last, int(num), axis=axis, dtype=result_dtype(dtype))


def meshgrid(*args: Any, **kwargs: Any) -> Any:
    """Return coordinate grids for the given 1-D axes.

    Example:
        >>> [g.shape for g in tf.meshgrid(jnp.ones(2), jnp.ones(3))]
        [(3, 2), (3, 2)]
    """
    kwargs.pop("name", None)
    return list(library(args).meshgrid(*(as_tensor(a) for a in args), **kwargs))


def where(condition: Any, x: Any = None, y: Any = None, name: str | None = None) -> Any:
    """Choose between two arrays, or return the indices of true entries.

    Example:
        >>> tf.where(jnp.array([True, False]), 1.0, 2.0)
        Array([1., 2.], dtype=float32)
    """
    if x is None and y is None:
        indices = np.argwhere(np.asarray(condition)).astype(np.int64)
        return indices if library(condition) is np else jnp.asarray(indices)
    first, second = _pair(x, y)
    return library(condition, first, second).where(as_tensor(condition), first, second)


def _pair(x: Any, y: Any) -> Any:
    dtype = getattr(x, "dtype", None) or getattr(y, "dtype", None)
    return tuple(as_tensor(v, None if hasattr(v, "dtype") else dtype) for v in (x, y))


def boolean_mask(
    tensor: Any, mask: Any, axis: Any = None, name: str | None = "boolean_mask"
) -> Any:
    """Return the entries where a mask is true; not in compiled functions.

    Example:
        >>> tf.boolean_mask(jnp.arange(3), [True, False, True])
        Array([0, 2], dtype=int32)
    """
    if isinstance(mask, jax.core.Tracer) or (
        isinstance(tensor, jax.core.Tracer) and isinstance(mask, jax.core.Tracer)
    ):
        raise InvalidArgumentError(
            "boolean_mask: the shape of the result depends on the values of the mask, which are"
            " unknown in a compiled function. Write `tf.where(mask, x, 0)`, or mask outside of it."
        )
    x, m = as_tensor(tensor), np.asarray(mask)
    start = 0 if axis is None else operator.index(axis) % x.ndim
    return x[(builtins.slice(None),) * start + (m,)]


def gather(
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: Any = None,
    batch_dims: Any = 0,
    name: str | None = None,
) -> Any:
    """Take the entries at some indices along an axis.

    Example:
        >>> tf.gather(jnp.arange(4) * 2, [3, 0])
        Array([6, 0], dtype=int32)
    """
    x, index, xp = as_tensor(params), as_tensor(indices), library(params, indices)
    axis = batch_dims if axis is None else operator.index(axis)
    batch = batch_dims % index.ndim if batch_dims < 0 else batch_dims
    axis %= max(x.ndim, 1)
    if not batch:
        return xp.take(x, index, axis) if xp is np else x.take(index, axis, mode="fill")
    grid = np.meshgrid(*(np.arange(n) for n in index.shape[:batch]), indexing="ij")
    rest = index.ndim - batch
    rows = [r.reshape(r.shape + (1,) * rest) for r in grid]
    moved = xp.moveaxis(x, axis, batch)
    taken = moved[(*rows, index)]
    kept_axes = list(builtins.range(batch, batch + rest))
    target = list(builtins.range(axis, axis + rest))
    return xp.moveaxis(taken, kept_axes, target)


def gather_nd(
    params: Any,
    indices: Any,
    batch_dims: Any = 0,
    name: str | None = None,
    bad_indices_policy: Any = "",
) -> Any:
    """Gather the entries or slices at index tuples, one per row of ``indices``.

    Example:
        >>> tf.gather_nd(jnp.arange(4).reshape(2, 2), [[1, 0]])
        Array([2], dtype=int32)
    """
    x, index = as_tensor(params), as_tensor(indices)
    batch = batch_dims
    grid = np.meshgrid(*(np.arange(n) for n in index.shape[:batch]), indexing="ij") if batch else ()
    rows = [r.reshape(r.shape + (1,) * (index.ndim - 1 - batch)) for r in grid]
    return x[(*rows, *(index[..., i] for i in builtins.range(index.shape[-1])))]


def scatter_nd(
    indices: Any, updates: Any, shape: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """Scatter updates into an array of zeros; sum updates at the same index.

    Example:
        >>> tf.scatter_nd([[1]], [5.0], [3])
        Array([0., 5., 0.], dtype=float32)
    """
    values = as_tensor(updates)
    return tensor_scatter_nd_add(library(values).zeros(ints(shape), values.dtype), indices, values)


def _scatter(x: Any, indices: Any, updates: Any, ufunc: Any, method: Any) -> Any:
    result, index = as_tensor(x), as_tensor(indices)
    values = as_tensor(updates, None if hasattr(updates, "dtype") else result.dtype)
    key = tuple(index[..., i] for i in builtins.range(index.shape[-1]))
    if library(result) is np:
        result = result.copy()
        if ufunc is None:
            result[key] = values
        else:
            ufunc.at(result, key, values)
        return result
    return getattr(result.at[key], method)(values)


def tensor_scatter_nd_update(
    tensor: Any, indices: Any, updates: Any, name: str | None = None, bad_indices_policy: Any = ""
) -> Any:
    """Return a copy of an array with the entries at ``indices`` replaced.

    Example:
        >>> tf.tensor_scatter_nd_update(jnp.zeros(3), [[1]], [5.0])
        Array([0., 5., 0.], dtype=float32)
    """
    return _scatter(tensor, indices, updates, None, "set")


def tensor_scatter_nd_add(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """Return a copy of an array with updates added at ``indices``.

    Example:
        >>> tf.tensor_scatter_nd_add(jnp.ones(3), [[1]], [5.0])
        Array([1., 6., 1.], dtype=float32)
    """
    return _scatter(tensor, indices, updates, np.add, "add")


def tensor_scatter_nd_sub(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """Return a copy of an array with updates subtracted at ``indices``.

    Example:
        >>> tf.tensor_scatter_nd_sub(jnp.ones(3), [[1]], [5.0])
        Array([ 1., -4.,  1.], dtype=float32)
    """
    return _scatter(tensor, indices, -as_tensor(updates), np.add, "add")


def tensor_scatter_nd_max(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """Return a copy of an array with the maximum of entry and update at ``indices``.

    Example:
        >>> tf.tensor_scatter_nd_max(jnp.ones(3), [[1]], [5.0])
        Array([1., 5., 1.], dtype=float32)
    """
    return _scatter(tensor, indices, updates, np.maximum, "max")


def tensor_scatter_nd_min(
    tensor: Any, indices: Any, updates: Any, bad_indices_policy: str = "", name: str | None = None
) -> Any:
    """Return a copy of an array with the minimum of entry and update at ``indices``.

    Example:
        >>> tf.tensor_scatter_nd_min(jnp.ones(3), [[1]], [-5.0])
        Array([ 1., -5.,  1.], dtype=float32)
    """
    return _scatter(tensor, indices, updates, np.minimum, "min")


def slice(input_: Any, begin: Any, size: Any, name: str | None = None) -> Any:
    """Return the block that starts at ``begin``; a size of -1 means up to the end.

    Example:
        >>> tf.slice(jnp.arange(5), [1], [2])
        Array([1, 2], dtype=int32)
    """
    x = as_tensor(input_)
    sizes = [n if s == -1 else s for s, n in zip(ints(size), x.shape, strict=True)]
    if any(isinstance(b, jax.core.Tracer) for b in jax.tree.leaves(begin)):
        return jax.lax.dynamic_slice(
            x,
            list(begin),
            [
                s if w != -1 else x.shape[i] - int(begin[i])
                for i, (s, w) in enumerate(zip(sizes, ints(size), strict=True))
            ],
        )
    starts = ints(begin)
    ends = [n if w == -1 else b + w for b, w, n in zip(starts, ints(size), x.shape, strict=True)]
    return x[tuple(builtins.slice(b, e) for b, e in zip(starts, ends, strict=True))]


def strided_slice(
    input_: Any,
    begin: Any,
    end: Any,
    strides: Any = None,
    begin_mask: Any = 0,
    end_mask: Any = 0,
    ellipsis_mask: Any = 0,
    new_axis_mask: Any = 0,
    shrink_axis_mask: Any = 0,
    var: Any = None,
    name: str | None = None,
) -> Any:
    """Return the slice ``begin:end:strides`` of each axis.

    Example:
        >>> tf.strided_slice(jnp.arange(6), [0], [6], [2])
        Array([0, 2, 4], dtype=int32)
    """
    starts, ends = ints(begin), ints(end)
    steps = ints(strides) if strides is not None else (1,) * len(starts)
    key: list[Any] = []
    for i, (first, last, step) in enumerate(zip(starts, ends, steps, strict=True)):
        bit = 1 << i
        if ellipsis_mask & bit:
            key.append(Ellipsis)
        elif new_axis_mask & bit:
            key.append(None)
        elif shrink_axis_mask & bit:
            key.append(first)
        else:
            key.append(
                builtins.slice(
                    None if begin_mask & bit else first, None if end_mask & bit else last, step
                )
            )
    return as_tensor(input_)[tuple(key)]


def broadcast_to(input: Any, shape: Any, name: str | None = None) -> Any:
    """Broadcast an array to a shape.

    Example:
        >>> tf.broadcast_to(jnp.arange(2), [2, 2])
        Array([[0, 1],
               [0, 1]], dtype=int32)
    """
    return library(input).broadcast_to(as_tensor(input), ints(shape))


def broadcast_static_shape(shape_x: Any, shape_y: Any) -> Any:
    """Return the shape to which two shapes broadcast.

    Example:
        >>> tuple(tf.broadcast_static_shape((2, 1), (3,)))
        (2, 3)
    """
    return np.broadcast_shapes(ints(shape_x), ints(shape_y))


def broadcast_dynamic_shape(shape_x: Any, shape_y: Any) -> Any:
    """Return the shape to which two shapes broadcast, as an array.

    Example:
        >>> tf.broadcast_dynamic_shape([2, 1], [3]).tolist()
        [2, 3]
    """
    return np.asarray(broadcast_static_shape(shape_x, shape_y), np.int32).view(StaticShape)


def ensure_shape(x: Any, shape: Any, name: str | None = None) -> Any:
    """Return an array unchanged, or raise if its shape does not match.

    Example:
        >>> tf.ensure_shape(jnp.ones(2), [None]).shape
        (2,)
    """
    wanted = tuple(getattr(shape, "dims", shape) if hasattr(shape, "dims") else shape)
    found = np.shape(x)
    fits = len(wanted) == len(found) and all(
        w in (None, n) for w, n in zip(wanted, found, strict=True)
    )
    if not fits:
        raise InvalidArgumentError(f"ensure_shape: the shape is {found}, not {wanted}.")
    return as_tensor(x)


def sequence_mask(
    lengths: Any, maxlen: Any = None, dtype: Any = np.bool_, name: str | None = None
) -> Any:
    """Return masks in which the first ``lengths`` entries are true.

    Example:
        >>> tf.sequence_mask([1, 2], 3)
        Array([[ True, False, False],
               [ True,  True, False]], dtype=bool)
    """
    length = as_tensor(lengths)
    most = int(np.max(np.asarray(length))) if maxlen is None else int(maxlen)
    return (library(length).arange(most) < length[..., None]).astype(result_dtype(dtype))


def argsort(
    values: Any,
    axis: Any = -1,
    direction: Any = "ASCENDING",
    stable: Any = False,
    name: str | None = None,
) -> Any:
    """Return the indices that sort an array.

    Example:
        >>> tf.argsort(jnp.array([3, 1, 2]))
        Array([1, 2, 0], dtype=int32)
    """
    x, xp = as_tensor(values), library(values)
    if direction == "ASCENDING":
        return xp.argsort(x, axis, stable=True).astype(np.int32)
    flipped = xp.argsort(xp.flip(x, axis), axis, stable=True)
    return (x.shape[axis] - 1 - xp.flip(flipped, axis)).astype(np.int32)


def sort(values: Any, axis: Any = -1, direction: Any = "ASCENDING", name: str | None = None) -> Any:
    """Sort the entries of an array along an axis.

    Example:
        >>> tf.sort(jnp.array([3, 1, 2]), direction="DESCENDING")
        Array([3, 2, 1], dtype=int32)
    """
    result = library(values).sort(as_tensor(values), axis)
    return result if direction == "ASCENDING" else library(values).flip(result, axis)


def searchsorted(
    sorted_sequence: Any,
    values: Any,
    side: Any = "left",
    out_type: Any = np.int32,
    name: str | None = None,
) -> Any:
    """Return the insertion points of values in sorted rows.

    Example:
        >>> tf.searchsorted([1.0, 3.0], [2.0])
        Array([1], dtype=int32)
    """
    rows, wanted = as_tensor(sorted_sequence), as_tensor(values)
    if rows.ndim == 1:
        return library(rows).searchsorted(rows, wanted, side=side).astype(result_dtype(out_type))
    order = rows.reshape(-1, rows.shape[-1])[:, None, :]
    targets = wanted.reshape(-1, wanted.shape[-1])[:, :, None]
    before = order < targets if side == "left" else order <= targets
    return before.sum(-1).reshape(wanted.shape).astype(result_dtype(out_type))


class Unique(NamedTuple):
    """Distinct entries in the order of appearance, and the index of each entry among them.

    Example:
        >>> tf.unique(jnp.array([3, 1, 3])).y
        Array([3, 1], dtype=int32)
    """

    y: Any
    idx: Any


class UniqueWithCounts(NamedTuple):
    """Distinct entries, the index of each entry among them, and how often they occur.

    Example:
        >>> tf.unique_with_counts(jnp.array([3, 1, 3])).count
        Array([2, 1], dtype=int32)
    """

    y: Any
    idx: Any
    count: Any


def unique(x: Any, out_idx: Any = np.int32, name: str | None = None) -> Any:
    """Return distinct entries in the order of appearance, and their indices; not in compiled code.

    Example:
        >>> tf.unique(jnp.array([3, 1, 3]))
        Unique(y=Array([3, 1], dtype=int32), idx=Array([0, 1, 0], dtype=int32))
    """
    values, index, _ = unique_with_counts(x, out_idx)
    return Unique(values, index)


def unique_with_counts(x: Any, out_idx: Any = np.int32, name: str | None = None) -> Any:
    """Return distinct entries, the index of each entry among them, and how often they occur.

    Example:
        >>> tf.unique_with_counts(jnp.array([3, 1, 3]))[2]
        Array([2, 1], dtype=int32)
    """
    values, first, index, counts = np.unique(
        np.asarray(as_tensor(x)), return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    result = values[order], place[index.ravel()].astype(out_idx), counts[order].astype(out_idx)
    return UniqueWithCounts(*(result if library(x) is np else map(as_tensor, result)))


def unravel_index(indices: Any, dims: Any, name: str | None = None) -> Any:
    """Return coordinates of flat indices, one row per axis.

    Example:
        >>> tf.unravel_index(jnp.array([5]), [2, 3])
        Array([[1],
               [2]], dtype=int32)
    """
    flat, xp = as_tensor(indices), library(indices)
    return xp.stack(xp.unravel_index(flat, ints(dims))).astype(flat.dtype)


def dynamic_partition(
    data: Any, partitions: Any, num_partitions: Any, name: str | None = None
) -> Any:
    """Split rows into lists by partition index; unavailable in compiled functions.

    Example:
        >>> tf.dynamic_partition(jnp.arange(3), [0, 1, 0], 2)
        [Array([0, 2], dtype=int32), Array([1], dtype=int32)]
    """
    x, number = as_tensor(data), np.asarray(partitions)
    return [x[number == i] for i in builtins.range(num_partitions)]


def dynamic_stitch(indices: Any, data: Any, name: str | None = None) -> Any:
    """Merge the rows of several arrays into one array, at the given indices.

    Example:
        >>> tf.dynamic_stitch([[1], [0]], [[[5.0]], [[7.0]]])
        Array([[7.],
               [5.]], dtype=float32)
    """
    places = [np.asarray(i) for i in indices]
    parts = [as_tensor(d) for d in data]
    rest = parts[0].shape[places[0].ndim :]
    result = library(parts).zeros(
        (max(int(p.max()) for p in places if p.size) + 1, *rest), parts[0].dtype
    )
    for positions, part in zip(places, parts, strict=True):
        result = tensor_scatter_nd_update(result, positions.reshape(-1, 1), part.reshape(-1, *rest))
    return result


def identity_n(input: Any, name: str | None = None) -> Any:
    """Return several arrays unchanged.

    Example:
        >>> tf.identity_n([1.0])
        [Array(1., dtype=float32)]
    """
    return [as_tensor(each) for each in input]


def stop_gradient(input: Any, name: str | None = None) -> Any:
    """Return an array unchanged and stop gradients through it.

    Example:
        >>> tf.stop_gradient(2.0)
        Array(2., dtype=float32)
    """
    x = as_tensor(input)
    return x if library(x) is np else jax.lax.stop_gradient(x)


def get_static_value(tensor: Any, partial: Any = False) -> Any:
    """Return the value as a NumPy array, or None if it is a tracer.

    Example:
        >>> tf.get_static_value(jnp.float32(2))
        array(2., dtype=float32)
    """
    return None if isinstance(tensor, jax.core.Tracer) else np.asarray(tensor)


def is_tensor(x: Any) -> Any:
    """Whether a value is an array or a variable.

    Example:
        >>> tf.is_tensor(jnp.ones(2)), tf.is_tensor([1.0])
        (True, False)
    """
    return hasattr(x, "dtype") and hasattr(x, "shape")


def is_symbolic_tensor(tensor: Any) -> bool:
    """Whether a value is a tracer of a function that is being compiled.

    Example:
        >>> tf.is_symbolic_tensor(jnp.ones(2))
        False
    """
    return isinstance(tensor, jax.core.Tracer)


def space_to_batch(input: Any, block_shape: Any, paddings: Any, name: str | None = None) -> Any:
    """Rearrange spatial blocks into the batch axis.

    Example:
        >>> tf.space_to_batch(jnp.ones((1, 2, 2, 1)), [2, 2], [[0, 0], [0, 0]]).shape
        (4, 1, 1, 1)
    """
    x, xp, block = as_tensor(input), library(input), ints(block_shape)
    n = len(block)
    widths = [(0, 0), *(tuple(int(w) for w in p) for p in paddings), *[(0, 0)] * (x.ndim - 1 - n)]
    x = xp.pad(x, widths)
    split = [x.shape[0]]
    for i, b in enumerate(block):
        split += [x.shape[i + 1] // b, b]
    rest = x.shape[n + 1 :]
    x = x.reshape(*split, *rest)
    order = [2 + 2 * i for i in builtins.range(n)] + [0] + [1 + 2 * i for i in builtins.range(n)]
    x = xp.transpose(x, [*order, *builtins.range(1 + 2 * n, x.ndim)])
    return x.reshape(-1, *x.shape[n + 1 :])


def batch_to_space(input: Any, block_shape: Any, crops: Any, name: str | None = None) -> Any:
    """Rearrange the batch axis into spatial blocks.

    Example:
        >>> tf.batch_to_space(jnp.ones((4, 1, 1, 1)), [2, 2], [[0, 0], [0, 0]]).shape
        (1, 2, 2, 1)
    """
    x, xp, block = as_tensor(input), library(input), ints(block_shape)
    n = len(block)
    batch = x.shape[0] // int(np.prod(block))
    space, rest = x.shape[1 : n + 1], x.shape[n + 1 :]
    x = x.reshape(*block, batch, *space, *rest)
    order = [n]
    for i in builtins.range(n):
        order += [n + 1 + i, i]
    x = xp.transpose(x, [*order, *builtins.range(2 * n + 1, x.ndim)])
    x = x.reshape(batch, *(s * b for s, b in zip(space, block, strict=True)), *rest)
    key = [builtins.slice(int(a), x.shape[i + 1] - int(b)) for i, (a, b) in enumerate(crops)]
    return x[(builtins.slice(None), *key)]
