"""The value of an NNX variable: in its own slot, or in an `rx.Variable` that the slot holds."""

import threading
import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from replicax._errors import ScopeError, TracingError
from replicax._jax_private import concrete
from replicax._types import VariableAggregation, VariableSynchronization
from replicax.context._current import attributes, current, entered
from replicax.integrations import _flax_private as private
from replicax.state._cell import Cell
from replicax.state._creation import births
from replicax.state._held import read_global
from replicax.state._levels import at_end, level, refuse_other_trace, refuse_tracer
from replicax.state._variable import Variable
from replicax.values._per_replica import plain
from replicax.values._placement import is_traced

slot: Any = private.raw_value
_stamp: Any = private.trace_state
outermost = private.current_jax_trace()
_adopting = threading.RLock()
keeps_one: ContextVar[bool] = ContextVar("replicax_keeps_one", default=False)
later: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("replicax_later", default=None)
# Values of another shape, in the level that is current: NNX gives them to the variables of its
# random streams for the time of a transform (`nnx.split_rngs`), and then puts the old ones back.
_temporary: ContextVar[Mapping[Cell, Any]] = ContextVar(
    "replicax_temporary", default=MappingProxyType({})
)
# The variable that an NNX variable held before it was given a value of another shape or dtype.
_formers: weakref.WeakKeyDictionary[Cell, Variable] = weakref.WeakKeyDictionary()


