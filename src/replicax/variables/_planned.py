"""Variables whose value is not there yet.

Planned ones have none, only a shape and a dtype, to look ahead at what is too large. Awaited ones
have a first value, but somebody wants to give them another before anyone looks: a checkpoint that
was restored before they existed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from replicax._errors import VariableError

_planning: ContextVar[bool] = ContextVar("replicax_planning", default=False)


@contextmanager
def planning() -> Iterator[None]:
    """Make variables that take no memory, for `rx.tpu.preflight` of a model too large to be here.

    A variable made in the block has a name, a shape and a dtype, but no value. An initial value
    that is a function is not computed either, so pass functions.

    Example:
        >>> with rx.tpu.planning():
        ...     v = rx.Variable(lambda: jnp.zeros((1 << 20, 1 << 20)), name="large")
        >>> v.shape
        (1048576, 1048576)
        >>> v.read_value()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        replicax._errors.VariableError: Variable 'large' has no value: it was made while planning...
    """
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


def is_planning() -> bool:
    """Whether variables are made without values."""
    return _planning.get()


def plan(initial_value: Callable[[], Any] | Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an initial value."""
    make = initial_value if callable(initial_value) else lambda: initial_value
    shape: jax.ShapeDtypeStruct = jax.eval_shape(lambda: jnp.asarray(make(), dtype))
    return shape


def is_planned(x: Any) -> bool:
    """Whether ``x`` stands for a value that there is not."""
    return isinstance(x, jax.ShapeDtypeStruct)


class Awaited(jax.ShapeDtypeStruct):
    """Stands for the value of a new variable until somebody looks at it."""

    def __init__(self, value: Any, settle: Callable[[], None]) -> None:
        head = value[0] if isinstance(value, tuple) else value
        super().__init__(head.shape, head.dtype)
        self.value = value
        self.settle = settle


# What wants to know of new variables; each is called before one is first looked at, and when a
# library has made some.
newcomers: list[Callable[[], None]] = []


def tell_newcomers() -> None:
    """Say that there may be new variables."""
    for tell in list(newcomers):
        tell()


def refuse_planned(x: Any, name: str) -> None:
    """Refuse to look at a value that there is not.

    Raises:
        VariableError: It is planned only.
    """
    if is_planned(x[0] if isinstance(x, tuple) else x):
        raise VariableError(
            f"Variable {name!r} has no value: it was made while planning. Make it outside of"
            " `rx.tpu.planning()`, and of `replicax preflight --plan`, to compute with it."
        )
