"""TensorFlow-named wrappers over `jax.numpy`, and operator overloading for array-like objects."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from replicax._src.base.errors import warn_user

Tensor = jax.Array

# The numeric leaves of a dataset's elements, all of which become a `jax.Array` on a device. Lists
# are missing because they are one array in some places and several in others.
Numbers = jax.Array | npt.NDArray[np.number[Any] | np.bool] | np.number[Any] | np.bool | complex


class _ArrayLike(Protocol):
    def __array__(self) -> Any: ...


class _JaxArrayLike(Protocol):
    def __jax_array__(self) -> Any: ...


# The values that a variable takes; text is not among them.
Assignable = (
    jax.Array
    | npt.NDArray[Any]
    | np.generic
    | complex
    | list[Any]
    | tuple[Any, ...]
    | _ArrayLike
    | _JaxArrayLike
)

if TYPE_CHECKING:  # at run time, Python 3.11 has no defaults of type variables
    from typing_extensions import TypeVar as TypeVarWithDefault

    T_co = TypeVarWithDefault("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)


class StandIn:
    """Base class of values of several replicas, which JAX accepts as arrays.

    replicax must check for this class before it treats a value as one array.
    """

    __slots__ = ()


class NamedFields(Protocol):
    """A named tuple; mapping over its fields returns the same class."""

    def _asdict(self) -> dict[str, Any]: ...


def canonical_dtype(dtype: Any) -> Any:
    """Return the dtype that JAX uses for ``dtype``; warn if it is narrower.

    JAX would warn too, but name a line of replicax instead of the user's.
    """
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    asked, kept = jnp.dtype(dtype), jax.dtypes.canonicalize_dtype(dtype)
    if asked != kept:
        text = (
            f"dtype {asked.name} was asked for, and {kept.name} is what you get: JAX keeps 32 bits"
            f" unless x64 is enabled. Write dtype={kept.name!r}, or call"
            ' `jax.config.update("jax_enable_x64", True)` before anything else.'
        )
        warn_user(text)
    return kept


def default_dtype(dtype: Any) -> Any:
    """Return the dtype that JAX uses in place of a default of TensorFlow, without a warning."""
    return jax.dtypes.canonicalize_dtype(dtype)


def constant(
    value: Any, dtype: Any = None, shape: Any = None, name: str | None = "Const"
) -> jax.Array:
    """Return an array of ``value``, reshaped or broadcast to ``shape`` if one is given.

    Texts become a NumPy array of bytes, which stays on the host.

    Example:
        >>> rx.constant([1.0, 2.0])
        Array([1., 2.], dtype=float32)
        >>> rx.constant(["a", "b"])
        array([b'a', b'b'], dtype=object)
    """
    array: Any
    if _is_of_texts(value):
        array = np.array(value, object)
        encoded = [x.encode() if isinstance(x, str) else x for x in array.reshape(-1)]
        array.reshape(-1)[:] = encoded
    else:
        array = jnp.asarray(value, dtype=canonical_dtype(dtype))
    made: jax.Array = array if shape is None else _in_shape(array, shape)
    return made


def _in_shape(array: Any, shape: Any) -> Any:
    """Return an array in another shape, or its one value in all places of the shape."""
    if array.size == np.prod(shape):
        return array.reshape(shape)
    return (np if isinstance(array, np.ndarray) else jnp).broadcast_to(array, shape)


def _is_of_texts(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "SU"
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return isinstance(value, str | bytes)


def identity(input: Any, name: str | None = None) -> jax.Array:
    """Return a copy of an array, or of the value of a variable.

    Example:
        >>> rx.identity(rx.Variable(2.0))
        Array(2., dtype=float32)
    """
    return jnp.array(input, copy=True)


def add(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """Return the elementwise sum of two arrays.

    Example:
        >>> rx.add(1.0, rx.constant([1.0, 2.0]))
        Array([2., 3.], dtype=float32)
    """
    return jnp.add(
        *(jnp.asarray(each) if isinstance(each, list | tuple) else each for each in (x, y))
    )


def enable_eager_execution(*_: Any, **__: Any) -> None:
    """Do nothing: code is eager outside of `rx.function`.

    Example:
        >>> rx.enable_eager_execution()
    """


_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_BINARY = [*_ARITHMETIC, "and_", "or_", "xor", "lshift", "rshift"]
_COMPARING = ["lt", "le", "gt", "ge", "eq", "ne"]
_UNARY = ["neg", "pos", "abs", "invert"]
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "index": operator.index,
    "len": len,
    "iter": iter,
}


def stands_for(kind: type, read: Callable[[Any], Any]) -> None:
    """Overload Python's operators on ``kind`` to apply to ``read(x)`` of each operand."""

    def operand(x: Any) -> Any:
        return read(x) if isinstance(x, kind) else x

    def put(name: str, method: Callable[..., Any]) -> None:
        method.__name__ = name
        method.__doc__ = f"``{name}`` of the value."
        setattr(kind, name, method)

    for name in [*_BINARY, *_COMPARING]:
        op, bare = getattr(operator, name), name.rstrip("_")
        put(f"__{bare}__", lambda self, other, op=op: op(read(self), operand(other)))
        if name in _BINARY:
            put(f"__r{bare}__", lambda self, other, op=op: op(operand(other), read(self)))
    for name in _UNARY:
        op = getattr(operator, name)
        put(f"__{name}__", lambda self, op=op: op(read(self)))
    for name, made in _CONVERSIONS.items():
        put(f"__{name}__", lambda self, made=made: made(read(self)))
    if not hasattr(kind, "__getitem__"):
        put("__getitem__", lambda self, key: read(self)[key])
