"""`PerReplica` and `Mirrored`, the arguments and results of `Strategy.run`.

Such a value has one of four forms:

* `Pieces`: a tuple with each replica's value, of any shape or type;
* `Stacked`: one array with a row for each replica, which enters compiled code without a copy;
* `InBody`: this replica's piece, inside compiled code, where reading the others is a collective;
* `Joined`: one array that is equal on all replicas; the form of a mirrored value.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import PerReplicaError
from replicax._src.base.ops import StandIn, T_co, stands_for
from replicax._src.base.rendering import format_components
from replicax._src.base.weak import OrderedWeakSet
from replicax._src.compat.jax import accept_as_array, at_rest, dispatch_as_array, traced
from replicax._src.topology.mesh import MESH_AXIS, Across, Topology
from replicax._src.values.placement import (
    first,
    is_traced,
    is_weak,
    split,
    strong,
    unstack,
    values_table,
)
from replicax._src.workers import elastic, group


@dataclass(frozen=True)
class Pieces:
    """Each replica's value; arrays with a weak type are made strong.

    Compiled code cannot take weakly typed arrays of several devices, and eager code must see the
    same dtypes.
    """

    values: tuple[Any, ...]
    topology: Topology | None = None

    def __post_init__(self) -> None:
        if any(map(is_weak, self.values)):
            object.__setattr__(self, "values", tuple(map(strong, self.values)))

    @cached_property
    def all_specs(self) -> tuple[tuple[Any, ...], ...]:
        """The shape and dtype of each replica's array, of all processes; () for other objects."""
        if self.topology is None or self.topology.is_fully_addressable:
            return tuple((np.shape(v), v.dtype) if hasattr(v, "dtype") else () for v in self.values)
        own = [(np.shape(v), str(v.dtype)) if hasattr(v, "dtype") else () for v in self.values]
        answers = group.required().agree("the shapes of a per-replica value", own)
        return tuple((tuple(o[0]), o[1]) if o else () for one in answers for o in one)


@dataclass(frozen=True)
class Stacked:
    """One array with a row for each replica."""

    array: jax.Array
    topology: Topology

    @cached_property
    def values(self) -> tuple[Any, ...]:
        return unstack(self.array, self.topology)


@dataclass(frozen=True)
class InBody:
    """This replica's piece, inside compiled code."""

    piece: Any
    topology: Topology
    across: Across = MESH_AXIS

    def __post_init__(self) -> None:
        if is_weak(self.piece):
            object.__setattr__(self, "piece", strong(self.piece))

    @property
    def values(self) -> tuple[Any, ...]:
        # Gathering may wait for other replicas' threads, and `cached_property` in Python 3.11 holds
        # a lock while it computes, which would deadlock them.
        if (rows := vars(self).get("rows")) is None:
            rows = vars(self)["rows"] = self.across.gather(jnp.asarray(self.piece)[None], 0)
        return tuple(rows[i] for i in range(self.topology.num_replicas))


@dataclass(frozen=True)
class Joined:
    """One array that is the same on every device; the form of a mirrored value."""

    array: jax.Array
    topology: Topology

    @cached_property
    def one(self) -> jax.Array:
        """The first copy."""
        return self.array if is_traced(self.array) else first(self.array)

    @cached_property
    def values(self) -> tuple[Any, ...]:
        if is_traced(self.array):
            return (self.array,) * self.topology.num_replicas
        # Always return the same object for the first copy: a tape identifies arrays by `id`.
        return self.one, *split(self.array, self.topology)[1:]


