"""`Variable`: mutable state that outlives the functions that read and write it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from replicax._src.base.errors import VariableError
from replicax._src.base.lazy import LeavesOut
from replicax._src.base.ops import Assignable, stands_for
from replicax._src.base.rendering import format_components
from replicax._src.base.types import VariableAggregation, VariableSynchronization
from replicax._src.base.weak import OrderedWeakSet
from replicax._src.collectives.consistency import identify
from replicax._src.compat.jax import accept_as_array, concrete
from replicax._src.context.current import ambient_strategy, current
from replicax._src.state.cell import Cell, format_value
from replicax._src.state.declaration import (
    check_declaration,
    check_dtype,
    is_key,
    is_planned,
    layout_of,
)
from replicax._src.state.hooks import CreatedOnce, created_variables, duplicate, initial_array
from replicax._src.state.levels import TraceLevel, level
from replicax._src.state.placement import Placed
from replicax._src.state.policy import (
    ComponentPolicy,
    MirroredPolicy,
    OnReadPolicy,
    PlainPolicy,
    Policy,
)
from replicax._src.state.scatter import SparseUpdates
from replicax._src.state.update import Update
from replicax._src.topology.devices import device_name
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import Distributed, DistributedValues, InBody, PerReplica
from replicax._src.values.placement import has_strong_dtype, is_traced, private
from replicax._src.values.replica_functions import broadcast_from_first
from replicax._src.values.sharded import is_sharded_over_replicas
from replicax._src.workers import elastic

live_variables: OrderedWeakSet[Any] = OrderedWeakSet()


_OF_GRAPHS = {
    "SaveSliceInfo": "Checkpoints cut variables by their sharding.",
    "count_up_to": "Compare the value in Python, or write `rx.cond(v < limit, ...)`.",
    "eval": "There are no sessions: write `v.numpy()`.",
    "experimental_ref": "Write `v.ref()`.",
    "from_proto": "There are no graphs: save variables with `rx.train.Checkpoint`.",
    "get_shape": "Write `v.shape`, which is a tuple.",
    "graph": "There are no graphs: remove it.",
    "initial_value": "The variable has its value at once: write `v.numpy()`.",
    "initialized_value": "The variable has its value at once: write `v.read_value()`.",
    "initializer": "The variable has its value at once: remove it.",
    "load": "There are no sessions: write `v.assign(value)`.",
    "op": "There are no graphs: write `v.name`.",
    "set_shape": "The shape is known: remove this line.",
    "to_proto": "There are no graphs: save variables with `rx.train.Checkpoint`.",
}


def _refuse_in_place(symbol: str, alternative: str) -> Callable[[Any, Any], NoReturn]:
    """Return an in-place operator that raises: Python would replace the variable by an array."""

    def refuse(variable: Any, value: Any) -> NoReturn:
        name = variable._name  # noqa: SLF001 - it becomes a method of the class
        raise RuntimeError(
            f"`variable {symbol}= value` would replace variable {name!r} by an array. Write"
            f" `{alternative}` to change it, or `x = variable {symbol} value` for an array."
        )

    return refuse


class Variable(SparseUpdates, LeavesOut, metaclass=CreatedOnce):
    """Mutable state that outlives the functions that read and write it.

    Created in the scope of a strategy it has one copy on each replica's device, kept equal
    (synchronization ON_WRITE, the default) or combined when it is read (ON_READ).

    Args:
        initial_value: An array, a number, or a function without arguments that makes one.
        trainable: Whether an optimizer should change it; by default True, except with
            synchronization ON_READ.
        validate_shape: Accepted for compatibility with TensorFlow, as ``caching_device``,
            ``import_scope`` and ``experimental_enable_variable_lifting``. Shapes are checked.
        caching_device: See ``validate_shape``.
        name: For messages and printing.
        variable_def: None; a variable of a graph cannot be imported.
        dtype: The dtype to convert the initial value to.
        import_scope: See ``validate_shape``.
        constraint: A function that optimizers apply to the value after an update.
        synchronization: When the copies are made equal.
        aggregation: How the values of several replicas are combined.
        shape: The shape, if it is to be checked against the initial value.
        experimental_enable_variable_lifting: See ``validate_shape``.

    Raises:
        ValueError: If the declaration contradicts itself.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0)
        >>> v
        MirroredVariable:{
          0: <rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,
          1: <rx.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>
        }
        >>> v.assign_add(2.0).numpy()
        array(3., dtype=float32)
    """

    left_out = _OF_GRAPHS
    # Whether this object was returned by an assignment in a replica: a run then returns each
    # replica's value of it.
    is_written = False
    __array_priority__ = 100  # NumPy arrays then leave `array @ variable` to the variable

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        validate_shape: Any = True,
        caching_device: Any = None,
        name: str | None = None,
        variable_def: Any = None,
        dtype: Any = None,
        import_scope: Any = None,
        constraint: Callable[[Any], Any] | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Any = None,
        experimental_enable_variable_lifting: Any = True,
    ) -> None:
        _register_with_jax()
        strategy = ambient_strategy()
        topology: Topology | None = strategy.topology
        on_read = synchronization is VariableSynchronization.ON_READ
        self._name = name or "Variable"
        self._trainable = (not on_read) if trainable is None else bool(trainable)
        self._synchronization = synchronization
        self._aggregation = aggregation
        self._strategy = strategy
        self._whole: Variable = self
        self._components: tuple[Variable, ...] | None = None
        self.constraint = constraint
        value, traced = initial_array(initial_value, dtype, self._name)
        check_declaration(self, self._name, value, shape, distributed=topology is not None)
        # A worker alone in an elastic run creates the same variables as workers that join it.
        several = topology is not None and (
            topology.num_replicas > 1 or (elastic.is_on() and hasattr(strategy, "move_to_workers"))
        )
        if several and synchronization is VariableSynchronization.AUTO:
            self._synchronization = VariableSynchronization.ON_WRITE
        with concrete():
            stacks = on_read and several
            if topology is not None and traced is None and not is_planned(value):
                value = broadcast_from_first(value, topology, f"variable {self._name!r}")
            spec = layout_of(value, self._name, topology, per_replica=stacks)
            is_sharded = several and not on_read
            if is_sharded:
                is_sharded = is_sharded_over_replicas(
                    value, strategy.variable_policy, topology, spec
                )
            cell = Cell(
                value, topology, self._name, per_replica=stacks, spec=spec, sharded=is_sharded
            )
        cell.trainable = self._trainable
        self._policy: Policy = policy_for(cell, strategy, aggregation, several=several)
        if topology is not None and strategy.wraps_single:
            object.__setattr__(self, "__class__", DistributedVariable)
        live_variables.add(self)
        where = level()
        if traced is not None and isinstance(where, TraceLevel):
            where.created.append((self, traced))
        log = created_variables.get()
        if log is not None:
            log.append(self)

    # Properties.

    @property
    def name(self) -> str:
        """The name, with TensorFlow's output number."""
        policy = self._policy
        replica = policy.replica if isinstance(policy, ComponentPolicy) else 0
        return f"{self._name}/replica_{replica}:0" if replica else f"{self._name}:0"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self._policy.cell.shape

    @property
    def dtype(self) -> Any:
        """The dtype of its entries."""
        return self._policy.cell.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of entries."""
        return int(np.prod(self.shape))

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When its copies are made equal."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the values of several replicas are combined."""
        return self._aggregation

    @property
    def distribute_strategy(self) -> Any:
        """The strategy in whose scope it was created."""
        return self._strategy

    @property
    def topology(self) -> Topology | None:
        """The devices that hold its copies; None for a plain variable."""
        return self._policy.cell.topology

    @property
    def device(self) -> str:
        """The name of the device that holds it, or its first copy."""
        policy, cell = self._policy, self._policy.cell
        replica = policy.replica if isinstance(policy, ComponentPolicy) else 0
        if cell.topology is not None:
            return cell.topology.name_of(cell.topology.primary_devices[replica])
        return device_name(next(iter(cell.array().devices())))

    @property
    def cell(self) -> Cell:
        """The storage of its value; for code that lifts state into compiled functions."""
        return self._policy.cell

    def ref(self) -> Variable:
        """Return a dictionary key; variables are hashable and are their own keys here."""
        return self

    # Reading.

    def value(self) -> jax.Array:
        """Return the value in the current context."""
        return self._policy.read()

    def read_value(self) -> jax.Array:
        """Return the value in the current context."""
        return self._policy.read()

    def numpy(self) -> np.ndarray:
        """Return the value as a NumPy array."""
        return np.asarray(self._policy.read())

    def __jax_array__(self) -> jax.Array:
        return self._policy.read()

    def __array__(  # type: ignore[override]
        self, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.array(self._policy.read(), dtype=dtype, copy=copy)

    # Writing.

    __iadd__ = _refuse_in_place("+", "variable.assign_add(value)")
    __isub__ = _refuse_in_place("-", "variable.assign_sub(value)")
    __imul__ = _refuse_in_place("*", "variable.assign(variable * value)")
    __itruediv__ = _refuse_in_place("/", "variable.assign(variable / value)")
    __ifloordiv__ = _refuse_in_place("//", "variable.assign(variable // value)")
    __imatmul__ = _refuse_in_place("@", "variable.assign(variable @ value)")
    __ipow__ = _refuse_in_place("**", "variable.assign(variable ** value)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "value":
            raise AttributeError(
                f"`value` of variable {self._name!r} is a method. Write `variable.assign(value)` to"
                " change the variable."
            )
        object.__setattr__(self, name, value)

    def assign(
        self, value: Assignable, use_locking: Any = False, name: Any = None, read_value: Any = True
    ) -> Variable:
        """Replace the value.

        Example:
            >>> float(rx.Variable(1.0).assign(5.0).read_value())
            5.0
        """
        dtype = self.dtype
        kept = lambda x: has_strong_dtype(x, dtype) or is_key(x)  # noqa: E731
        replaced = lambda _, x: x if kept(x) else jnp.asarray(private(x), dtype)  # noqa: E731
        checked = self._checked(value, "assign")
        self._policy.update((checked,), Update("assign", "replace", replaced))
        return self._after_write()

    def assign_add(
        self, delta: Assignable, use_locking: Any = False, name: Any = None, read_value: Any = True
    ) -> Variable:
        """Add to the value.

        Example:
            >>> float(rx.Variable(1.0).assign_add(5.0).read_value())
            6.0
        """
        return self._add(delta, operator.add, "assign_add")

    def assign_sub(
        self, delta: Assignable, use_locking: Any = False, name: Any = None, read_value: Any = True
    ) -> Variable:
        """Subtract from the value.

        Example:
            >>> float(rx.Variable(1.0).assign_sub(5.0).read_value())
            -4.0
        """
        return self._add(delta, operator.sub, "assign_sub")

    def _add(self, delta: Any, op: Callable[[Any, Any], Any], verb: str) -> Variable:
        dtype = self.dtype
        add = Update(verb, "add", lambda old, d: op(old, private(d)).astype(dtype))
        self._policy.update((self._checked(delta, verb),), add)
        return self._after_write()

    def _after_write(self) -> Self:
        """Return `self`; in a replica, a view of it that a run reads as the replica's value."""
        replica = current().replica
        if replica is None or replica.num_replicas_in_sync == 1 or self.is_written:
            return self
        written = object.__new__(type(self))
        vars(written).update(vars(self), is_written=True)
        return written

    def _checked(self, value: Any, verb: str) -> Any:
        """Convert a value to the variable's dtype; raise if its dtype or shape does not fit."""
        if isinstance(value, Distributed) and current().replica is not None:
            value = value.component
        if isinstance(value, PerReplica):
            for part in _components(value):
                self._check_array(jnp.asarray(part), verb, exact=True)
            return value
        if isinstance(value, Variable):
            value = value.read_value()
        if isinstance(value, bool | int | float | complex) and self.shape == ():
            # Keeps its Python type: equal numbers on all replicas then need no aggregation.
            check_dtype(self, np.asarray(value), verb, exact=False)
            return value
        if isinstance(value, str | bytes):
            raise TypeError(
                f"{verb} of the text {value!r} to variable {self.name!r} of dtype"
                f" {self.dtype.name}: give a number or an array."
            )
        exact = isinstance(value, jax.Array | np.ndarray | np.generic)
        array: Any = value if is_traced(value) else jnp.asarray(private(value))
        self._check_array(array, verb, exact=exact)
        done = has_strong_dtype(array, self.dtype) or is_key(array)
        return array if done else array.astype(self.dtype)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} does not take item assignment: write `v[key].assign(value)`,"
            " or `v.assign(v.read_value().at[key].set(value))`."
        )

    def _check_array(self, array: jax.Array, verb: str, *, exact: bool) -> None:
        check_dtype(self, array, verb, exact=exact and not getattr(array, "weak_type", False))
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"{verb} of a value of shape {tuple(array.shape)} to variable {self.name!r} of"
                f" shape {self.shape}: the shapes must be equal. Use `jnp.broadcast_to(value,"
                f" {self.shape})` to repeat it."
            )

    # Copies.

    @property
    def components(self) -> tuple[Variable, ...]:
        """Each replica's copy, as a variable; the variable itself if it is not distributed."""
        return (self,)

    @property
    def whole(self) -> Variable:
        """The variable of which this is a copy; itself if it is not a copy."""
        return self._whole

    def __repr__(self) -> str:
        return self._row()

    def _repr_html_(self) -> str:
        placed = Placed.of_cell(self.cell, self.name)
        return placed.sheet("SyncOnReadVariable" if self.cell.per_replica else "Variable").to_html()

    def _head(self) -> str:
        return f"<rx.Variable '{self.name}' shape={self.shape} dtype={self.dtype.name}"

    def _row(self) -> str:
        value = self._policy.read()
        return self._head() + (">" if is_traced(value) else f", numpy={format_value(value)}>")

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> Variable:
        raise VariableError(f"copy.copy of {self.name!r} would share its value: use copy.deepcopy.")

    def __deepcopy__(self, memo: Any) -> Variable:
        copied: Variable = duplicate(self)
        live_variables.add(copied)
        return copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} cannot be pickled: its value is on the devices of its"
            " strategy. Pickle `variable.numpy()`, or save and restore it with"
            " `rx.train.Checkpoint`. A function for other processes must create its variables."
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Methods of arrays (sum, reshape, T, at, ...) act on the value; private names never do.
            if name.startswith("_") or not hasattr(jax.Array, name):
                return super().__getattr__(name)
            return getattr(self._policy.read(), name)


