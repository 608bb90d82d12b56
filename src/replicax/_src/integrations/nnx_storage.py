"""Storage of NNX variables' values: an array in the slot, or an `rx.Variable` that backs it."""

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

from replicax._src.base.errors import ScopeError, TracingError, VariableError
from replicax._src.base.types import VariableAggregation, VariableSynchronization
from replicax._src.compat.jax import concrete
from replicax._src.context.current import attributes, current, entered
from replicax._src.integrations import flax_private as private
from replicax._src.state.cell import Cell
from replicax._src.state.declaration import LayoutMap, is_planned, is_planning
from replicax._src.state.hooks import created_variables
from replicax._src.state.levels import at_end, level, refuse_other_trace, refuse_tracer
from replicax._src.state.variable import Variable
from replicax._src.state.variables import read_global
from replicax._src.values.per_replica import plain
from replicax._src.values.placement import is_traced

slot: Any = private.raw_value
_stamp: Any = private.trace_state
outermost = private.current_jax_trace()
_adopting = threading.RLock()
# Whether metric states that are created now are mirrored, instead of one sum per replica.
mirrors_metrics: ContextVar[bool] = ContextVar("replicax_mirrors_metrics", default=False)
# While set, writes to variables are collected as (variable, value) instead of executed.
deferred_writes: ContextVar[list[tuple[Any, Any]] | None] = ContextVar(
    "replicax_deferred_writes", default=None
)
# Values of another shape than their variable, in the current trace level: during a transform,
# `nnx.split_rngs` assigns such values to the variables of its random streams, and then restores
# the old ones.
_temporary: ContextVar[Mapping[Cell, Any]] = ContextVar(
    "replicax_temporary", default=MappingProxyType({})
)
# The variable that backed an NNX variable before a value of another shape or dtype was assigned.
_previous: weakref.WeakKeyDictionary[Cell, Variable] = weakref.WeakKeyDictionary()


class _LocalValue:
    """The slot content of a variable created in a replica or function, which ends with it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _NonArrayValue:
    """The slot content of an NNX variable that got a value that is not an array.

    It keeps the `rx.Variable` that backed the variable before, for the next array.
    """

    __slots__ = ("backing", "value")

    def __init__(self, value: Any, backing: Variable) -> None:
        self.value = value
        self.backing = backing


class NNXBackedValue:
    """The descriptor for ``_raw_value`` of NNX variables, which reads and writes the backing."""

    def __init__(self) -> None:
        self._here = threading.local()

    def __get__(self, v: Any, owner: Any = None) -> Any:
        if v is None:
            return self
        backing = backing_variable(v)
        if backing is None:
            value = slot.__get__(v)
            return value.value if type(value) in (_LocalValue, _NonArrayValue) else value
        value = _read(backing)
        self._seen[backing.cell] = weakref.ref(value)
        return value

    def __set__(self, v: Any, x: Any) -> None:
        backing = backing_variable(v)
        if backing is None:
            _write_slot(v, x)
        elif (seen := self._seen.pop(backing.cell, None)) is None or seen() is not x:
            # NNX's gradients write back every variable, including unchanged ones: ignore those.
            if (writes := deferred_writes.get()) is None:
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


def _read(backing: Variable) -> Any:
    temporary = _temporary.get()
    is_outside = current().level is None
    if backing.cell not in temporary:
        # If the program sets a mesh, its operations run on that mesh. Return an uncommitted copy,
        # which JAX can move there, not the array committed to the strategy's devices.
        has_mesh = is_outside and not jax.sharding.get_abstract_mesh().empty
        return backing.read_value() if has_mesh else read_global(backing)
    if is_outside:
        raise TracingError(
            f"{backing.name!r} was read in cross-replica code while a replica has split its random"
            " streams (nnx.split_rngs), each replica in its own way. Read it in the replica, or"
            " after `nnx.restore_rngs`."
        )
    return temporary[backing.cell]


def write(v: Any, x: Any) -> None:
    """Assign a value to an NNX variable that is backed by an `rx.Variable`."""
    backing = slot.__get__(v)
    if current().level is None:
        _replace(v, backing, x)
    elif _has_shape(backing, x):
        _temporary.set({c: y for c, y in _temporary.get().items() if c is not backing.cell})
        backing.assign(x)
    else:
        _put_temporarily(backing, x)


def _replace(v: Any, backing: Variable, x: Any) -> None:
    """Assign outside of any trace level, where NNX allows any value, shape and dtype."""
    old = slot.__get__(v)
    chain = [backing]
    while (former := _previous.get(chain[-1].cell)) is not None:
        chain.append(former)
    fits = next((f for f in chain if _has_shape(f, x) and _has_dtype(f, x)), None)
    if fits is not None:
        fits.assign(x)
        slot.__set__(v, fits)
    elif is_known(x):
        slot.__set__(v, x)
        _previous[adopt(v, backing.distribute_strategy).cell] = backing
    else:
        if any(map(is_traced, jax.tree.leaves(x))):
            refuse_tracer(backing.cell, x)
        slot.__set__(v, _NonArrayValue(x, backing))
    # A compiled function captured the old backing variable, so it must be traced again. NNX
    # variables cannot be weakly referenced; their first backing variable is the key instead.
    attributes.note(chain[-1], "value", old, slot.__get__(v))


def _put_temporarily(backing: Variable, x: Any) -> None:
    """Override the variable's value with ``x`` until NNX assigns a value of its shape again."""
    cell, where, before = backing.cell, level(), _temporary.get()
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


