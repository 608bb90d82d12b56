"""Functions of `tf.compat.v1` that version 2 does not have."""

import importlib
import logging as python_logging
from collections import Counter
from typing import Any

import numpy as np

from replicax._src.random.random import normal, uniform
from replicax._src.tf_ops.arrays import cast
from replicax._src.tf_ops.core import as_tensors
from replicax._src.tf_ops.math import divide, floordiv

logger = python_logging.getLogger("replicax")


def enable_control_flow_v2() -> None:
    """Do nothing: this behaviour is always enabled.

    Example:
        >>> rx.compat.v1.enable_control_flow_v2()
    """


def enable_resource_variables() -> None:
    """Do nothing: this behaviour is always enabled.

    Example:
        >>> rx.compat.v1.enable_resource_variables()
    """


def enable_tensor_equality() -> None:
    """Do nothing: this behaviour is always enabled.

    Example:
        >>> rx.compat.v1.enable_tensor_equality()
    """


def enable_v2_behavior() -> None:
    """Do nothing: this behaviour is always enabled.

    Example:
        >>> rx.compat.v1.enable_v2_behavior()
    """


def enable_v2_tensorshape() -> None:
    """Do nothing: this behaviour is always enabled.

    Example:
        >>> rx.compat.v1.enable_v2_tensorshape()
    """


def to_float(x: Any, name: str | None = "ToFloat") -> Any:
    """Convert to float32.

    Example:
        >>> tf.compat.v1.to_float(1)
        Array(1., dtype=float32)
    """
    return cast(x, np.float32)


def to_int32(x: Any, name: str | None = "ToInt32") -> Any:
    """Convert to int32.

    Example:
        >>> tf.compat.v1.to_int32(1.5)
        Array(1, dtype=int32)
    """
    return cast(x, np.int32)


def to_int64(x: Any, name: str | None = "ToInt64") -> Any:
    """Convert to int64.

    Example:
        >>> int(tf.compat.v1.to_int64(1.5))
        1
    """
    return cast(x, np.int64)


def to_bfloat16(x: Any, name: str | None = "ToBFloat16") -> Any:
    """Convert to bfloat16.

    Example:
        >>> tf.compat.v1.to_bfloat16(1.5)
        Array(1.5, dtype=bfloat16)
    """
    return cast(x, "bfloat16")


def div(x: Any, y: Any, name: str | None = None) -> Any:
    """Divide as Python 2 does: integers are rounded down.

    Example:
        >>> tf.compat.v1.div(-7, 2)
        Array(-4, dtype=int32)
        >>> tf.compat.v1.div(7.0, 2.0)
        Array(3.5, dtype=float32)
    """
    is_of_integers = as_tensors(x, y)[0].dtype.kind in "iu"
    return floordiv(x, y) if is_of_integers else divide(x, y)


def random_normal_initializer(
    mean: Any = 0.0, stddev: Any = 1.0, seed: Any = None, dtype: Any = np.float32
) -> Any:
    """Return Keras's initializer with the standard deviation of version 1, which is 1.

    Example:
        >>> tf.compat.v1.random_normal_initializer().stddev
        1.0
    """
    return _initializers().RandomNormal(mean, stddev, seed)


def random_uniform_initializer(
    minval: Any = 0.0, maxval: Any = None, seed: Any = None, dtype: Any = np.float32
) -> Any:
    """Return Keras's initializer with the bounds of version 1, which are 0 and 1.

    Example:
        >>> tf.compat.v1.random_uniform_initializer().maxval
        1.0
    """
    return _initializers().RandomUniform(minval, 1.0 if maxval is None else maxval, seed)


def truncated_normal_initializer(
    mean: Any = 0.0, stddev: Any = 1.0, seed: Any = None, dtype: Any = np.float32
) -> Any:
    """Return Keras's initializer with the standard deviation of version 1, which is 1.

    Example:
        >>> tf.compat.v1.truncated_normal_initializer().stddev
        1.0
    """
    return _initializers().TruncatedNormal(mean, stddev, seed)


