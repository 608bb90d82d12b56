"""Abstract arrays: values with a shape and a dtype and no numbers, for tracing user functions.

NumPy's operators and functions work on them as on arrays, by rules for shapes; dtypes come from
calling the same NumPy function on a single number. An operation that needs the numbers raises
`ValueNeededError`, and one without a rule raises `UntraceableError`: a spec is never guessed.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np

from replicax._types import Shape, TensorSpec

_MOST_ROWS = 1024  # of an array that a function iterates over


class UntraceableError(Exception):
    """The function does something that has no rule here."""


class ValueNeededError(UntraceableError):
    """The function looks at the numbers of an element, as ``int(x)`` and ``if x > 0`` do."""


class Trace:
    """The failures of one trace, which a ``try`` in the user's function cannot hide."""

    def __init__(self) -> None:
        self.needs_value = False
        self.is_untraceable = False


trace: ContextVar[Trace | None] = ContextVar("replicax_trace", default=None)


def need_value(*_: Any, **__: Any) -> NoReturn:
    """Give up, as the numbers of an element decide."""
    if (current := trace.get()) is not None:
        current.needs_value = True
    raise ValueNeededError("the function needs the value of an element")


def give_up(reason: str) -> NoReturn:
    """Give up, as there is no rule for an operation."""
    if (current := trace.get()) is not None:
        current.is_untraceable = True
    raise UntraceableError(reason)


class UnknownSize:
    """A size or a number that only the element shows; stands for a Python int."""

    def _arithmetic(self, other: Any) -> "UnknownSize":
        return UNKNOWN if isinstance(other, (int, np.integer, UnknownSize)) else NotImplemented

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __floordiv__ = __mod__ = _arithmetic
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = need_value
    __bool__ = __int__ = __float__ = __index__ = __hash__ = need_value
    __str__ = __repr__ = __format__ = __array__ = need_value


UNKNOWN = UnknownSize()


def _by(ufunc: Any, *, is_swapped: bool = False) -> Callable[..., Any]:
    def operate(self: Any, *others: Any) -> Any:
        given = (*others, self) if is_swapped else (self, *others)
        return elementwise(ufunc, given)

    return operate


def _in_place(ufunc: Any) -> Callable[..., Any]:
    def operate(self: Any, other: Any) -> Any:
        result = elementwise(ufunc, (self, other))
        if self.shape_spec is None or result.shape_spec != self.shape_spec:
            give_up("an in-place operation that may change the shape")
        # An array keeps its dtype here, and a NumPy scalar does not.
        if not self.shape_spec and result.dtype != self.dtype:
            give_up("an in-place operation that may change the dtype")
        return AbstractArray(self.shape_spec, self.dtype)

    return operate