@final
class DistributedVariable(Variable, DistributedValues[Variable]):
    """A variable with a copy for each replica of a strategy; calling `Variable` creates it.

    For one device and for the default strategy, TensorFlow's variables are not distributed values,
    and neither are ours: they are plain `Variable` objects.
    """

    @property
    def values(self) -> tuple[Variable, ...]:
        """The copies of this process's replicas, as variables."""
        return self.components

    @property
    def components(self) -> tuple[Variable, ...]:
        """Each replica's copy, as a variable."""
        if self._components is None:
            own = self._strategy.devices_or_default.local_replicas
            self._components = tuple(_component(self, i) for i in range(len(own)))
        return self._components

    def __repr__(self) -> str:
        if self.cell.sharded:  # reading the value may need a collective
            return f"{self._head()}, in {self.cell.topology.num_replicas} parts>"  # type: ignore[union-attr]
        kind = "SyncOnReadVariable" if self._policy.cell.per_replica else "MirroredVariable"
        return format_components(kind, [c._row() for c in self.components])  # noqa: SLF001


def policy_for(
    cell: Cell, strategy: Any, aggregation: VariableAggregation, *, several: bool
) -> Policy:
    """Return the policy of a variable for one replica, or for several."""
    if not several:
        return PlainPolicy(cell)
    kind = OnReadPolicy if cell.per_replica else MirroredPolicy
    return kind(cell, strategy, aggregation)


def _component(whole: Variable, replica: int) -> Variable:
    part: Variable = object.__new__(Variable)
    vars(part).update(vars(whole))
    if not isinstance(whole._policy, PlainPolicy):  # noqa: SLF001 - else the only copy
        part._policy = ComponentPolicy(whole.cell, replica)  # noqa: SLF001
    part._whole = whole  # noqa: SLF001
    return part


def _components(value: PerReplica) -> tuple[Any, ...]:
    # In compiled code the other pieces need a collective; they have the same shape and dtype.
    return (value.form.piece,) if isinstance(value.form, InBody) else value.values


stands_for(Variable, lambda variable: variable.read_value())
identify(Variable, lambda variable: variable._policy)  # noqa: SLF001 - of what a write returns too


@cache
def _register_with_jax() -> None:  # on first use: probing JAX for support slows the import
    for kind in (Variable, DistributedVariable):
        accept_as_array(kind, lambda v: ShapedArray(v.shape, v.dtype), lambda v: v.read_value())