def _initializers() -> Any:
    return importlib.import_module("replicax").keras.initializers


def random_uniform(
    shape: Any,
    minval: Any = 0,
    maxval: Any = None,
    dtype: Any = np.float32,
    seed: Any = None,
    name: str | None = None,
) -> Any:
    """Draw uniformly distributed numbers.

    Example:
        >>> tf.compat.v1.random_uniform([2]).shape
        (2,)
    """
    return uniform(shape, minval, maxval, dtype, seed)


def random_normal(
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = np.float32,
    seed: Any = None,
    name: str | None = None,
) -> Any:
    """Draw normally distributed numbers.

    Example:
        >>> tf.compat.v1.random_normal([2]).shape
        (2,)
    """
    return normal(shape, mean, stddev, dtype, seed)


def set_verbosity(v: Any) -> None:
    """Set the lowest level at which messages are shown.

    Example:
        >>> tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.WARN)
    """
    logger.setLevel(v)


def get_verbosity() -> int:
    """Return the lowest level at which messages are shown.

    Example:
        >>> tf.compat.v1.logging.set_verbosity(30); tf.compat.v1.logging.get_verbosity()
        30
    """
    return logger.getEffectiveLevel()


def info(msg: Any, *args: Any, **kwargs: Any) -> None:
    """Log a message at the level INFO.

    Example:
        >>> tf.compat.v1.logging.info("step %d", 3)
    """
    logger.info(msg, *args, **kwargs)


def debug(msg: Any, *args: Any, **kwargs: Any) -> None:
    """Log a message at the level DEBUG.

    Example:
        >>> tf.compat.v1.logging.debug("step %d", 3)
    """
    logger.debug(msg, *args, **kwargs)


def warn(msg: Any, *args: Any, **kwargs: Any) -> None:
    """Log a warning.

    Example:
        >>> tf.compat.v1.logging.warn("slow")
    """
    logger.warning(msg, *args, **kwargs)


def error(msg: Any, *args: Any, **kwargs: Any) -> None:
    """Log an error.

    Example:
        >>> tf.compat.v1.logging.error("failed")
    """
    logger.error(msg, *args, **kwargs)


def log(level: Any, msg: Any, *args: Any, **kwargs: Any) -> None:
    """Log a message at the given level.

    Example:
        >>> tf.compat.v1.logging.log(10, "step %d", 3)
    """
    logger.log(level, msg, *args, **kwargs)


def log_if(level: Any, msg: Any, condition: Any, *args: Any) -> None:
    """Log a message at the given level if a condition is true.

    Example:
        >>> tf.compat.v1.logging.log_if(10, "step %d", True, 3)
    """
    if condition:
        logger.log(level, msg, *args)


def log_every_n(level: Any, msg: Any, n: Any, *args: Any) -> None:
    """Log a message on the first of every ``n`` calls with the same text.

    Example:
        >>> tf.compat.v1.logging.log_every_n(10, "step %d", 100, 3)
    """
    log_if(level, msg, _count_call(msg, "every") % n == 0, *args)


def log_first_n(level: Any, msg: Any, n: Any, *args: Any) -> None:
    """Log a message on the first ``n`` calls with the same text.

    Example:
        >>> tf.compat.v1.logging.log_first_n(10, "step %d", 1, 3)
    """
    log_if(level, msg, _count_call(msg, "first") < n, *args)


_calls: Counter[tuple[Any, str]] = Counter()


def _count_call(msg: Any, kind: str) -> int:
    """Return how many calls with this message came before this one."""
    _calls[msg, kind] += 1
    return _calls[msg, kind] - 1


def get_logger() -> Any:
    """Return the logger of this package.

    Example:
        >>> tf.get_logger().name
        'replicax'
    """
    return logger


# The levels of messages.
DEBUG, INFO, WARN, ERROR, FATAL = (
    python_logging.DEBUG,
    python_logging.INFO,
    python_logging.WARNING,
    python_logging.ERROR,
    python_logging.CRITICAL,
)