class AbstractArray:
    """An array of which only a spec is known.

    Args:
        shape: Sizes, None where not known; None if the rank is not known.
        dtype: The dtype.
    """

    __slots__ = ("dtype", "shape_spec")
    __array_priority__ = 1000

    def __init__(self, shape: Shape | None, dtype: Any) -> None:
        self.shape_spec = None if shape is None else tuple(shape)
        self.dtype = np.dtype(dtype)

    @property
    def known(self) -> Shape:
        """The shape, of which at least the rank must be known."""
        return need_value() if self.shape_spec is None else self.shape_spec

    @property
    def shape(self) -> tuple[Any, ...]:
        """Sizes as a function sees them."""
        return tuple(UNKNOWN if size is None else size for size in self.known)

    @property
    def ndim(self) -> int:
        """The rank."""
        return len(self.known)

    @property
    def size(self) -> Any:
        """The number of entries."""
        return UNKNOWN if None in self.known else math.prod(self.known)

    @property
    def T(self) -> "AbstractArray":  # noqa: N802 - NumPy's name
        """The axes in reverse."""
        return AbstractArray(self.known[::-1], self.dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__" or kwargs:
            give_up(f"np.{ufunc.__name__} with {method} and {list(kwargs)}")
        return elementwise(ufunc, inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            rule = METHODS[name]
            return lambda *args, **kwargs: rule(self, *args, **kwargs)
        return give_up(f"the attribute {name} of an array")

    def __getitem__(self, key: Any) -> "AbstractArray":
        return indexed(self, key)

    def __iter__(self) -> Iterator["AbstractArray"]:
        size = len(self)
        if size > _MOST_ROWS:
            give_up("a loop over a long array")
        return iter([AbstractArray(self.known[1:], self.dtype)] * size)

    def __len__(self) -> int:
        if not self.known:
            raise TypeError("len() of unsized object")
        size = self.known[0]
        return need_value() if size is None else size

    def __setitem__(self, key: Any, value: Any) -> None:
        # Neither shape nor dtype of an array change; a NumPy scalar or bytes would refuse.
        if not self.known or self.dtype == object:
            give_up("an assignment to a part of a scalar")

    __add__, __radd__ = _by(np.add), _by(np.add, is_swapped=True)
    __sub__, __rsub__ = _by(np.subtract), _by(np.subtract, is_swapped=True)
    __mul__, __rmul__ = _by(np.multiply), _by(np.multiply, is_swapped=True)
    __truediv__, __rtruediv__ = _by(np.true_divide), _by(np.true_divide, is_swapped=True)
    __floordiv__, __rfloordiv__ = _by(np.floor_divide), _by(np.floor_divide, is_swapped=True)
    __mod__, __rmod__ = _by(np.remainder), _by(np.remainder, is_swapped=True)
    __pow__, __rpow__ = _by(np.power), _by(np.power, is_swapped=True)
    __and__, __rand__ = _by(np.bitwise_and), _by(np.bitwise_and, is_swapped=True)
    __or__, __ror__ = _by(np.bitwise_or), _by(np.bitwise_or, is_swapped=True)
    __xor__, __rxor__ = _by(np.bitwise_xor), _by(np.bitwise_xor, is_swapped=True)
    __lshift__, __rshift__ = _by(np.left_shift), _by(np.right_shift)
    __matmul__, __rmatmul__ = _by(np.matmul), _by(np.matmul, is_swapped=True)
    __neg__, __pos__, __abs__ = _by(np.negative), _by(np.positive), _by(np.absolute)
    __invert__ = _by(np.invert)
    __lt__, __le__, __gt__, __ge__ = (
        _by(np.less),
        _by(np.less_equal),
        _by(np.greater),
        _by(np.greater_equal),
    )
    __eq__, __ne__ = _by(np.equal), _by(np.not_equal)
    __iadd__, __isub__, __imul__ = (
        _in_place(np.add),
        _in_place(np.subtract),
        _in_place(np.multiply),
    )
    __itruediv__, __ifloordiv__ = _in_place(np.true_divide), _in_place(np.floor_divide)
    __imod__, __ipow__ = _in_place(np.remainder), _in_place(np.power)
    __iand__, __ior__, __ixor__ = (
        _in_place(np.bitwise_and),
        _in_place(np.bitwise_or),
        _in_place(np.bitwise_xor),
    )
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __hash__ = need_value
    __str__ = __repr__ = __format__ = __array__ = __contains__ = __round__ = need_value


def abstract(value: Any) -> AbstractArray:
    """An abstract array for an operand: one already, a number, or an array."""
    if isinstance(value, (list, tuple)):
        value = abstract_array(value)
    if isinstance(value, AbstractArray):
        return value
    array = np.asarray(sample(value))
    return AbstractArray(array.shape, array.dtype)


def sample(value: Any) -> Any:
    """One number of the dtype of an operand, or the operand itself where it is known."""
    if isinstance(value, UnknownSize):
        return 1
    if isinstance(value, AbstractArray):
        if value.dtype == object:
            give_up("an operation on strings")
        return np.ones((), value.dtype)[()]
    if isinstance(value, (bool, int, float, complex, np.generic, np.ndarray)):
        return value
    if isinstance(value, (list, tuple)):
        return abstract_array(value)
    return give_up(f"an operand of type {type(value).__name__}")


def elementwise(ufunc: Any, inputs: Sequence[Any]) -> AbstractArray:
    """The result of a ufunc: shapes broadcast, and the dtype is that of a call on one number."""
    operands = [
        abstract_array(each) if isinstance(each, (list, tuple)) else each for each in inputs
    ]
    if ufunc is np.matmul:
        return _matmul(*(abstract(each) for each in operands))
    if ufunc is np.power and getattr(operands[0], "dtype", None) == np.bool_:
        give_up("a power of bools, whose dtype depends on the operator")
    if ufunc.signature is not None or ufunc.nout != 1 or len(operands) != ufunc.nin:
        give_up(f"np.{ufunc.__name__}")
    shapes = [
        each.shape_spec if isinstance(each, AbstractArray) else np.shape(sample(each))
        for each in operands
    ]
    return AbstractArray(broadcast(shapes), _dtype_of(ufunc, *map(_one, operands)))


def broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape that all are broadcast to; a size that is not known may be 1."""
    if any(shape is None for shape in shapes):
        return None
    given = [shape for shape in shapes if shape is not None]
    rank = max(map(len, given), default=0)
    filled = [(1,) * (rank - len(shape)) + shape for shape in given]
    result: list[int | None] = []
    for sizes in zip(*filled, strict=True):
        known = {size for size in sizes if size not in (None, 1)}
        if len(known) > 1:
            give_up(f"shapes {shapes} that do not broadcast")
        result.append(known.pop() if known else (None if None in sizes else 1))
    return tuple(result)


def indexed(array: AbstractArray, key: Any) -> AbstractArray:
    """``array[key]``."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if len(keys) == 1 and (table := _as_table(array, keys[0])) is not None:
        return table
    used = sum(each is not None and each is not Ellipsis for each in keys)
    rank = len(array.known)
    if used > rank:
        give_up("too many indices")
    if Ellipsis not in [each for each in keys if each is Ellipsis]:
        keys.append(Ellipsis)
    sizes: list[int | None] = []
    axis = 0
    for each in keys:
        if each is None:
            sizes.append(1)
        elif each is Ellipsis:
            sizes.extend(array.known[axis : axis + rank - used])
            axis += rank - used
        else:
            if isinstance(each, slice):
                sizes.append(_sliced(array.known[axis], each))
            else:
                _check_place(each, array.known[axis])
            axis += 1
    return AbstractArray(tuple(sizes), array.dtype)


def _as_table(array: AbstractArray, key: Any) -> AbstractArray | None:
    """The result for a mask, or for an array of places; None for other keys."""
    if isinstance(key, (list, np.ndarray)):
        key = abstract_array(key)
    if not isinstance(key, AbstractArray) or (not key.known and key.dtype.kind in "iu"):
        return None
    if key.dtype == np.bool_ and len(key.known) <= len(array.known):
        return AbstractArray((None, *array.known[len(key.known) :]), array.dtype)
    if key.dtype.kind not in "iu" or not array.known:
        give_up("an index that is neither a number nor a mask")
    return AbstractArray(key.known + array.known[1:], array.dtype)


def _check_place(place: Any, size: int | None) -> None:
    if isinstance(place, AbstractArray) and not place.known and place.dtype.kind in "iu":
        return
    if isinstance(place, UnknownSize):
        return
    if not isinstance(place, (int, np.integer)) or isinstance(place, bool):
        give_up("an index that is no number")
    if size is not None and not -size <= place < size:
        give_up("an index out of bounds")


def _sliced(size: int | None, part: slice) -> int | None:
    ends = (part.start, part.stop, part.step)
    if all(end is None for end in ends):
        return size
    if any(isinstance(end, (AbstractArray, UnknownSize)) for end in ends):
        return None
    return None if size is None else len(range(size)[part])


def abstract_array(value: Any) -> Any:
    """A list, as `np.asarray` takes it: parts of one shape become rows."""
    if isinstance(value, (AbstractArray, np.ndarray)):
        return value
    if not isinstance(value, (list, tuple)):
        return np.asarray(sample(value))
    parts = [abstract_array(part) if isinstance(part, (list, tuple)) else part for part in value]
    if not any(isinstance(part, (AbstractArray, UnknownSize)) for part in parts):
        return np.asarray(value)
    # Parts of different sizes are an error, so that one that is known holds for all.
    shape = _merged([abstract(part).known for part in parts])
    dtype = _dtype_of(lambda *ones: np.array(ones), *map(_one, parts))
    return AbstractArray((len(parts), *shape), dtype)


def _one(value: Any) -> Any:
    """One number of an operand's dtype; Python numbers stay what they are."""
    found = sample(value)
    return np.ones((), found.dtype)[()] if isinstance(found, np.ndarray) else found


def _dtype_of(function: Callable[..., Any], *ones: Any) -> np.dtype[Any]:
    with np.errstate(all="ignore"):
        return np.asarray(function(*ones)).dtype


# Rules for NumPy's functions, by name. Each takes the arguments of the function.


def _matmul(left: AbstractArray, right: AbstractArray) -> AbstractArray:
    dtype = _dtype_of(np.multiply, _one(left), _one(right))
    if dtype == np.bool_ or not 1 <= len(left.known) <= 2 or not 1 <= len(right.known) <= 2:
        give_up("a product of more than two axes")
    inner = {left.known[-1], right.known[0]} - {None}
    if len(inner) > 1:
        give_up("a product of shapes that do not fit")
    return AbstractArray(left.known[:-1] + right.known[1:], dtype)


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    given = range(rank) if axis is None else (axis if isinstance(axis, tuple) else (axis,))
    places = [operator.index(each) for each in given]
    if any(not -rank <= place < rank for place in places):
        give_up("an axis that does not exist")
    return tuple(place % rank for place in places)


def _reduction(function: Any) -> Callable[..., Any]:
    def rule(
        a: Any, axis: Any = None, dtype: Any = None, out: Any = None, *, keepdims: bool = False
    ) -> AbstractArray:
        array = abstract(a)
        if out is not None:
            give_up("out=")
        gone = _axes(axis, len(array.known))
        named = {} if dtype is None else {"dtype": dtype}
        found = _dtype_of(lambda one: function(one, **named), np.ones(1, _one(array).dtype))
        kept = [
            1 if place in gone else size
            for place, size in enumerate(array.known)
            if keepdims or place not in gone
        ]
        return AbstractArray(tuple(kept), found)

    return rule


def _reshape(a: Any, *shape: Any, order: str = "C") -> AbstractArray:
    array = abstract(a)
    del order
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    sizes = [_size(each) for each in given]
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
    if isinstance(value, UnknownSize):
        return None
    if isinstance(value, AbstractArray):
        if value.known or value.dtype.kind not in "iu":
            give_up("a size that is no number")
        return None
    return operator.index(value)


def _sizes(shape: Any) -> Shape:
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


def _filled(shape: Any, dtype: Any = float, order: str = "C") -> AbstractArray:
    del order
    return AbstractArray(_sizes(shape), dtype)


def _full(shape: Any, fill_value: Any, dtype: Any = None) -> AbstractArray:
    found = _dtype_of(np.asarray, _one(fill_value)) if dtype is None else dtype
    return AbstractArray(_sizes(shape), found)


def _arange(*args: Any, dtype: Any = None) -> AbstractArray:
    if not 1 <= len(args) <= 3:
        give_up("np.arange with other arguments")
    found = _dtype_of(lambda *ones: np.arange(*ones, dtype=dtype), *map(_one, args))
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


def _asarray(a: Any, dtype: Any = None, *, copy: Any = None) -> AbstractArray:
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
    return AbstractArray(shape, _dtype_of(np.clip, *map(_one, bounds)))


def _round(a: Any, decimals: int = 0) -> AbstractArray:
    array = abstract(a)
    return AbstractArray(array.shape_spec, _dtype_of(lambda x: np.round(x, decimals), _one(a)))


def _where(condition: Any, *choices: Any) -> AbstractArray:
    if len(choices) != 2:
        need_value()
    parts = [abstract_array(each) if isinstance(each, list) else each for each in choices]
    shapes = [abstract(each).shape_spec for each in (condition, *parts)]
    dtype = _dtype_of(lambda x, y: np.where(True, x, y), *map(_one, parts))
    return AbstractArray(broadcast(shapes), dtype)


def _transpose(a: Any, *axes: Any) -> AbstractArray:
    array = abstract(a)
    is_whole = len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list)))
    given = axes[0] if is_whole else axes
    if not given:
        return array.T
    order = [_axes(axis, len(array.known))[0] for axis in given]
    if sorted(order) != list(range(len(array.known))):
        give_up("axes that are no permutation")
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
    gone = ones if axis is None else _axes(axis, len(array.known))
    if any(array.known[place] not in (1, None) for place in gone):
        give_up("an axis that is not of size 1")
    kept = tuple(size for place, size in enumerate(array.known) if place not in gone)
    return AbstractArray(kept, array.dtype)


