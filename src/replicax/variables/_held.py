"""Variables of other libraries: an object of Keras or Flax that holds an `rx.Variable`.

An adapter gives the library's class a method ``__rx_variable__``, which returns the variable that
an object holds, or None; whoever asks for a variable asks `variable_of`, so that all such objects
pass wherever an `rx.Variable` does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from replicax.context._current import current
from replicax.variables._cell import changing
from replicax.variables._levels import level, refuse_in_foreign_trace
from replicax.variables._told import told
from replicax.variables._variable import Variable

_trusted: ContextVar[bool] = ContextVar("replicax_trusted", default=False)


def variable_of(x: Any) -> Variable | None:
    """The variable that ``x`` is or holds; None if it is something else."""
    if isinstance(x, Variable):
        return x
    ask = getattr(type(x), "__rx_variable__", None)
    return ask(x) if ask is not None else None


def required_variable(x: Any, verb: str) -> Variable:
    """The variable that ``x`` is or holds, for ``verb``.

    Raises:
        TypeError: If it is something else.
    """
    variable = variable_of(x)
    if variable is None:
        raise TypeError(
            f"{verb} needs a variable, got {x!r} ({type(x).__name__}). Pass an rx.Variable, or a"
            " library's own that was made in the scope of a strategy."
        )
    return variable


def value_of(x: Any) -> Any:
    """The value of a variable in the current context; anything else as it is."""
    held = variable_of(x)
    return x if held is None else held.read_value()


@contextmanager
def trusted() -> Iterator[None]:
    """Allow reads while JAX traces, in code of a library that keeps nothing of what it traced."""
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def read_global(held: Variable) -> jax.Array:
    """The value as a library's own code wants it: across replicas, on all their devices.

    In a replica, or in a function that is traced, it is what `Variable.read_value` gives. Outside
    it is the array of all replicas, not the first one's copy, so that operations on it run where
    the variable lives. Of several workers each computes for itself, with its own copy.
    """
    frame = current()
    if frame.level is not None or frame.replica is not None:
        if not (_trusted.get() and level().is_eager):
            return held.read_value()
        with jax.ensure_compile_time_eval():
            return held.read_value()
    cell = held.cell
    if not _trusted.get():
        refuse_in_foreign_trace(cell)
    with jax.ensure_compile_time_eval():
        alone = cell.topology is None or not cell.topology.is_whole
        if alone or cell.per_replica or cell.sharded:
            return held.read_value()
        cell.owned = False
        whole = cell.array()
    seen: jax.Array = told(cell, whole)
    return seen


def held_array(held: Variable) -> jax.Array:
    """The array as the devices of all workers hold it, which stays as it is now.

    Of a sharded variable it is the stored one, in parts; see `Cell.cut`.
    """
    cell = held.cell
    refuse_in_foreign_trace(cell)
    with jax.ensure_compile_time_eval(), changing:
        array = cell.array()
        cell.owned = False
    return array
