"""How functions are computed: their options, compiled or not, and how exactly."""

from typing import Any, TypedDict

import jax

from replicax._jax_private import setting

runs_eagerly = [False]


class FunctionOptions(TypedDict, total=False):
    """The options of `rx.function` beside the signature; most are TensorFlow's, and ignored."""

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
    """Have every `rx.function` run as plain Python, op by op, until it is switched off again.

    Prints, breakpoints and values of arrays are there then, as without the decorator.

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
    """Whether products of float32 matrices may be less exact on devices that are faster then.

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
    """Whether products of float32 matrices may be less exact; True at first.

    Example:
        >>> rx.config.experimental.tensor_float_32_execution_enabled()
        True
    """
    return setting("jax_default_matmul_precision") not in ("highest", "float32")