class Lost(Pieces):
    """The form of a per-replica value whose workers have changed: some components are lost."""

    def __init__(self, topology: Topology) -> None:
        object.__setattr__(self, "topology", topology)

    @property
    def values(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        raise PerReplicaError(
            "This per-replica value was made before a worker was lost, and the components of that"
            " worker's replicas are gone. Reduce per-replica values inside the `rx.function` that"
            " makes them, and return the result."
        )


Form = Pieces | Stacked | InBody | Joined


class DistributedValues(Generic[T_co]):
    """A value with one component for each replica.

    Created by `Strategy.run`, by a distributed dataset, or by
    `Strategy.experimental_distribute_values_from_function`; accepted by `Strategy.run`,
    `Strategy.reduce` and `Strategy.gather`. It is a pytree whose leaves are the components. A
    variable created in the scope of a strategy is one too; its components are variables.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> ids = strategy.run(lambda: rx.distribute.get_replica_context().replica_id_in_sync_group)
        >>> isinstance(ids, rx.distribute.DistributedValues)
        True
        >>> [int(i) for i in ids.values]
        [0, 1]
        >>> with strategy.scope():
        ...     v = rx.Variable(1.0)
        >>> isinstance(v, rx.distribute.DistributedValues), [c.name for c in v.values]
        (True, ['Variable:0', 'Variable/replica_1:0'])
    """

    # Without `__slots__`: one subclass is also a `jax.Array`, whose layout excludes them.

    @property
    def values(self) -> tuple[T_co, ...]:
        """The components of this process's replicas, in the order of the replicas."""
        raise NotImplementedError


class Distributed(StandIn, DistributedValues[T_co]):
    """A distributed value other than a variable: an argument or result of `Strategy.run`."""

    stored: Form  # the stored components; `form` is how the running code sees them
    captured: Any  # the cell that makes it an input of compiled code that closes over it, or None

    def __init__(self, values: Sequence[T_co]) -> None:
        self.stored = Pieces(tuple(values))
        self.captured = None
        if elastic.is_on():
            _live.add(self)

    @property
    def form(self) -> Form:
        """The components as the running code sees them; in a trace, as inputs of the trace."""
        # Eager code, and values that already belong to the trace, need no conversion.
        if traced.value is at_rest or belongs_to_trace(self.stored):
            return self.stored
        return _execution.form(self)

    @property
    def topology(self) -> Topology | None:
        """The devices of the replicas, if they are known."""
        return self.stored.topology

    @classmethod
    def of(cls, form: Form) -> Self:
        """Return a value with the given form."""
        self = object.__new__(cls)
        self.stored, self.captured = form, None
        if elastic.is_on():
            _live.add(self)
        return self

    @property
    def values(self) -> tuple[T_co, ...]:
        """The components of this process's replicas, in the order of the replicas."""
        return self.form.values

    def __repr__(self) -> str:
        if isinstance(self.form, InBody):
            return f"{type(self).__name__}:{{this replica: {self.form.piece!r}}}"
        return format_components(type(self).__name__, [repr(v) for v in self.values])

    def _repr_html_(self) -> str:
        name = type(self).__name__
        form, kind = self.form, name.replace("MirroredResult", "PerReplica (Mirrored)")
        if isinstance(form, InBody):
            return values_table(kind, ("this one",), (form.piece,))
        own = form.topology.local_replicas if form.topology else range(len(form.values))
        return values_table(kind, own, form.values)

    @property
    def component(self) -> T_co:
        """The component of the running replica.

        Raises:
            TypeError: Outside of a replica function.
        """
        component: T_co = _execution.component(self)
        return component

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.component, dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.component)

    def __format__(self, format_spec: str) -> str:
        return format(self.component, format_spec) if format_spec else str(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # In a replica function that closes over it, it behaves like the replica's component.
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if not _acts_as_array(self):
                raise AttributeError(f"{_not_one(self)} It has no attribute {name!r}.")
            if name == "numpy":  # a method of TensorFlow's eager tensors, but not of JAX arrays
                return lambda: np.asarray(self.component)
            return getattr(self.component, name)


_live: OrderedWeakSet[Distributed] = OrderedWeakSet()  # only in elastic runs


def live_values() -> list[Distributed]:
    """Return all distributed values of an elastic run that are in use, without those in traces."""
    return [v for v in _live if not belongs_to_trace(v.stored)]


def belongs_to_trace(form: Form) -> bool:
    """Whether a value was made in a trace: its components are tracers, or one replica's piece."""
    if isinstance(form, Lost):
        return False
    if isinstance(form, Stacked | Joined):
        return is_traced(form.array)
    return isinstance(form, InBody) or any(map(is_traced, form.values))


class Execution(Protocol):
    """How the running code sees distributed values.

    The answers depend on the running replica and on the function that is being traced, which are
    concepts of higher layers. They implement this interface; see `replicax._src.wiring`.
    """

    @abstractmethod
    def form(self, value: Distributed) -> Form:
        """Return the components of `value`, made outside of the running trace, as inputs of it."""

    @abstractmethod
    def component(self, value: Distributed) -> Any:
        """Return the component of `value` for the running replica."""

    @abstractmethod
    def in_replica(self) -> bool:
        """Whether the running code belongs to one replica."""


_execution: Execution


def set_execution(execution: Execution) -> None:
    """Set the implementation of `Execution`; called once, by `replicax._src.wiring`."""
    global _execution
    _execution = execution


class PerReplica(Distributed[T_co]):
    """One value for each replica; the values may differ.

    Example:
        >>> rx.distribute.PerReplica([1, 2])
        PerReplica:{
          0: 1,
          1: 2
        }
    """


class Mirrored(Distributed[T_co]):
    """One value for each replica, equal on all.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     strategy.extended.broadcast_to(jnp.float32(3), ["CPU:0", "CPU:1"])
        Mirrored:{
          0: Array(3., dtype=float32),
          1: Array(3., dtype=float32)
        }
    """


if TYPE_CHECKING:  # type checkers see only the interface that it shares with other results
    _Array = object
else:
    _Array = jax.Array


class MirroredResult(PerReplica[T_co], Mirrored[T_co], _Array):
    """A result of a compiled step that is provably equal on all replicas; also a `jax.Array`.

    The state of functional training loops is such a value. Like every result it has a component
    for each replica. Wherever JAX, or a library on top of it, takes an array, it acts as the first
    replica's copy: a pytree leaf, an argument of transformations, an operand, a value to save.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> step = lambda x: rx.distribute.get_replica_context().all_reduce("SUM", x)
        >>> total = rx.function(lambda: strategy.run(step, args=(jnp.float32(3),)))()
        >>> isinstance(total, rx.distribute.Mirrored), len(total.values), total + 1
        (True, 2, Array(7., dtype=float32))
        >>> isinstance(total, jax.Array), jax.tree.map(jnp.add, [1.0], [total])
        (True, [Array(7., dtype=float32)])
    """

    __array_priority__ = 100  # like JAX arrays: NumPy then defers to their operators
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        # It begins as TensorFlow's result of a run does.
        components = format_components("PerReplica", [repr(v) for v in self.values])
        return f"{components} (Mirrored: equal on all replicas)"

    def __complex__(self) -> complex:
        return complex(self.component)  # type: ignore[call-overload, no-any-return]

    def __reduce__(self) -> Any:
        return self.component.__reduce__()  # pickles as a plain array, without its devices


# The result of a run for an array: one per replica, or the array if there is a single replica.
SomeArray = PerReplica[jax.Array] | jax.Array
# An array in functions that combine replicas' values.
AnyArray = Distributed[jax.Array] | jax.Array


def in_body(piece: Any, topology: Topology, across: Across = MESH_AXIS) -> PerReplica:
    """Return this replica's piece as the per-replica value that cross-replica code sees."""
    return PerReplica.of(InBody(piece, topology, across))


def stacked(array: jax.Array, topology: Topology) -> PerReplica:
    """Return the per-replica value whose components are the rows of `array`."""
    return PerReplica.of(Stacked(array, topology))


def pieces(values: Sequence[Any], topology: Topology) -> PerReplica:
    """Return the per-replica value with these components."""
    return PerReplica.of(Pieces(tuple(values), topology))


def result(form: Stacked | Joined) -> PerReplica:
    """Return the value that a run returns for an array that the replicas returned."""
    if isinstance(form, Stacked):
        return PerReplica.of(form)
    _register_with_jax()
    return MirroredResult.of(form)


def mirrored(array: jax.Array, topology: Topology) -> Mirrored:
    """Return the mirrored value of an array that is replicated over `topology`."""
    return Mirrored.of(Joined(array, topology))


def is_distributed(x: Any) -> bool:
    """Whether `x` is a distributed value, with one component for each replica."""
    return isinstance(x, Distributed)


def is_opaque(x: Any) -> bool:
    """Whether `x` must be treated as a pytree leaf.

    A class of another library decides for its objects by a method ``__rx_opaque__``; see
    `rx.extend.Integration`.
    """
    if isinstance(x, Distributed):
        return True
    ask = getattr(type(x), "__rx_opaque__", None)
    return ask is not None and bool(ask(x))


def is_result_leaf(x: Any) -> bool:
    """Whether `x` is a leaf of a function's result: None, or opaque."""
    return x is None or is_opaque(x)


def plain(x: Any) -> Any:
    """Return the array of a `MirroredResult`; any other value unchanged.

    Required where an array is stored or identified by `id`, in place of the result object.
    """
    return x.component if isinstance(x, MirroredResult) else x


def num_components(value: Distributed) -> int:
    """Return the number of components of the value in this process."""
    form = value.form
    return len(form.values) if isinstance(form, Pieces) else len(form.topology.local_replicas)


def is_ragged(x: Any) -> bool:
    """Whether `x` is a per-replica value whose arrays differ in shape or dtype."""
    if not isinstance(x, PerReplica) or not isinstance(x.form, Pieces):
        return False
    all_specs = x.form.all_specs
    return all(all_specs) and any(one != all_specs[0] for one in all_specs)


def is_text(x: Any) -> bool:
    """Whether `x` is or contains an array of strings, which no device can hold."""
    if isinstance(x, Distributed):
        return isinstance(x.form, Pieces) and any(map(is_text, x.form.values))
    return isinstance(x, np.ndarray) and x.dtype.kind in "OSUT"


def _acts_as_array(value: Distributed) -> bool:
    return isinstance(value, Mirrored) or _execution.in_replica()


def as_single_array(value: Distributed) -> Any:
    """Return a mirrored value as one array, across replicas.

    Raises:
        PerReplicaError: If it is a per-replica value. It is a TypeError, and a ValueError as in
            TensorFlow.
    """
    if not isinstance(value, Mirrored):
        raise PerReplicaError(_not_one(value))
    form = value.form
    return form.one if isinstance(form, Joined) else form.values[0]


def _not_one(value: Distributed) -> str:
    return (
        f"A {type(value).__name__} has one value for each replica and cannot be used as one array"
        " here. Combine the values with `strategy.reduce(op, value, axis=...)`, join them with"
        " `strategy.gather(value, axis=...)`, look at each with"
        " `strategy.experimental_local_results(value)`, or use it inside `strategy.run`. If it"
        " should be equal on all replicas, such as parameters after a step, it was computed from"
        " values that differ: all-reduce the gradients before they are applied."
    )


def _leaves(value: Distributed) -> tuple[tuple[Any, ...], Any]:
    form = value.form
    # Inside compiled code the only leaf is this replica's piece: a function mapped over the leaves
    # returns a piece again, without communication.
    if isinstance(form, InBody):
        return (form.piece,), _Local(form.topology, form.across)
    return form.values, form.topology


@dataclass(frozen=True)
class _Local:
    topology: Topology
    across: Across


def _register(kind: type[Distributed]) -> None:
    def rebuilt(where: Any, leaves: Sequence[Any]) -> Any:
        if isinstance(where, _Local):
            return kind.of(InBody(leaves[0], where.topology, where.across))
        return kind.of(Pieces(tuple(leaves), where))

    jax.tree_util.register_pytree_node(kind, _leaves, rebuilt)


def _component(value: MirroredResult[Any]) -> Any:
    return value.component


def _forward(kind: type, base: type) -> None:
    """Forward the attributes that `base` declares, and `kind` lacks, to the component."""
    known = {name for c in kind.__mro__ if c is not base for name in vars(c)}
    for name in vars(base).keys() - known - {"__weakref__"}:
        if name.startswith("__"):
            if callable(getattr(base, name)):
                setattr(kind, name, _method(name))
        else:
            setattr(kind, name, property(operator.attrgetter(f"component.{name}")))


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return getattr(self.component, name)(*args)

    method.__name__ = name
    return method


def _compared(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def compared(self: Any, other: Any) -> Any:
        if not _acts_as_array(self):
            return NotImplemented
        return op(self.component, other.component if is_distributed(other) else other)

    return compared


_register(PerReplica)
_register(Mirrored)
stands_for(Distributed, lambda value: value.component)
# Distributed values compare by identity; in a replica function their components are compared.
Distributed.__eq__ = _compared(operator.eq)  # type: ignore[method-assign]
Distributed.__ne__ = _compared(operator.ne)  # type: ignore[method-assign]
_forward(MirroredResult, jax.Array)


# Not a pytree node: a tree of such values has the same structure as the tree of their arrays.
@cache
def _register_with_jax() -> None:  # on first use: probing JAX for support would slow the import
    accept_as_array(MirroredResult, lambda value: jax.typeof(value.component), _component)
    dispatch_as_array(MirroredResult, _component)
