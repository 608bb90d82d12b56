"""What may be declared as a variable, and what may be assigned to it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._enums import VariableAggregation, VariableSynchronization
from replicax._errors import VariableError


def check_declaration(v: Any, name: str, value: Any, shape: Any, *, distributed: bool) -> None:
    """Check that a declaration does not contradict itself.

    Args:
        v: The variable.
        name: What it will be called.
        value: Its initial value.
        shape: Its declared shape, or None.
        distributed: Whether it is made in the scope of a strategy.

    Raises:
        ValueError: If it does.
    """
    for what, kind in (
        ("synchronization", VariableSynchronization),
        ("aggregation", VariableAggregation),
    ):
        if not isinstance(getattr(v, what), kind):
            raise ValueError(
                f"{what}={getattr(v, what)!r} of variable {name!r} is not one of"
                f" {', '.join(f'rx.{kind.__name__}.{m}' for m in kind.__members__)}."
            )
    if distributed and v.synchronization is VariableSynchronization.NONE:
        raise VariableError(
            f"Variable {name!r} has synchronization NONE, which no strategy supports: use"
            " rx.VariableSynchronization.AUTO, ON_WRITE or ON_READ."
        )
    if (
        distributed
        and v.aggregation is VariableAggregation.MEAN
        and not jnp.issubdtype(value.dtype, jnp.inexact)
    ):
        raise VariableError(
            f"Variable {name!r} of dtype {value.dtype} cannot have aggregation MEAN: the mean"
            " of integers is not an integer. Use SUM, ONLY_FIRST_REPLICA, or a float dtype."
        )
    if shape is not None and tuple(shape) != tuple(value.shape):
        raise ValueError(
            f"Variable {name!r} was declared with shape {tuple(shape)}, but its initial value"
            f" has shape {tuple(value.shape)}."
        )


def check_dtype(v: Any, value: Any, verb: str, *, exact: bool) -> None:
    """Check that a value can be converted to the dtype of a variable.

    Args:
        v: The variable.
        value: Has a dtype.
        verb: What is done with it, for the message.
        exact: Whether the dtype was chosen; that of Python numbers was not.

    Raises:
        VariableError: If it cannot.
    """
    if jnp.issubdtype(v.dtype, jax.dtypes.extended):
        return
    have, want = np.dtype(value.dtype), np.dtype(v.dtype)
    fits = np.can_cast(have, want, "same_kind") if exact else _python_fits(have, want)
    if not fits:
        raise VariableError(
            f"{verb} of a value of dtype {have} to variable {v.name!r} of dtype {want} would lose"
            f" what does not fit. Convert it yourself: `value.astype({str(want)!r})`."
        )


def _python_fits(have: np.dtype, want: np.dtype) -> bool:
    order = "biufcV"
    have_rank = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}.get(have.kind, 4)
    want_rank = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}.get(want.kind, 4)
    return have_rank <= want_rank and have.kind in order


def is_key(x: Any) -> bool:
    """Whether ``x`` is an array of random keys, which has no dtype to convert to."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)