def _ravel(a: Any, order: str = "C") -> AbstractArray:
    del order
    return _reshape(a, -1)


def _merged(shapes: Sequence[Shape]) -> Shape:
    """The sizes that arrays to be put side by side share."""
    if len({len(shape) for shape in shapes}) != 1:
        give_up("arrays of different rank")
    merged: list[int | None] = []
    for sizes in zip(*shapes, strict=True):
        known = set(sizes) - {None}
        if len(known) > 1:
            give_up("arrays of different sizes")
        merged.append(known.pop() if known else None)
    return tuple(merged)


def _joined_dtype(arrays: Sequence[Any]) -> np.dtype[Any]:
    if all(array.dtype == arrays[0].dtype for array in arrays):
        return arrays[0].dtype  # type: ignore[no-any-return]
    return _dtype_of(lambda *ones: np.concatenate([one[None] for one in ones]), *map(_one, arrays))


def _stack(arrays: Any, axis: int = 0) -> AbstractArray:
    parts = [abstract(abstract_array(each)) for each in arrays]
    if not parts:
        give_up("np.stack of nothing")
    shape = _merged([part.known for part in parts])
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
    rest = _merged([part.known[:place] + part.known[place + 1 :] for part in parts])
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


def _shaped_alike(function: Any) -> Callable[..., Any]:
    """A rule for functions along one axis, which keep the shape of an array."""

    def rule(a: Any, axis: Any = -1) -> AbstractArray:
        array = abstract(a)
        if axis is None or not array.known:
            give_up("a function along no axis")
        _axes(axis, len(array.known))
        return AbstractArray(array.shape_spec, _dtype_of(function, np.ones(1, _one(array).dtype)))

    return rule


