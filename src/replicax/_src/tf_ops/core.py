"""Choice between NumPy and JAX, and conversion of values as TensorFlow does it.

Functions that a dataset applies to elements run on the host, on NumPy values. Elsewhere values are
JAX's. Shapes are known while JAX traces, so that what is computed from them stays in NumPy too.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax._src.data.user_functions import in_element_function


class StaticShape(np.ndarray[Any, Any]):
    """A shape, as `tf.shape` returns it: an int32 array whose values are known in a trace."""


def library(*values: Any) -> Any:
    """Return NumPy for values of elements and for shapes, `jax.numpy` for all others."""
    if in_element_function():
        is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values))
        return jnp if is_traced else np
    return np if _is_of_shapes(values) else jnp


def _is_of_shapes(values: Any) -> bool:
    leaves = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, StaticShape))
    found = [isinstance(x, StaticShape) for x in leaves]
    return any(found) and not any(isinstance(x, jax.Array) for x in leaves)


def shaped(result: Any, *values: Any) -> Any:
    """Return ``result`` as a shape if it was computed from shapes."""
    if isinstance(result, np.ndarray) and result.ndim and _is_of_shapes(values):
        return result.view(StaticShape)
    return result


def result_dtype(dtype: Any) -> Any:
    """Return the dtype of results for a requested ``dtype``: 32 bits unless x64 is enabled."""
    if dtype is None:
        return None
    if dtype in (bytes, str):
        return np.dtype(object)
    wanted = np.dtype(dtype)
    return wanted if in_element_function() else jax.dtypes.canonicalize_dtype(wanted)


def as_tensor(value: Any, dtype: Any = None, xp: Any = None) -> Any:
    """Return a value as an array; Python's numbers become float32 and int32."""
    xp = library(value) if xp is None else xp
    if dtype is None and not hasattr(value, "dtype") and not _has_arrays(value):
        array = np.asarray(value)
        dtype = {"float64": np.float32, "int64": np.int32}.get(array.dtype.name)
        if dtype is np.int32 and array.size and np.abs(array).max() > np.iinfo(np.int32).max:
            dtype = np.int64
        if array.dtype.kind in "SUO":  # strings stay on the host
            return np.asarray(value, object)
    return shaped(xp.asarray(value, result_dtype(dtype)), value)


def _has_arrays(value: Any) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(value))


def as_tensors(*values: Any) -> Any:
    """Return values as arrays of one dtype; numbers take the dtype of the first array."""
    dtypes = [getattr(value, "dtype", None) for value in values]
    dtype = next((each for each in dtypes if each is not None), None)
    xp = library(*values)
    return [
        as_tensor(v, dtype if d is None else None, xp) for v, d in zip(values, dtypes, strict=True)
    ]


def ints(values: Any) -> Any:
    """Return a shape, a number or a list of either as a tuple of Python numbers."""
    if values is None:
        return ()
    if hasattr(values, "as_list"):
        values = values.as_list()
    if isinstance(values, (int, np.integer)) or getattr(values, "ndim", None) == 0:
        return (int(values),)
    return tuple(int(value) for value in values)


def axes(axis: Any) -> Any:
    """Return an axis, or several as a tuple, for NumPy."""
    if axis is None or isinstance(axis, (int, np.integer)):
        return axis
    numbers = ints(axis)
    return numbers[0] if len(numbers) == 1 and getattr(axis, "ndim", 1) == 0 else numbers
