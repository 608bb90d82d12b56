"""What an NNX variable holds: its value, or an `rx.Variable` in the slot where NNX looks for it."""

import threading
import weakref
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from replicax._types import VariableAggregation, VariableSynchronization
from replicax.context._current import current, entered
from replicax.integrations import _flax_private as private
from replicax.state._creation import births
from replicax.state._held import read_global
from replicax.state._variable import Variable
from replicax.values._placement import is_traced

slot: Any = private.raw_value
_stamp: Any = private.trace_state
_outermost = private.current_jax_trace()
_adopting = threading.RLock()
keeps_one: ContextVar[bool] = ContextVar("replicax_keeps_one", default=False)
later: ContextVar[list[tuple[Variable, Any]] | None] = ContextVar("replicax_later", default=None)


class _Made:
    """The value of a variable that was made in a replica or a function, and ends with it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class NNXHeldValue:
    """``_raw_value`` of an NNX variable: in its slot, or in the variable that the slot holds."""

    def __init__(self) -> None:
        self._here = threading.local()

    def __get__(self, v: Any, owner: Any = None) -> Any:
        if v is None:
            return self
        held = held_by(v)
        if held is None:
            value = slot.__get__(v)
            return value.value if type(value) is _Made else value
        value = read_global(held)
        self._seen[held.cell] = weakref.ref(value)
        return value

    def __set__(self, v: Any, x: Any) -> None:
        held = held_by(v)
        if held is None:
            slot.__set__(v, _Made(x) if _is_made_inside(v) else x)
        elif (seen := self._seen.pop(held.cell, None)) is None or seen() is not x:
            # NNX's gradients write back every variable, also what they only read.
            if (writes := later.get()) is None:
                held.assign(x)
            else:
                writes.append((held, x))

    def __delete__(self, v: Any) -> None:
        slot.__delete__(v)

    @property
    def _seen(self) -> Any:
        if not hasattr(self._here, "seen"):
            self._here.seen = weakref.WeakKeyDictionary()
        return self._here.seen


def _is_made_inside(v: Any) -> bool:
    try:
        return type(slot.__get__(v)) is _Made
    except AttributeError:  # it is just being made
        return current().level is not None


def held_by(v: Any) -> Variable | None:
    """The variable that an NNX variable holds, or comes to hold where a function first meets it."""
    try:
        x = slot.__get__(v)
    except AttributeError:
        return None
    if type(x) is Variable:
        return x
    frame = current()
    if (frame.level is None and not frame.tapes) or not is_known(x):
        return None
    return adopted(v, frame.strategy) if _stamp.__get__(v)._jax_trace == _outermost else None


def is_known(x: Any) -> bool:
    return isinstance(x, jax.Array) and not is_traced(x)


def adopted(v: Any, strategy: Any) -> Variable:
    token = births.set(None)  # it was there before the function that meets it
    try:
        with (
            _adopting,
            jax.ensure_compile_time_eval(),
            entered(strategy=strategy, replica=None, level=None, body=None, tapes=()),
        ):
            x = slot.__get__(v)
            if type(x) is Variable:  # another replica was faster
                return x
            held = _variable(v, x)
            slot.__set__(v, held)
            return held
    finally:
        births.reset(token)


def _variable(v: Any, x: jax.Array) -> Variable:
    kind = type(v)
    strategy = current().strategy
    sums = issubclass(kind, nnx.metrics.MetricState) and strategy is not None
    if sums and not keeps_one.get():
        held = Variable(
            jnp.zeros_like(x),
            trainable=False,
            name=kind.__name__,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        return held.assign(x)
    held = Variable(x, trainable=issubclass(kind, nnx.Param), name=kind.__name__)
    held.cell.averages = issubclass(kind, nnx.BatchStat) and jnp.issubdtype(x.dtype, jnp.inexact)
    return held
