"""Shape and dtype rules of NumPy functions on abstract arrays.

Each rule has the signature of its function, or the part of it that is supported; passing any other
argument raises, which makes the traced function untraceable. Importing this module registers them.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replicax._src.base.types import Shape
from replicax._src.data.abstract_arrays import (
    FUNCTIONS,
    METHODS,
    AbstractArray,
    UnknownSize,
    abstract,
    abstract_array,
    broadcast,
    dtype_of,
    give_up,
    merged,
    need_value,
    one_of,
)


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Return `axis` (None, an int or a tuple) as a tuple of non-negative axes."""
    axes = range(rank) if axis is None else (axis if isinstance(axis, tuple) else (axis,))
    indices = [operator.index(each) for each in axes]
    if any(not -rank <= index < rank for index in indices):
        give_up("an axis that does not exist")
    return tuple(index % rank for index in indices)


def _reduction(function: Any) -> Callable[..., Any]:
    """Return the rule of a NumPy reduction."""

    def rule(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, *, keepdims: bool = False
    ) -> AbstractArray:
        array = abstract(a)
        if out is not None:
            give_up("out=")
        if not array.known and axis in (0, -1):
            axis = None  # NumPy treats a scalar as an array of one axis here
        reduced = _axes(axis, len(array.known))
        kwargs = {} if dtype is None else {"dtype": dtype}
        found = dtype_of(lambda one: function(one, **kwargs), np.ones(1, one_of(array).dtype))
        sizes = [
            1 if place in reduced else size
            for place, size in enumerate(array.known)
            if keepdims or place not in reduced
        ]
        return AbstractArray(tuple(sizes), found)

    return rule


def _reshape(a: Any, *shape: Any, order: str = "C") -> AbstractArray:
    array = abstract(a)
    del order
    requested = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    sizes = [_size(each) for each in requested]
    total = None if array.shape_spec is None or None in array.shape_spec else array.size
    rest = math.prod(size for size in sizes if size is not None and size >= 0)
    if sizes.count(-1) > 1 or any(size is not None and size < -1 for size in sizes):
        give_up("a shape that makes no sense")
    if -1 in sizes:
        found = None
        if total is not None and None not in sizes and rest:
            if total % rest:
                give_up("a shape that does not fit")
            found = total // rest
        sizes = [found if size == -1 else size for size in sizes]
    elif total is not None and None not in sizes and total != rest:
        give_up("a shape that does not fit")
    return AbstractArray(tuple(sizes), array.dtype)


def _size(value: Any) -> int | None:
    """Return an argument that is a size as an int, None if unknown."""
    if isinstance(value, UnknownSize):
        return None
    if isinstance(value, AbstractArray):
        if value.known or value.dtype.kind not in "iu":
            give_up("a size that is not a number")
        return None
    return operator.index(value)


