"""Dtypes of sums and means over replicas: one rule for every verb that reduces.

A sum has the dtype of its summands, and integers wrap, as in TensorFlow; truth values are counted
in int32. A mean is added up without overflow, and integers have the mean that JAX's division gives:
a float. TensorFlow divides the wrapped sum.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from replicax._types import ReduceOp


def summand(op: ReduceOp, x: Any) -> Any:
    """Return ``x``, of JAX or NumPy, in the dtype in which its sum or mean is added up."""
    dtype = sum_dtype(op, x.dtype)
    return x if x.dtype == dtype else x.astype(dtype)


def sum_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Return the dtype in which values of ``dtype`` are added up for a sum or a mean."""
    if op is ReduceOp.SUM:
        return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype
    mean = mean_dtype(dtype)
    # bfloat16 has the range of float32, and its sums half the traffic.
    overflows = jnp.finfo(mean).maxexp < jnp.finfo(jnp.float32).maxexp
    return jnp.dtype(jnp.float32) if overflows else mean


def reduced_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Return the dtype of a sum or mean of values of ``dtype``."""
    return sum_dtype(op, dtype) if op is ReduceOp.SUM else mean_dtype(dtype)


def mean_dtype(dtype: Any) -> Any:
    """Return the dtype of a mean of values of ``dtype``."""
    return (
        dtype
        if jnp.issubdtype(dtype, jnp.inexact)
        else _divided(dtype, jax.dtypes.canonicalize_dtype("float64"))
    )


@cache
def _divided(dtype: Any, _: Any) -> Any:
    return jax.eval_shape(lambda x: x / 1, jax.ShapeDtypeStruct((), dtype)).dtype
