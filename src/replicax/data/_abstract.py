"""Abstract arrays: values with a shape and a dtype and no numbers, for tracing user functions.

NumPy's operators and functions work on them as on arrays, by rules for shapes; dtypes come from
calling the same NumPy function on a single number. An operation that needs the numbers raises
`ValueNeededError`, and one without a rule raises `UntraceableError`: a spec is never guessed.
"""

import math
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

# Rules for NumPy's functions and for methods of arrays, by name; `_rules` adds them.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
METHODS: dict[str, Callable[..., Any]] = {}


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
        sizes = [size for size in self.known if size is not None]
        return UNKNOWN if None in self.known else math.prod(sizes)

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
    return AbstractArray(broadcast(shapes), dtype_of(ufunc, *map(one_of, operands)))


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
    shape = merged([abstract(part).known for part in parts])
    dtype = dtype_of(lambda *ones: np.array(ones), *map(one_of, parts))
    return AbstractArray((len(parts), *shape), dtype)


def one_of(value: Any) -> Any:
    """One number of an operand's dtype; Python numbers stay what they are."""
    found = sample(value)
    return np.ones((), found.dtype)[()] if isinstance(found, np.ndarray) else found


def dtype_of(function: Callable[..., Any], *ones: Any) -> np.dtype[Any]:
    with np.errstate(all="ignore"):
        result: np.ndarray[Any, np.dtype[Any]] = np.asarray(function(*ones))
    return result.dtype


def _matmul(left: AbstractArray, right: AbstractArray) -> AbstractArray:
    dtype = dtype_of(np.multiply, one_of(left), one_of(right))
    if dtype == np.bool_ or not 1 <= len(left.known) <= 2 or not 1 <= len(right.known) <= 2:
        give_up("a product of more than two axes")
    inner = {left.known[-1], right.known[0]} - {None}
    if len(inner) > 1:
        give_up("a product of shapes that do not fit")
    return AbstractArray(left.known[:-1] + right.known[1:], dtype)


def merged(shapes: Sequence[Shape]) -> Shape:
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
