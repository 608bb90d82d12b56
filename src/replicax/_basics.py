"""One-liners over JAX under the names that the pages of tf.distribute use."""

from typing import Any

import jax
import jax.numpy as jnp

Tensor = jax.Array


def constant(
    value: Any, dtype: Any = None, shape: Any = None, name: str | None = None
) -> jax.Array:
    """An array of the given value.

    Example:
        >>> rx.constant([1.0, 2.0])
        Array([1., 2.], dtype=float32)
    """
    array = jnp.asarray(value, dtype=dtype)
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
