"""Abstract arrays: a shape and a dtype without data, for tracing user functions.

NumPy's operators and functions accept them through `__array_ufunc__` and `__array_function__`.
Result shapes come from shape rules, result dtypes from calling the same NumPy function on scalars.
An operation that needs the data raises `ValueNeededError`, and one without a rule raises
`UntraceableError`: a spec is never guessed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np

from replicax._src.base.types import Shape, TensorSpec

_MOST_ROWS = 1024  # longest array that a traced function may iterate over


class UntraceableError(Exception):
    """Raised when the traced function performs an operation without a shape rule."""


class ValueNeededError(UntraceableError):
    """Raised when the traced function needs concrete data, as ``int(x)`` and ``if x > 0`` do."""


class Trace:
    """Flags of one trace, set on failure even if the user's function catches the exception."""

    def __init__(self) -> None:
        self.needs_value = False
        self.is_untraceable = False


trace: ContextVar[Trace | None] = ContextVar("replicax_trace", default=None)


def need_value(*_: Any, **__: Any) -> NoReturn:
    """Raise `ValueNeededError` and mark the current trace as dependent on concrete data."""
    if (current := trace.get()) is not None:
        current.needs_value = True
    raise ValueNeededError("the function needs the value of an element")


def give_up(reason: str) -> NoReturn:
    """Raise `UntraceableError` with `reason` and mark the current trace as untraceable."""
    if (current := trace.get()) is not None:
        current.is_untraceable = True
    raise UntraceableError(reason)


class UnknownSize:
    """A Python int whose value is unknown until an element is produced."""

    def _arithmetic(self, other: Any) -> "UnknownSize":
        return UNKNOWN if isinstance(other, (int, np.integer, UnknownSize)) else NotImplemented

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __floordiv__ = __mod__ = _arithmetic
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = need_value
    __bool__ = __int__ = __float__ = __index__ = __hash__ = need_value
    __str__ = __repr__ = __format__ = __array__ = need_value


UNKNOWN = UnknownSize()

# Shape rules for NumPy functions and for array methods, by name. `numpy_rules` registers them.
FUNCTIONS: dict[str, Callable[..., Any]] = {}
METHODS: dict[str, Callable[..., Any]] = {}


def _operator(ufunc: Any, *, is_swapped: bool = False) -> Callable[..., Any]:
    """Return an operator method that applies `ufunc`, with operands swapped if `is_swapped`."""

    def operate(self: Any, *others: Any) -> Any:
        operands = (*others, self) if is_swapped else (self, *others)
        return elementwise(ufunc, operands)

    return operate


def _in_place(ufunc: Any) -> Callable[..., Any]:
    """Return an augmented-assignment method that applies `ufunc`."""

    def operate(self: Any, other: Any) -> Any:
        result = elementwise(ufunc, (self, other))
        if self.shape_spec is None or result.shape_spec != self.shape_spec:
            give_up("an in-place operation that may change the shape")
        # `a += b` keeps the dtype of an array but may change that of a NumPy scalar.
        if not self.shape_spec and result.dtype != self.dtype:
            give_up("an in-place operation that may change the dtype")
        return AbstractArray(self.shape_spec, self.dtype)

    return operate


class AbstractArray:
    """An array of known spec and unknown data.

    Args:
        shape: Dimension sizes, None for each unknown one; None if the rank is unknown.
        dtype: The dtype.
    """

    __slots__ = ("dtype", "shape_spec")
    __array_priority__ = 1000

    def __init__(self, shape: Shape | None, dtype: Any) -> None:
        self.shape_spec = None if shape is None else tuple(shape)
        self.dtype = np.dtype(dtype)

    @property
    def known(self) -> Shape:
        """The shape, whose rank must be known; raises `ValueNeededError` otherwise."""
        return need_value() if self.shape_spec is None else self.shape_spec

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape as user code sees it: `UNKNOWN` for each unknown size."""
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
        """The transpose."""
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
        # Item assignment keeps shape and dtype; NumPy scalars and bytes do not support it.
        if not self.known or self.dtype == object:
            give_up("an assignment to a part of a scalar")

    __add__, __radd__ = _operator(np.add), _operator(np.add, is_swapped=True)
    __sub__, __rsub__ = _operator(np.subtract), _operator(np.subtract, is_swapped=True)
    __mul__, __rmul__ = _operator(np.multiply), _operator(np.multiply, is_swapped=True)
    __truediv__, __rtruediv__ = (
        _operator(np.true_divide),
        _operator(np.true_divide, is_swapped=True),
    )
    __floordiv__, __rfloordiv__ = (
        _operator(np.floor_divide),
        _operator(np.floor_divide, is_swapped=True),
    )
    __mod__, __rmod__ = _operator(np.remainder), _operator(np.remainder, is_swapped=True)
    __pow__, __rpow__ = _operator(np.power), _operator(np.power, is_swapped=True)
    __and__, __rand__ = _operator(np.bitwise_and), _operator(np.bitwise_and, is_swapped=True)
    __or__, __ror__ = _operator(np.bitwise_or), _operator(np.bitwise_or, is_swapped=True)
    __xor__, __rxor__ = _operator(np.bitwise_xor), _operator(np.bitwise_xor, is_swapped=True)
    __lshift__, __rshift__ = _operator(np.left_shift), _operator(np.right_shift)
    __matmul__, __rmatmul__ = _operator(np.matmul), _operator(np.matmul, is_swapped=True)
    __neg__, __pos__, __abs__ = (
        _operator(np.negative),
        _operator(np.positive),
        _operator(np.absolute),
    )
    __invert__ = _operator(np.invert)
    __lt__, __le__, __gt__, __ge__ = (
        _operator(np.less),
        _operator(np.less_equal),
        _operator(np.greater),
        _operator(np.greater_equal),
    )
    __eq__, __ne__ = _operator(np.equal), _operator(np.not_equal)
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
    """Return `value` (abstract array, number, array or sequence) as an abstract array."""
    if isinstance(value, (list, tuple)):
        value = abstract_array(value)
    if isinstance(value, AbstractArray):
        return value
    array = np.asarray(sample(value))
    return AbstractArray(array.shape, array.dtype)


def sample(value: Any) -> Any:
    """Return a concrete stand-in for `value`: a one of its dtype, or `value` if concrete."""
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
    """Return the abstract result of `ufunc`: broadcast shape, dtype from a call on scalars."""
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
    """Return the broadcast of `shapes`, where an unknown size may be 1; None if a rank is unknown.

    Raises:
        UntraceableError: If known sizes do not broadcast.
    """
    if any(shape is None for shape in shapes):
        return None
    known_shapes = [shape for shape in shapes if shape is not None]
    rank = max(map(len, known_shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in known_shapes]
    result: list[int | None] = []
    for sizes in zip(*padded, strict=True):
        known = {size for size in sizes if size not in (None, 1)}
        if len(known) > 1:
            give_up(f"shapes {shapes} that do not broadcast")
        result.append(known.pop() if known else (None if None in sizes else 1))
    return tuple(result)


def indexed(array: AbstractArray, key: Any) -> AbstractArray:
    """Return the abstract result of ``array[key]``."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if len(keys) == 1 and (selected := _advanced_index(array, keys[0])) is not None:
        return selected
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
                _check_index(each, array.known[axis])
            axis += 1
    return AbstractArray(tuple(sizes), array.dtype)


