"""Functions of `tf.debugging`. In compiled functions they check shapes and dtypes, not values."""

import operator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.tf_ops.core import as_tensor


def _is_traced(*values: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def _check(is_true: Any, message: Any, *values: Any) -> None:
    """Raise if a condition is false; in a trace its value is unknown, and nothing is checked."""
    if not _is_traced(*values) and not bool(np.all(np.asarray(is_true()))):
        shown = ", ".join(str(np.asarray(value)) for value in values)
        raise InvalidArgumentError(f"{message or 'The check failed.'} Values: {shown}.")


def Assert(condition: Any, data: Any, summarize: Any = None, name: str | None = None) -> None:
    """Raise if a condition is false; not checked in compiled functions.

    Example:
        >>> tf.Assert(True, ["all is well"])
    """
    _check(lambda: condition, " ".join(str(d) for d in data), condition)


def assert_equal(
    x: Any, y: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if values differ; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_equal(1.0, 1.0)
    """
    a, b = as_tensor(x), as_tensor(y)
    _check(lambda: operator.eq(a, b), message, a, b)


def assert_none_equal(
    x: Any, y: Any, summarize: Any = None, message: Any = None, name: str | None = None
) -> None:
    """Raise if a value equals another; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_none_equal(1.0, 2.0)
    """
    a, b = as_tensor(x), as_tensor(y)
    _check(lambda: operator.ne(a, b), message, a, b)


def assert_less(
    x: Any, y: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if x is not less than y; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_less(1.0, 2.0)
    """
    a, b = as_tensor(x), as_tensor(y)
    _check(lambda: operator.lt(a, b), message, a, b)


def assert_less_equal(
    x: Any, y: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if x is greater than y; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_less_equal(1.0, 2.0)
    """
    a, b = as_tensor(x), as_tensor(y)
    _check(lambda: operator.le(a, b), message, a, b)


def assert_greater(
    x: Any, y: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if x is not greater than y; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_greater(2.0, 1.0)
    """
    a, b = as_tensor(x), as_tensor(y)
    _check(lambda: operator.gt(a, b), message, a, b)


def assert_greater_equal(
    x: Any, y: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if x is less than y; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_greater_equal(2.0, 1.0)
    """
    a, b = as_tensor(x), as_tensor(y)
    _check(lambda: operator.ge(a, b), message, a, b)


def assert_positive(
    x: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if an entry is not positive; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_positive(1.0)
    """
    value = as_tensor(x)
    _check(lambda: operator.gt(value, 0), message, value)


def assert_negative(
    x: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if an entry is not negative; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_negative(-1.0)
    """
    value = as_tensor(x)
    _check(lambda: operator.lt(value, 0), message, value)


def assert_non_negative(
    x: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if an entry is negative; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_non_negative(1.0)
    """
    value = as_tensor(x)
    _check(lambda: operator.ge(value, 0), message, value)


def assert_non_positive(
    x: Any, message: Any = None, summarize: Any = None, name: str | None = None
) -> None:
    """Raise if an entry is positive; not checked in compiled functions.

    Example:
        >>> tf.debugging.assert_non_positive(-1.0)
    """
    value = as_tensor(x)
    _check(lambda: operator.le(value, 0), message, value)


def assert_near(
    x: Any,
    y: Any,
    rtol: Any = None,
    atol: Any = None,
    message: Any = None,
    summarize: Any = None,
    name: str | None = None,
) -> None:
    """Raise if values differ by more than a tolerance.

    Example:
        >>> tf.debugging.assert_near(1.0, 1.0)
    """
    a, b = as_tensor(x), as_tensor(y)
    eps = 10 * float(jnp.finfo(a.dtype).eps)
    limit = (eps if atol is None else atol, eps if rtol is None else rtol)
    _check(lambda: np.abs(a - b) <= limit[0] + limit[1] * np.abs(b), message, a, b)


def assert_shapes(
    shapes: Any,
    data: Any = None,
    summarize: Any = None,
    message: Any = None,
    name: str | None = None,
) -> None:
    """Raise if shapes do not match their symbolic descriptions; equal letters mean equal sizes.

    Example:
        >>> tf.debugging.assert_shapes([(jnp.ones((2, 3)), ("N", 3))])
    """
    known: dict[Any, int] = {}
    for x, wanted in shapes.items() if isinstance(shapes, dict) else shapes:
        shape, spec = np.shape(x), tuple(wanted)
        _require(len(shape) == len(spec), f"{message or ''} shape {shape} does not fit {spec}")
        for size, want in zip(shape, spec, strict=True):
            right = want if isinstance(want, int) else known.setdefault(want, size)
            _require(
                want in (None, ".") or size == right,
                f"{message or ''} shape {shape} does not fit {spec}",
            )


def _require(is_true: Any, message: Any) -> None:
    if not is_true:
        raise InvalidArgumentError(message.strip())


def assert_rank(x: Any, rank: Any, message: Any = None, name: str | None = None) -> None:
    """Raise if an array does not have the expected number of dimensions.

    Example:
        >>> tf.debugging.assert_rank(jnp.ones(2), 1)
    """
    if np.ndim(x) != rank:
        raise ValueError(f"{message or ''} shape {np.shape(x)} does not have rank {rank}.".strip())


def assert_rank_at_least(x: Any, rank: Any, message: Any = None, name: str | None = None) -> None:
    """Raise if an array has fewer dimensions than expected.

    Example:
        >>> tf.debugging.assert_rank_at_least(jnp.ones(2), 1)
    """
    if np.ndim(x) < rank:
        raise ValueError(
            f"{message or ''} shape {np.shape(x)} has fewer than {rank} dimensions.".strip()
        )


def assert_rank_in(x: Any, ranks: Any, message: Any = None, name: str | None = None) -> None:
    """Raise if the number of dimensions is not among the expected ones.

    Example:
        >>> tf.debugging.assert_rank_in(jnp.ones(2), [1, 2])
    """
    if np.ndim(x) not in ranks:
        raise ValueError(
            f"{message or ''} shape {np.shape(x)} has none of the ranks {ranks}.".strip()
        )


def assert_scalar(tensor: Any, message: Any = None, name: str | None = None) -> None:
    """Raise if a value is not a scalar.

    Example:
        >>> tf.debugging.assert_scalar(1.0)
    """
    if np.ndim(tensor):
        raise ValueError(
            f"{message or ''} expected a scalar, got shape {np.shape(tensor)}.".strip()
        )


def assert_type(tensor: Any, tf_type: Any, message: Any = None, name: str | None = None) -> None:
    """Raise if an array does not have the expected dtype.

    Example:
        >>> tf.debugging.assert_type(jnp.ones(2), jnp.float32)
    """
    if as_tensor(tensor).dtype != np.dtype(tf_type):
        raise TypeError(
            f"{message or ''} expected {tf_type}, got {as_tensor(tensor).dtype}.".strip()
        )


def assert_integer(x: Any, message: Any = None, name: str | None = None) -> None:
    """Raise if an array does not have an integer dtype.

    Example:
        >>> tf.debugging.assert_integer(1)
    """
    if as_tensor(x).dtype.kind not in "iu":
        raise TypeError(
            f"{message or ''} expected whole numbers, got {as_tensor(x).dtype}.".strip()
        )


def assert_same_float_dtype(tensors: Any = None, dtype: Any = None) -> Any:
    """Return the common floating-point dtype; raise if there is none.

    Example:
        >>> tf.debugging.assert_same_float_dtype([jnp.ones(1)])
        dtype('float32')
    """
    dtypes = {as_tensor(t).dtype for t in tensors or () if t is not None}
    dtypes |= set() if dtype is None else {np.dtype(dtype)}
    if len(dtypes) > 1 or any(d.kind != "f" for d in dtypes):
        raise ValueError(f"Expected floats of one dtype, got {sorted(map(str, dtypes))}.")
    return dtypes.pop() if dtypes else np.dtype(np.float32)


def assert_proper_iterable(values: Any) -> None:
    """Raise if a value is not an iterable, or is an array or a string.

    Example:
        >>> tf.debugging.assert_proper_iterable([1])
    """
    if (
        hasattr(values, "dtype")
        or isinstance(values, (str, bytes))
        or not hasattr(values, "__iter__")
    ):
        raise TypeError(f"Expected argument to be iterable, found: {type(values)}")


def is_numeric_tensor(tensor: Any) -> Any:
    """Whether a value is an array of numbers.

    Example:
        >>> tf.debugging.is_numeric_tensor(jnp.ones(2))
        True
    """
    return hasattr(tensor, "dtype") and np.dtype(tensor.dtype).kind in "iufc"


def check_numerics(tensor: Any, message: Any, name: str | None = None) -> Any:
    """Return an array; raise if an entry is not a finite number, where values are known.

    Example:
        >>> tf.debugging.check_numerics(1.0, "loss")
        Array(1., dtype=float32)
    """
    x = as_tensor(tensor)
    _check(lambda: np.isfinite(x), f"{message} : Tensor had NaN or Inf values.", x)
    return x


def assert_all_finite(x: Any, message: Any, name: str | None = None) -> Any:
    """Return an array; raise if an entry is not a finite number, where values are known.

    Example:
        >>> tf.debugging.assert_all_finite(1.0, "loss")
        Array(1., dtype=float32)
    """
    return check_numerics(x, message)


def enable_check_numerics(stack_height_limit: Any = 30, path_length_limit: Any = 50) -> None:
    """Raise an error when an operation produces NaN.

    Example:
        >>> tf.debugging.enable_check_numerics(); tf.debugging.disable_check_numerics()
    """
    jax.config.update("jax_debug_nans", True)


def disable_check_numerics() -> None:
    """Undo `enable_check_numerics`.

    Example:
        >>> tf.debugging.disable_check_numerics()
    """
    jax.config.update("jax_debug_nans", False)


def set_log_device_placement(enabled: Any) -> None:
    """Do nothing: arrays know their devices, `x.devices()`.

    Example:
        >>> tf.debugging.set_log_device_placement(True)
    """


def get_log_device_placement() -> bool:
    """Return False.

    Example:
        >>> tf.debugging.get_log_device_placement()
        False
    """
    return False


def disable_traceback_filtering() -> None:
    """Show complete tracebacks.

    Example:
        >>> tf.debugging.disable_traceback_filtering()
    """
    jax.config.update("jax_traceback_filtering", "off")


def enable_traceback_filtering() -> None:
    """Hide JAX's own frames in tracebacks.

    Example:
        >>> tf.debugging.enable_traceback_filtering()
    """
    jax.config.update("jax_traceback_filtering", "auto")