class _Made:
    """The value of a variable that was made in a replica or a function, and ends with it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Other:
    """The value of a variable that held an `rx.Variable` and was given what is no array."""

    __slots__ = ("held", "value")

    def __init__(self, value: Any, held: Variable) -> None:
        self.value = value
        self.held = held


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
            return value.value if type(value) in (_Made, _Other) else value
        value = _read(held)
        self._seen[held.cell] = weakref.ref(value)
        return value

    def __set__(self, v: Any, x: Any) -> None:
        held = held_by(v)
        if held is None:
            _write_slot(v, x)
        elif (seen := self._seen.pop(held.cell, None)) is None or seen() is not x:
            # NNX's gradients write back every variable, also what they only read.
            if (writes := later.get()) is None:
                write(v, x)
            else:
                writes.append((v, x))

    def __delete__(self, v: Any) -> None:
        slot.__delete__(v)

    @property
    def _seen(self) -> Any:
        if not hasattr(self._here, "seen"):
            self._here.seen = weakref.WeakKeyDictionary()
        return self._here.seen


def _read(held: Variable) -> Any:
    temporary = _temporary.get()
    is_outside = current().level is None
    if held.cell not in temporary:
        # Where the program sets a mesh its operations run on that mesh: it gets a copy that is
        # free to go there, as a new array would be, and not the one on the strategy's devices.
        has_mesh = is_outside and not jax.sharding.get_abstract_mesh().empty
        return held.read_value() if has_mesh else read_global(held)
    if is_outside:
        raise TracingError(
            f"{held.name!r} was read in cross-replica code while a replica has split its random"
            " streams (nnx.split_rngs), each replica in its own way. Read it in the replica, or"
            " after `nnx.restore_rngs`."
        )
    return temporary[held.cell]


def write(v: Any, x: Any) -> None:
    """Give an NNX variable that holds an `rx.Variable` another value."""
    held = slot.__get__(v)
    if current().level is None:
        _replace(v, held, x)
    elif _has_shape(held, x):
        _temporary.set({c: y for c, y in _temporary.get().items() if c is not held.cell})
        held.assign(x)
    else:
        _put_temporarily(held, x)


def _replace(v: Any, held: Variable, x: Any) -> None:
    """Write outside of every level, where NNX allows any value, of any shape and dtype."""
    old = slot.__get__(v)
    chain = [held]
    while (former := _formers.get(chain[-1].cell)) is not None:
        chain.append(former)
    fits = next((f for f in chain if _has_shape(f, x) and _has_dtype(f, x)), None)
    if fits is not None:
        fits.assign(x)
        slot.__set__(v, fits)
    elif is_known(x):
        slot.__set__(v, x)
        _formers[adopted(v, held.distribute_strategy).cell] = held
    else:
        if any(map(is_traced, jax.tree.leaves(x))):
            refuse_tracer(held.cell, x)
        slot.__set__(v, _Other(x, held))
    # A compiled function has the variable that it met: it must be traced again. NNX variables
    # take no weak references, so that the first of those that it held stands for it.
    attributes.note(chain[-1], "value", old, slot.__get__(v))


def _put_temporarily(held: Variable, x: Any) -> None:
    """Let ``x`` stand for the variable until NNX puts a value of its shape back."""
    cell, where, before = held.cell, level(), _temporary.get()
    fresh = getattr(where, "fresh", None)
    if fresh is None:
        refuse_tracer(cell, x)
    else:
        refuse_other_trace(cell, fresh.trace)

    def end() -> str:
        left = [c for c, y in _temporary.get().items() if before.get(c) is not y]
        _temporary.set(before)
        return _unrestored(left[0], x) if left else ""

    at_end(_temporary, end)
    _temporary.set({**before, cell: x})


def _unrestored(cell: Cell, x: Any) -> str:
    return (
        f"Variable {cell.name!r} of shape {cell.shape} was given a value of another shape,"
        f" {np.shape(x)}, in a replica function or an rx.function, and kept it to the end. A"
        " compiled program cannot change a variable's shape. If `nnx.split_rngs` did so, use it as"
        " `with nnx.split_rngs(...):` or as a decorator, or call `nnx.restore_rngs`."
    )


def _has_shape(held: Variable, x: Any) -> bool:
    is_arraylike = isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
    return is_arraylike and np.shape(x) == held.shape


def _has_dtype(held: Variable, x: Any) -> bool:
    return bool(getattr(x, "dtype", held.dtype) == held.dtype)


def _write_slot(v: Any, x: Any) -> None:
    x = plain(x)
    is_inside = current().level is not None
    try:
        old = slot.__get__(v)
    except AttributeError:  # it is just being made
        old = _Made(None) if is_inside else None
    if type(old) is _Other and not is_inside:
        _replace(v, old.held, x)
    elif type(old) is _Other:
        slot.__set__(v, _Other(x, old.held))
    else:
        slot.__set__(v, _Made(x) if type(old) is _Made else x)


def held_by(v: Any) -> Variable | None:
    """The variable that an NNX variable holds, or comes to hold where a function first meets it."""
    try:
        x = slot.__get__(v)
    except AttributeError:
        return None
    if isinstance(x, Variable):
        return x
    frame = current()
    if (frame.level is None and not frame.tapes) or not is_known(x):
        return None
    if not is_outermost(v):
        return None
    if not x.sharding.is_fully_replicated:
        raise ScopeError(
            f"An nnx.{type(v).__name__} of shape {x.shape} that the program placed itself, as"
            f" {x.sharding}, was used in a replica function or an rx.function. A strategy keeps a"
            " copy of each variable for every replica: make the variable without a mesh of your"
            " own and without `out_sharding`, or use it outside of replica functions."
        )
    return adopted(v, frame.strategy)


def is_outermost(v: Any) -> bool:
    """Whether an NNX variable was made outside of every trace."""
    return bool(_stamp.__get__(v)._jax_trace == outermost)


def is_known(x: Any) -> bool:
    return isinstance(x, jax.Array) and not is_traced(x)


def is_free(x: Any, strategy: Any) -> bool:
    """Whether the program leaves it to the strategy where an array is.

    It does not where it sets a mesh, or has placed the array on devices of its own choice.
    """
    if not (is_known(x) and jax.sharding.get_abstract_mesh().empty):
        return False
    devices = x.sharding.device_set
    topology = strategy.topology
    is_ours = topology is not None and devices == set(topology.devices)
    return bool(len(devices) == 1 or (is_ours and x.sharding.is_fully_replicated))


def adopted(v: Any, strategy: Any) -> Variable:
    token = births.set(None)  # it was there before the function that meets it
    try:
        with (
            _adopting,
            concrete(),
            entered(strategy=strategy, replica=None, level=None, body=None, tapes=()),
        ):
            x = slot.__get__(v)
            if isinstance(x, Variable):  # another replica was faster
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
    held.cell.draws = issubclass(kind, nnx.RngState)
    return held
