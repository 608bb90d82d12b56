"""Execution modes of functions (eager, matmul precision), and the signals that end a trace.

The signals derive from `BaseException`, not `Exception`, so that user code that catches exceptions
does not swallow them.
"""

import traceback
from collections.abc import Iterable
from typing import Any, TypedDict

import jax

from replicax._src.base.origin import is_library
from replicax._src.compat.jax import setting


class HostDriven(BaseException):
    """Ends a trace: Python must run the function, as the number of elements depends on values."""


class PythonFallback(BaseException):
    """Ends a call whose program cannot take the upcoming elements: Python runs it instead."""


class ShapeMismatch(PythonFallback):
    """Ends a call whose upcoming elements have other shapes than the function was traced with."""


class StringArgument(PythonFallback):
    """Raised for an argument with strings, which no compiled program can take."""


class RaggedArgument(PythonFallback):
    """Raised if the replicas' arrays differ in shape, so that no single program can take them."""


def late_creation(name: str, created: Iterable[Any]) -> str:
    """Return the error message for variables that are created after the first call."""
    names = ", ".join(repr(v.name) for v in created)
    return (
        f"{name} creates variables ({names}) on a call that is not its first, or in a later trace"
        " of its first call. A compiled function may be traced more than once, and may create"
        " variables the first time only: create them outside, or keep them and create them once,"
        " `if self.v is None: self.v = rx.Variable(...)`."
    )


def needs_value(name: str, error: Exception) -> str:
    """Return the error message for code that needs the value of a traced array."""
    return (
        f"{name} needs the value of an array while it is traced, when only its shape and dtype are"
        f" known{_where(error)}: a Python `if`, `while`, `int()`, `float()`, `range()`, `.numpy()`"
        " or a function of NumPy depends on an array, or on the replica id. Use"
        " `rx.cond(condition, if_true, if_false)`, `rx.while_loop` or `jnp.where`; pass fixed"
        " values as Python numbers; or run without `rx.function`."
        f"\nJAX says: {str(error).splitlines()[0]}"
    )


def _where(error: Exception) -> str:
    """Return the user's line that raised ``error``, with its code."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not is_library(f.filename)]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: `{frames[-1].line}`)" if frames else ""


runs_eagerly = [False]


class FunctionOptions(TypedDict, total=False):
    """The options of `rx.function` besides the signature; most are TensorFlow's, and ignored."""

    autograph: bool
    jit_compile: bool | None
    reduce_retracing: bool
    experimental_implements: Any
    experimental_autograph_options: Any
    experimental_attributes: Any
    experimental_relax_shapes: Any
    experimental_compile: Any
    experimental_follow_type_hints: Any


def run_functions_eagerly(run_eagerly: bool) -> None:  # noqa: FBT001 - TensorFlow's signature
    """Run every `rx.function` as plain Python, op by op, until this is switched off again.

    Prints, breakpoints and array values then work as they do without the decorator.

    Example:
        >>> @rx.function
        ... def double(x):
        ...     return 2 * x if x > 0 else x  # needs the value of x
        >>> rx.config.run_functions_eagerly(True)
        >>> float(double(jnp.float32(3)))
        6.0
        >>> rx.config.run_functions_eagerly(False)
    """
    if not isinstance(run_eagerly, bool):
        raise TypeError(f"run_functions_eagerly takes True or False, got {run_eagerly!r}.")
    runs_eagerly[0] = run_eagerly


def functions_run_eagerly() -> bool:
    """Whether every `rx.function` runs as plain Python; see `run_functions_eagerly`.

    Example:
        >>> rx.config.functions_run_eagerly()
        False
    """
    return runs_eagerly[0]


def enable_tensor_float_32_execution(enabled: bool) -> None:  # noqa: FBT001 - TensorFlow's
    """Allow float32 matrix products of reduced precision on devices where they are faster.

    Example:
        >>> rx.config.experimental.enable_tensor_float_32_execution(False)
        >>> rx.config.experimental.tensor_float_32_execution_enabled()
        False
        >>> rx.config.experimental.enable_tensor_float_32_execution(True)
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enable_tensor_float_32_execution takes True or False, got {enabled!r}.")
    jax.config.update("jax_default_matmul_precision", None if enabled else "highest")


def tensor_float_32_execution_enabled() -> bool:
    """Whether float32 matrix products may have reduced precision; True by default.

    Example:
        >>> rx.config.experimental.tensor_float_32_execution_enabled()
        True
    """
    return setting("jax_default_matmul_precision") not in ("highest", "float32")