def _sizes(shape: Any) -> Shape:
    """Return an argument that is a shape (a size, sequence or 1-D array) as a tuple."""
    if isinstance(shape, AbstractArray) and shape.known:
        if len(shape.known) != 1 or shape.known[0] is None:
            need_value()
        return (None,) * shape.known[0]
    if isinstance(shape, np.ndarray):
        shape = shape.tolist()
    sizes = tuple(_size(each) for each in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    if any(size is not None and size < 0 for size in sizes):
        give_up("a negative size")
    return sizes


def _allocate(shape: Any, dtype: Any = float, order: str = "C") -> AbstractArray:
    del order
    return AbstractArray(_sizes(shape), dtype)


def _full(shape: Any, fill_value: Any, dtype: Any = None) -> AbstractArray:
    found = dtype_of(np.asarray, one_of(fill_value)) if dtype is None else dtype
    return AbstractArray(_sizes(shape), found)


def _arange(*args: Any, dtype: Any = None) -> AbstractArray:
    if not 1 <= len(args) <= 3:
        give_up("np.arange with other arguments")
    found = dtype_of(lambda *ones: np.arange(*ones, dtype=dtype), *map(one_of, args))
    return AbstractArray((None,), found)


def _like(a: Any, dtype: Any = None) -> AbstractArray:
    array = abstract(a)
    return AbstractArray(array.shape_spec, array.dtype if dtype is None else dtype)


def _full_like(a: Any, fill_value: Any, dtype: Any = None) -> AbstractArray:
    del fill_value
    return _like(a, dtype)


def _astype(a: Any, dtype: Any, *, copy: bool = True) -> AbstractArray:
    del copy
    array = abstract(a)
    wanted = np.dtype(dtype)
    if wanted.kind in "OSUMmV" and wanted.name != "bfloat16":
        give_up(f"a conversion to {wanted}")
    if array.dtype == object:
        give_up("a conversion of strings")
    return AbstractArray(array.shape_spec, wanted)


def as_array(a: Any, dtype: Any = None, *, copy: Any = None) -> AbstractArray:
    """Return the result of `np.asarray`."""
    del copy
    array = abstract(abstract_array(a))
    return array if dtype is None else _astype(array, dtype)


def _same(a: Any) -> AbstractArray:
    return abstract(a)


def _clip(a: Any, a_min: Any = None, a_max: Any = None) -> AbstractArray:
    if a_min is None or a_max is None:
        give_up("np.clip with one bound")
    bounds = [a, a_min, a_max]
    shape = broadcast([abstract(each).shape_spec for each in bounds])
    return AbstractArray(shape, dtype_of(np.clip, *map(one_of, bounds)))


def _round(a: Any, decimals: int = 0) -> AbstractArray:
    array = abstract(a)
    return AbstractArray(array.shape_spec, dtype_of(lambda x: np.round(x, decimals), one_of(a)))


def _where(condition: Any, *choices: Any) -> AbstractArray:
    if len(choices) != 2:
        need_value()
    parts = [abstract_array(each) if isinstance(each, list) else each for each in choices]
    shapes = [abstract(each).shape_spec for each in (condition, *parts)]
    dtype = dtype_of(lambda x, y: np.where(True, x, y), *map(one_of, parts))
    return AbstractArray(broadcast(shapes), dtype)


def _transpose(a: Any, *axes: Any) -> AbstractArray:
    array = abstract(a)
    is_sequence = len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list)))
    permutation = axes[0] if is_sequence else axes
    if not permutation:
        return array.T
    order = [_axes(axis, len(array.known))[0] for axis in permutation]
    if sorted(order) != list(range(len(array.known))):
        give_up("axes that are not a permutation")
    return AbstractArray(tuple(array.known[place] for place in order), array.dtype)


def _swapaxes(a: Any, axis1: int, axis2: int) -> AbstractArray:
    order = list(range(len(abstract(a).known)))
    first, second = _axes((axis1, axis2), len(order))
    order[first], order[second] = order[second], order[first]
    return _transpose(a, order)


def _expand_dims(a: Any, axis: int) -> AbstractArray:
    array = abstract(a)
    (place,) = _axes(axis, len(array.known) + 1)
    return AbstractArray((*array.known[:place], 1, *array.known[place:]), array.dtype)


def _squeeze(a: Any, axis: Any = None) -> AbstractArray:
    array = abstract(a)
    if axis is None and None in array.known:
        need_value()
    ones = tuple(place for place, size in enumerate(array.known) if size == 1)
    removed = ones if axis is None else _axes(axis, len(array.known))
    if any(array.known[place] not in (1, None) for place in removed):
        give_up("an axis that is not of size 1")
    sizes = tuple(size for place, size in enumerate(array.known) if place not in removed)
    return AbstractArray(sizes, array.dtype)


def _ravel(a: Any, order: str = "C") -> AbstractArray:
    del order
    return _reshape(a, -1)


def _joined_dtype(arrays: Sequence[Any]) -> np.dtype[Any]:
    if all(array.dtype == arrays[0].dtype for array in arrays):
        return arrays[0].dtype  # type: ignore[no-any-return]
    return dtype_of(lambda *ones: np.concatenate([one[None] for one in ones]), *map(one_of, arrays))


def _stack(arrays: Any, axis: int = 0) -> AbstractArray:
    parts = [abstract(abstract_array(each)) for each in arrays]
    if not parts:
        give_up("np.stack of nothing")
    shape = merged([part.known for part in parts])
    (place,) = _axes(axis, len(shape) + 1)
    return AbstractArray((*shape[:place], len(parts), *shape[place:]), _joined_dtype(parts))


def _concatenate(arrays: Any, axis: int = 0) -> AbstractArray:
    parts = [abstract(abstract_array(each)) for each in arrays]
    if not parts or not parts[0].known or axis is None:
        give_up("np.concatenate of scalars")
    (place,) = _axes(axis, len(parts[0].known))
    if any(len(part.known) != len(parts[0].known) for part in parts):
        give_up("arrays of different rank")
    sizes = [part.known[place] for part in parts]
    rest = merged([part.known[:place] + part.known[place + 1 :] for part in parts])
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    return AbstractArray((*rest[:place], total, *rest[place:]), _joined_dtype(parts))


