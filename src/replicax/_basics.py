"""What stands for arrays in a user's program: one-liners over JAX, and Python's operators.

One-liners over JAX under the names that the pages of tf.distribute use.

Operators: objects that stand for a value in Python's arithmetic.
"""

import operator
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from replicax._errors import user_frame

Tensor = jax.Array

# What an element of a dataset is made of where it is numbers: on its way to a device it becomes a
# `jax.Array`, whatever it was. Lists are missing, for they are one array here and several there.
Numbers = jax.Array | npt.NDArray[np.number[Any] | np.bool] | np.number[Any] | np.bool | complex

if TYPE_CHECKING:  # only checkers know of defaults in Python 3.11
    from typing_extensions import TypeVar as TypeVarWithDefault

    T_co = TypeVarWithDefault("T_co", covariant=True, default=Any)
else:
    T_co = TypeVar("T_co", covariant=True)


class StandIn:
    """A value of several replicas. JAX may take it for an array; replicax must take it apart."""

    __slots__ = ()


class NamedFields(Protocol):
    """A named tuple, whose class is kept when its fields become others."""

    def _asdict(self) -> dict[str, Any]: ...


def kept_dtype(dtype: Any) -> Any:
    """The type that JAX keeps for the one that is asked for; a narrower one with a warning.

    JAX would warn too, but point at a line of replicax.
    """
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    asked, kept = jnp.dtype(dtype), jax.dtypes.canonicalize_dtype(dtype)
    if asked != kept:
        text = (
            f"dtype {asked.name} was asked for, and {kept.name} is what you get: JAX keeps 32 bits"
            f" unless it is told otherwise. Write dtype={kept.name!r}, or call"
            ' `jax.config.update("jax_enable_x64", True)` before anything else.'
        )
        where = user_frame(sys._getframe(1))  # noqa: SLF001
        if where is None:
            warnings.warn(text, UserWarning, stacklevel=3)
        else:
            seen = where.f_globals.setdefault("__warningregistry__", {})
            file, line = where.f_code.co_filename, where.f_lineno
            warnings.warn_explicit(text, UserWarning, file, line, registry=seen)
    return kept


def constant(
    value: Any, dtype: Any = None, shape: Any = None, name: str | None = None
) -> jax.Array:
    """An array of the given value.

    Example:
        >>> rx.constant([1.0, 2.0])
        Array([1., 2.], dtype=float32)
    """
    array = jnp.asarray(value, dtype=kept_dtype(dtype))
    return array if shape is None else jnp.broadcast_to(array, shape)


def identity(input: Any, name: str | None = None) -> jax.Array:
    """A copy of an array, or the value of a variable.

    Example:
        >>> rx.identity(rx.Variable(2.0))
        Array(2., dtype=float32)
    """
    return jnp.array(input, copy=True)


def add(x: Any, y: Any, name: str | None = None) -> jax.Array:
    """The sum of two arrays, element by element.

    Example:
        >>> rx.add(1.0, rx.constant([1.0, 2.0]))
        Array([2., 3.], dtype=float32)
    """
    return jnp.add(x, y)


def enable_eager_execution(*_: Any, **__: Any) -> None:
    """Does nothing: code is eager outside of `rx.function`.

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
    """Have Python's operators on objects of ``kind`` act on what ``read`` gives for them."""

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