def _advanced_index(array: AbstractArray, key: Any) -> AbstractArray | None:
    """Return ``array[key]`` for a boolean mask or an index array; None for other keys."""
    if isinstance(key, (list, np.ndarray)):
        key = abstract_array(key)
    if not isinstance(key, AbstractArray) or (not key.known and key.dtype.kind in "iu"):
        return None
    if key.dtype == np.bool_ and len(key.known) <= len(array.known):
        return AbstractArray((None, *array.known[len(key.known) :]), array.dtype)
    if key.dtype.kind not in "iu" or not array.known:
        give_up("an index that is neither a number nor a mask")
    return AbstractArray(key.known + array.known[1:], array.dtype)


def _check_index(index: Any, size: int | None) -> None:
    if isinstance(index, AbstractArray) and not index.known and index.dtype.kind in "iu":
        return
    if isinstance(index, UnknownSize):
        return
    if not isinstance(index, (int, np.integer)) or isinstance(index, bool):
        give_up("an index that is not a number")
    if size is not None and not -size <= index < size:
        give_up("an index out of bounds")


def _sliced(size: int | None, part: slice) -> int | None:
    """Return the size of an axis of `size` after slicing, None if unknown."""
    ends = (part.start, part.stop, part.step)
    if all(end is None for end in ends):
        return size
    if any(isinstance(end, (AbstractArray, UnknownSize)) for end in ends):
        return None
    return None if size is None else len(range(size)[part])


def abstract_array(value: Any) -> Any:
    """Return `np.asarray(value)`, abstract if `value` is a sequence with abstract items."""
    if isinstance(value, (AbstractArray, np.ndarray)):
        return value
    if not isinstance(value, (list, tuple)):
        return np.asarray(sample(value))
    parts = [abstract_array(part) if isinstance(part, (list, tuple)) else part for part in value]
    if not any(isinstance(part, (AbstractArray, UnknownSize)) for part in parts):
        return np.asarray(value)
    # NumPy rejects items of different sizes, so a size known for one item holds for all.
    shape = merged([abstract(part).known for part in parts])
    dtype = dtype_of(lambda *ones: np.array(ones), *map(one_of, parts))
    return AbstractArray((len(parts), *shape), dtype)


def one_of(value: Any) -> Any:
    """Return a scalar of the dtype of `value`; Python numbers are returned unchanged."""
    concrete = sample(value)
    return np.ones((), concrete.dtype)[()] if isinstance(concrete, np.ndarray) else concrete


def dtype_of(function: Callable[..., Any], *ones: Any) -> np.dtype[Any]:
    """Return the dtype of `function(*ones)`."""
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
    """Return the shape common to all of `shapes`, None for each size unknown in all.

    Raises:
        UntraceableError: If ranks or known sizes differ.
    """
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
    """Apply the shape rule of a NumPy function; raise `UntraceableError` if there is none."""
    name = getattr(function, "__name__", "")
    if getattr(np, name, None) is not function or name not in FUNCTIONS:
        give_up(f"the function {name}")
    return FUNCTIONS[name](*args, **kwargs)


def is_abstract(value: Any) -> bool:
    """Whether `value` is abstract or contains an abstract value."""
    if isinstance(value, (tuple, list)):
        return any(map(is_abstract, value))
    if isinstance(value, dict):
        return any(map(is_abstract, value.values()))
    if isinstance(value, slice):
        return any(map(is_abstract, (value.start, value.stop, value.step)))
    return isinstance(value, (AbstractArray, UnknownSize))


def spec_of(value: AbstractArray) -> TensorSpec:
    """Return the spec of an abstract array."""
    return TensorSpec(value.shape_spec, value.dtype)