def _tile(a: Any, reps: Any) -> AbstractArray:
    array = abstract(abstract_array(a))
    counts = _sizes(reps)
    rank = max(len(counts), len(array.known))
    shape = (1,) * (rank - len(array.known)) + array.known
    times = (1,) * (rank - len(counts)) + counts
    sizes = [None if n is None or k is None else n * k for n, k in zip(shape, times, strict=True)]
    return AbstractArray(tuple(sizes), array.dtype)


def _repeat(a: Any, repeats: Any, axis: int | None = None) -> AbstractArray:
    array = _ravel(a) if axis is None else abstract(a)
    (place,) = _axes(axis or 0, len(array.known))
    is_number = isinstance(repeats, (int, np.integer)) and not isinstance(repeats, bool)
    size = array.known[place]
    total = size * int(repeats) if is_number and size is not None else None
    return AbstractArray((*array.known[:place], total, *array.known[place + 1 :]), array.dtype)


def _shape_preserving(function: Any) -> Callable[..., Any]:
    """Return the rule of a function along one axis that preserves the shape."""

    def rule(a: Any, axis: Any = -1) -> AbstractArray:
        array = abstract(a)
        if axis is None or not array.known:
            give_up("a function along no axis")
        _axes(axis, len(array.known))
        return AbstractArray(array.shape_spec, dtype_of(function, np.ones(1, one_of(array).dtype)))

    return rule


def _cumulative(function: Any) -> Callable[..., Any]:
    along = _shape_preserving(function)

    def rule(a: Any, axis: Any = None) -> AbstractArray:
        result: AbstractArray = along(_ravel(a) if axis is None else a, axis or 0)
        return result

    return rule


def _flip(a: Any, axis: Any = None) -> AbstractArray:
    _axes(axis, len(abstract(a).known))
    return abstract(a)


def _shape(a: Any) -> Any:
    return abstract(abstract_array(a)).shape


def _ndim(a: Any) -> int:
    return abstract(abstract_array(a)).ndim


_REDUCTIONS = ("sum", "mean", "prod", "max", "min", "any", "all", "std", "var", "argmax", "argmin")
FUNCTIONS.update(
    {
        **{name: _reduction(getattr(np, name)) for name in _REDUCTIONS},
        "amax": _reduction(np.max),
        "amin": _reduction(np.min),
        "reshape": _reshape,
        "zeros": _allocate,
        "ones": _allocate,
        "empty": _allocate,
        "full": _full,
        "arange": _arange,
        "zeros_like": _like,
        "ones_like": _like,
        "empty_like": _like,
        "full_like": _full_like,
        "asarray": as_array,
        "array": as_array,
        "ascontiguousarray": as_array,
        "copy": _same,
        "clip": _clip,
        "round": _round,
        "around": _round,
        "where": _where,
        "transpose": _transpose,
        "swapaxes": _swapaxes,
        "expand_dims": _expand_dims,
        "squeeze": _squeeze,
        "ravel": _ravel,
        "stack": _stack,
        "concatenate": _concatenate,
        "tile": _tile,
        "repeat": _repeat,
        "sort": _shape_preserving(np.sort),
        "cumsum": _cumulative(np.cumsum),
        "cumprod": _cumulative(np.cumprod),
        "flip": _flip,
        "shape": _shape,
        "ndim": _ndim,
    }
)
# Functions whose result shape depends on the data, or that return Python values.
_VALUE_DEPENDENT = (
    "unique",
    "nonzero",
    "flatnonzero",
    "argwhere",
    "extract",
    "compress",
    "trim_zeros",
    "union1d",
    "intersect1d",
    "setdiff1d",
    "bincount",
    "delete",
    "item",
    "tolist",
    "tobytes",
    "array_equal",
    "allclose",
    "isscalar",
    "linspace",
    "eye",
)
FUNCTIONS.update(dict.fromkeys(_VALUE_DEPENDENT, need_value))
METHODS.update(
    {
        name: FUNCTIONS[name]
        for name in (
            *_REDUCTIONS,
            "reshape",
            "copy",
            "clip",
            "round",
            "transpose",
            "swapaxes",
            "squeeze",
            "ravel",
            "repeat",
            "cumsum",
            "cumprod",
            "nonzero",
            "compress",
            "item",
            "tolist",
            "tobytes",
        )
    }
    | {"astype": _astype, "flatten": _ravel}
)


def has_rule(function: Any) -> bool:
    """Whether a NumPy function has a rule."""
    return function.__name__ in FUNCTIONS