def _cumulative(function: Any) -> Callable[..., Any]:
    along = _shaped_alike(function)

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
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _reduction(getattr(np, name)) for name in _REDUCTIONS},
    "amax": _reduction(np.max),
    "amin": _reduction(np.min),
    "reshape": _reshape,
    "zeros": _filled,
    "ones": _filled,
    "empty": _filled,
    "full": _full,
    "arange": _arange,
    "zeros_like": _like,
    "ones_like": _like,
    "empty_like": _like,
    "full_like": _full_like,
    "asarray": _asarray,
    "array": _asarray,
    "ascontiguousarray": _asarray,
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
    "sort": _shaped_alike(np.sort),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "flip": _flip,
    "shape": _shape,
    "ndim": _ndim,
}
# Functions whose results have a size that the numbers decide.
_OF_VALUES = (
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
FUNCTIONS |= dict.fromkeys(_OF_VALUES, need_value)
METHODS: dict[str, Callable[..., Any]] = {
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
} | {"astype": _astype, "flatten": _ravel}


def call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A NumPy function of abstract arrays."""
    name = getattr(function, "__name__", "")
    if getattr(np, name, None) is not function or name not in FUNCTIONS:
        give_up(f"the function {name}")
    return FUNCTIONS[name](*args, **kwargs)


def is_abstract(value: Any) -> bool:
    """Whether a value, or a part of it, is abstract."""
    if isinstance(value, (tuple, list)):
        return any(map(is_abstract, value))
    if isinstance(value, dict):
        return any(map(is_abstract, value.values()))
    if isinstance(value, slice):
        return any(map(is_abstract, (value.start, value.stop, value.step)))
    return isinstance(value, (AbstractArray, UnknownSize))


def spec_of(value: AbstractArray) -> TensorSpec:
    """The spec of an abstract array."""
    return TensorSpec(value.shape_spec, value.dtype)
