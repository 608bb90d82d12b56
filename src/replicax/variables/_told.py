"""Reads, told to the gradient tapes that are open."""

from abc import abstractmethod
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from replicax._recording import unrecorded
from replicax.context._current import current
from replicax.variables._cell import Cell
from replicax.variables._levels import level


class Listener(Protocol):
    """A gradient tape, as variables see it."""

    @abstractmethod
    def is_other(self, cell: Cell, value: jax.Array) -> bool:
        """Whether the tape knows ``value`` as something else than a read of ``cell``."""

    @abstractmethod
    def note_read(self, cell: Cell, value: jax.Array) -> None:
        """Note that ``value`` is what ``cell`` held when it was read."""


def read(cell: Cell) -> Any:
    """The value at the current level."""
    value = level().read(cell)
    return told(cell, value) if current().tapes else value


def told(cell: Cell, value: Any) -> Any:
    """What a read of ``cell`` gave, with the tapes knowing where it is from."""
    tapes: tuple[Listener, ...] = current().tapes
    if not tapes or not is_differentiable(value):
        return value
    if any(tape.is_other(cell, value) for tape in tapes):
        # It was computed, then assigned: an assignment ends what a tape follows, as in TensorFlow.
        with unrecorded():
            value = jnp.copy(value)
    for tape in tapes:
        tape.note_read(cell, value)
    return value


def is_differentiable(x: Any) -> bool:
    """Whether ``x`` is an array that can have a gradient."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