def _has_shape(backing: Variable, x: Any) -> bool:
    is_arraylike = isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
    return is_arraylike and np.shape(x) == backing.shape


def _has_dtype(backing: Variable, x: Any) -> bool:
    return bool(getattr(x, "dtype", backing.dtype) == backing.dtype)


def _write_slot(v: Any, x: Any) -> None:
    x = plain(x)
    is_inside = current().level is not None
    try:
        old = slot.__get__(v)
    except AttributeError:  # it is being constructed
        old = _LocalValue(None) if is_inside else None
    if type(old) is _NonArrayValue and not is_inside:
        _replace(v, old.backing, x)
    elif type(old) is _NonArrayValue:
        slot.__set__(v, _NonArrayValue(x, old.backing))
    else:
        slot.__set__(v, _LocalValue(x) if type(old) is _LocalValue else x)


def backing_variable(v: Any) -> Variable | None:
    """Return the `rx.Variable` behind an NNX variable; None if it has and needs none.

    One is created when a replica, a compiled function or a tape first uses the NNX variable.

    Raises:
        ScopeError: The program sharded the variable's array.
    """
    try:
        x = slot.__get__(v)
    except AttributeError:
        return None
    if isinstance(x, Variable):
        return x
    frame = current()
    # While planning, models of `nnx.eval_shape` have shapes in place of arrays.
    is_planned_here = is_planning() and is_planned(x)
    if (frame.level is None and not frame.tapes) or not (is_known(x) or is_planned_here):
        return None
    if not is_outermost(v):
        return None
    is_placed_by_us = is_planned_here or _is_of_mesh(x, frame.strategy)
    if not (is_placed_by_us or x.sharding.is_fully_replicated):
        raise ScopeError(
            f"An nnx.{type(v).__name__} of shape {x.shape} that the program placed itself, as"
            f" {x.sharding}, was used in a replica function or an rx.function. A strategy keeps a"
            " copy of each variable for every replica: make the variable without a mesh of your"
            " own and without `out_sharding`, or use it outside of replica functions."
        )
    return adopt(v, frame.strategy)


def is_outermost(v: Any) -> bool:
    """Whether an NNX variable was created outside of any trace."""
    return bool(_stamp.__get__(v)._jax_trace == outermost)


def is_known(x: Any) -> bool:
    """Whether ``x`` is a concrete JAX array."""
    return isinstance(x, jax.Array) and not is_traced(x)


def is_free(x: Any, strategy: Any) -> bool:
    """Whether the strategy may decide the placement of an array.

    It may not if the program sets a mesh, or has placed the array on devices of its choice.
    """
    if not (is_known(x) and jax.sharding.get_abstract_mesh().empty):
        return False
    devices = x.sharding.device_set
    topology = strategy.topology
    is_ours = topology is not None and devices == set(topology.devices)
    is_placed_by_us = x.sharding.is_fully_replicated or _is_of_mesh(x, strategy)
    return bool(len(devices) == 1 or (is_ours and is_placed_by_us))


def _is_of_mesh(x: Any, strategy: Any) -> bool:
    """Whether an array is sharded over the mesh of a strategy, as zeros like a kernel are."""
    topology = None if strategy is None else strategy.topology
    return topology is not None and getattr(x.sharding, "mesh", None) == topology.mesh


def adopt(v: Any, strategy: Any) -> Variable:
    """Move the array of an NNX variable into a new `rx.Variable` of ``strategy``; return that."""
    token = created_variables.set(
        None
    )  # not a variable that the current function creates: it existed before
    try:
        with (
            _adopting,
            concrete(),
            entered(strategy=strategy, replica=None, level=None, body=None, tapes=()),
        ):
            x = slot.__get__(v)
            if isinstance(x, Variable):  # another replica's thread was faster
                return x
            backing = _variable(v, x)
            slot.__set__(v, backing)
            return backing
    finally:
        created_variables.reset(token)


def _variable(v: Any, x: jax.Array) -> Variable:
    kind = type(v)
    strategy = current().strategy
    sums = issubclass(kind, nnx.metrics.MetricState) and strategy is not None
    if sums and not mirrors_metrics.get():
        backing = Variable(
            jnp.zeros_like(x),
            trainable=False,
            name=kind.__name__,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        return backing.assign(x)
    with _layout(v, x).scope():
        backing = Variable(x, trainable=issubclass(kind, nnx.Param), name=kind.__name__)
    backing.cell.averages = issubclass(kind, nnx.BatchStat) and jnp.issubdtype(x.dtype, jnp.inexact)
    backing.cell.draws = issubclass(kind, nnx.RngState)
    return backing


def _layout(v: Any, x: jax.Array) -> LayoutMap:
    """Return the layout that an NNX variable has by ``nnx.with_partitioning``, by its name."""
    metadata = v.get_metadata()
    parts, rules = metadata.get("out_sharding"), dict(metadata.get("sharding_rules") or ())
    if parts is None:
        return LayoutMap()
    if len(parts) == x.ndim:
        return LayoutMap({type(v).__name__: [rules.get(part, part) for part in parts]})
    if not isinstance(v, nnx.Param):  # state of an optimizer, such as factors of rows
        return LayoutMap()
    raise VariableError(
        f"An nnx.{type(v).__name__} of shape {x.shape} is partitioned by {tuple(parts)!r}, which"
        f" has {len(parts)} entries for {x.ndim} axes. If `nnx.vmap` stacks layers, name the new"
        " axis: `nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: None})`."
    )
