"""Functions of `tf.bitwise`."""

from typing import Any

from replicax._src.tf_ops.core import as_tensor, as_tensors, library


def bitwise_and(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the bitwise AND of two arrays.

    Example:
        >>> tf.bitwise.bitwise_and(6, 3)
        Array(2, dtype=int32)
    """
    a, b = as_tensors(x, y)
    return library(a, b).bitwise_and(a, b)


def bitwise_or(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the bitwise OR of two arrays.

    Example:
        >>> tf.bitwise.bitwise_or(6, 3)
        Array(7, dtype=int32)
    """
    a, b = as_tensors(x, y)
    return library(a, b).bitwise_or(a, b)


def bitwise_xor(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the bitwise XOR of two arrays.

    Example:
        >>> tf.bitwise.bitwise_xor(6, 3)
        Array(5, dtype=int32)
    """
    a, b = as_tensors(x, y)
    return library(a, b).bitwise_xor(a, b)


def invert(x: Any, name: str | None = None) -> Any:
    """Invert the bits of each entry.

    Example:
        >>> tf.bitwise.invert(0)
        Array(-1, dtype=int32)
    """
    return library(x).invert(as_tensor(x))


def left_shift(x: Any, y: Any, name: str | None = None) -> Any:
    """Shift the bits of ``x`` to the left by ``y``.

    Example:
        >>> tf.bitwise.left_shift(1, 3)
        Array(8, dtype=int32)
    """
    a, b = as_tensors(x, y)
    return library(a, b).left_shift(a, b)


def right_shift(x: Any, y: Any, name: str | None = None) -> Any:
    """Shift the bits of ``x`` to the right by ``y``.

    Example:
        >>> tf.bitwise.right_shift(8, 3)
        Array(1, dtype=int32)
    """
    a, b = as_tensors(x, y)
    return library(a, b).right_shift(a, b)
