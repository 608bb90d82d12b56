"""`StrategyBase`: all strategy methods, written once against the topology."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar, overload

import jax
import jax.numpy as jnp

from replicax._src.base.advice import advise_caller
from replicax._src.base.errors import PlacementError, ScopeError, requires
from replicax._src.base.forks import is_forked, refuse_fork
from replicax._src.base.tracebacks import shorten
from replicax._src.base.types import AnyReduceOp, ReduceOp, VariablePolicy
from replicax._src.base.weak import OrderedWeakSet
from replicax._src.collectives.cross_device_ops import CrossDeviceOps, NcclAllReduce
from replicax._src.collectives.options import RunOptions, plain_reduction
from replicax._src.context.current import Scope, ScopeMethod, require_cross_replica, strategy_scope
from replicax._src.context.replica import ReplicaContext
from replicax._src.state.variables import value_of, variable_of
from replicax._src.strategy.device_methods import (
    DescriptionMethods,
    LogicalDeviceMethods,
    MeshMethods,
)
from replicax._src.strategy.distribute_methods import (
    DistributionMethods,
    Unknown,
    is_plain,
    plain_to_per_replica,
)
from replicax._src.strategy.extended import StrategyExtended
from replicax._src.strategy.links import SoloLink
from replicax._src.strategy.ragged_run import RaggedRun
from replicax._src.strategy.run import HostDrivenProgram, HostDrivenRun, LRUCache, run_replicas
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import (
    AnyArray,
    Distributed,
    PerReplica,
    SomeArray,
    is_distributed,
    is_opaque,
    is_ragged,
    is_result_leaf,
    pieces,
)
from replicax._src.values.reduce import (
    Axis,
    gather_slices,
    gather_value,
    is_slices,
    reduce_slices,
    reduce_value,
)
from replicax._src.values.sharded import checked_reduce_dtype, is_sharded
from replicax._src.values.structures import (
    expand_dataclasses,
    map_in_order,
    rebuild_dataclasses,
    unflatten_as,
)

_T = TypeVar("_T")


def default_ops(topology: Topology | None, *, sharded: bool) -> NcclAllReduce:
    """Return the ops that combine values of replicas, unless a strategy is given others."""
    if topology is not None and topology.cores > 1:
        # Gradients that are sharded over logical devices are not packed: that would reshard them.
        return NcclAllReduce(num_packs=0)
    return NcclAllReduce.for_variables(sharded=sharded)


live_strategies: OrderedWeakSet[StrategyBase] = OrderedWeakSet()


class StrategyBase(LogicalDeviceMethods, DistributionMethods, MeshMethods, DescriptionMethods):
    """The common base class of `rx.distribute.Strategy` and its v1 form."""

    # Whether `run` is compiled even in eager code.
    compiles_runs = False
    # Whether every worker runs its own program.
    between_graph = False
    # Whether the program called `scope` or `run` of any strategy; else it may have forgotten to.
    is_any_used: ClassVar[bool] = False

    def __init__(
        self,
        topology: Topology | None,
        cross_device_ops: CrossDeviceOps | None = None,
        variable_policy: VariablePolicy = "mirrored",
        reduce_dtype: Any = None,
    ) -> None:
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise ValueError(
                "cross_device_ops must be a rx.distribute.CrossDeviceOps, got"
                f" {cross_device_ops!r}."
            )
        if is_forked[0]:
            refuse_fork()
        self._topology = topology
        sharded, self.variable_policy = is_sharded(variable_policy), variable_policy
        self.reduce_dtype = checked_reduce_dtype(reduce_dtype, variable_policy)
        several = topology is not None and topology.cores > 1
        self.has_logical_devices |= several
        self.compiles_runs |= several  # XLA's partitioner needs a program
        self._ops = cross_device_ops or default_ops(topology, sharded=sharded)
        self._extended = StrategyExtended(self)
        self.host_driven_programs: LRUCache[HostDrivenProgram] = LRUCache()
        self.host_driven_runs: LRUCache[HostDrivenRun] = LRUCache()
        self.ragged_runs: LRUCache[RaggedRun] = LRUCache()
        self.solo_context = ReplicaContext(self, SoloLink(topology))
        live_strategies.add(self)

    @property
    def topology(self) -> Topology | None:
        """The topology: which devices form which replica; None for the default strategy."""
        return self._topology

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The algorithm that combines values of several replicas."""
        return self._ops

    @property
    def extended(self) -> StrategyExtended:
        """Methods for libraries: reductions with destinations, updates of single copies."""
        return self._extended

    @property
    def wraps_single(self) -> bool:
        """Whether values are per-replica values even with a single replica."""
        return self._topology is not None

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""
        topology = self.topology
        return topology.num_replicas if topology else 1

    @property
    def cluster_resolver(self) -> Any:
        """The cluster of a multi-worker strategy; None for the others."""
        return None

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes files for all workers."""
        return True

    def scope(self) -> Scope[Self]:
        """Make this strategy current: variables created in the block are distributed.

        The scope belongs to the current thread. It does not distribute computation; `run` does.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> with strategy.scope():
            ...     v = rx.Variable(1.0)
            >>> len(strategy.experimental_local_results(v))
            2
        """
        StrategyBase.is_any_used = True
        return Scope(self)

    if not TYPE_CHECKING:
        scope = ScopeMethod(scope)

    def __enter__(self) -> NoReturn:
        raise TypeError("A strategy is not a context manager: write `with strategy.scope():`.")

    def __exit__(self, *error: object) -> None: ...

    @overload
    def run(
        self,
        fn: Callable[..., Unknown],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any: ...

    @overload
    def run(
        self,
        fn: Callable[..., jax.Array],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> SomeArray: ...

    @overload
    def run(
        self,
        fn: Callable[..., tuple[jax.Array, jax.Array]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> tuple[SomeArray, SomeArray]: ...

    @overload
    def run(
        self,
        fn: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> tuple[SomeArray, SomeArray, SomeArray]: ...

    @overload
    def run(
        self,
        fn: Callable[..., dict[str, jax.Array]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> dict[str, SomeArray]: ...

    @overload
    def run(
        self,
        fn: Callable[..., None],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> None: ...

    @overload
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any: ...

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call ``fn`` on every replica.

        Inside an `rx.function`, or if ``fn`` is one, the replicas are compiled to one program.
        Otherwise they run as plain Python, op by op, where prints and breakpoints work.

        Args:
            fn: Called in replica context; see `rx.distribute.get_replica_context`.
            args: Its arguments. Of a distributed value, at any depth of a structure, each replica
                gets its component; other values are passed unchanged.
            kwargs: Its keyword arguments.
            options: Accepted; only `TPUStrategy` uses them.

        Returns:
            The structure that ``fn`` returned, with per-replica values as leaves. Python values
            that are equal on all replicas stay plain, and with one replica all values do.

        Raises:
            RuntimeError: Inside a replica function.
            ValueError: If ``args`` is not a sequence.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.run(lambda x: x * 2, args=(jnp.float32(3),))
            PerReplica:{
              0: Array(6., dtype=float32),
              1: Array(6., dtype=float32)
            }
        """
        require_cross_replica(self, "run")
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"args must be a list or tuple of the function's arguments, got {_brief(args)}; for"
                " one argument write `args=(x,)`, for two `args=(x, y)`."
            )
        if not callable(fn):
            raise TypeError(
                f"strategy.run needs a function, got {_brief(fn)}. Pass the function and its"
                " arguments, and let `run` call it on each replica: `strategy.run(fn, args=(x,))`,"
                " not `strategy.run(fn(x))`."
            )
        if not isinstance(kwargs, Mapping | None):
            raise TypeError(
                f"kwargs must be a dictionary of the function's keyword arguments, got {kwargs!r}."
            )
        StrategyBase.is_any_used = True
        if is_forked[0]:
            refuse_fork()
        self._check_static(args, kwargs)
        given, named = tuple(args), dict(kwargs or {})
        try:
            return run_replicas(self, fn, given, named)
        except Exception as error:
            raise shorten(advise_caller(error, fn, given, named))  # noqa: B904 - the same error

    def _check_static(self, args: Any, kwargs: Any) -> None:
        """Refuse batches that differ between replicas of several devices, which are one program."""
        if self._topology is None or self._topology.cores == 1:
            return
        if any(map(is_ragged, jax.tree.leaves((args, kwargs), is_leaf=is_opaque))):
            raise PlacementError(
                f"The replicas hold values of different shapes, such as a short last batch, and"
                f" {self} needs the same shapes on all replicas. Batch with `drop_remainder=True`."
            )

    @overload
    def gather(self, value: AnyArray, axis: int) -> jax.Array: ...

    @overload
    def gather(self, value: Any, axis: int) -> Any: ...

    @requires("axis", 2, "axis=0 joins the rows of all replicas.")
    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate the components of a per-replica value along an axis.

        Args:
            value: A result of `run`.
            axis: The axis along which to concatenate; the components may differ in size there.

        Raises:
            RuntimeError: Inside a replica function.
            ValueError: If a component has no such axis.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.gather(strategy.run(lambda: jnp.ones((1, 2))), axis=0).shape
            (2, 2)
        """
        require_cross_replica(self, "gather")
        with strategy_scope(self):
            return map_in_order(lambda v: self._gather_leaf(v, axis), value, _is_reducible)

    @overload
    def experimental_local_results(self, value: AnyArray) -> tuple[jax.Array, ...]: ...

    @overload
    def experimental_local_results(self, value: PerReplica[_T]) -> tuple[_T, ...]: ...

    @overload
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of a value that belong to this process's replicas.

        Args:
            value: A distributed value, a variable, or a structure of them, for which one
                structure per replica is returned; a value that is not distributed is its own
                only result.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.experimental_local_results(rx.distribute.PerReplica([1, 2]))
            (1, 2)
            >>> strategy.experimental_local_results(3)
            (3,)
        """
        tree = expand_dataclasses(value)
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_result_leaf)
        parts = [_parts(x) for x in leaves]
        if leaves and jax.tree_util.treedef_is_leaf(treedef):
            return parts[0]
        count = max(map(len, parts), default=1)
        if count == 1 and self.wraps_single:  # the structure contains no distributed value
            count = len(self.devices_or_default.local_replicas)
        rows = [[p[i] if len(p) == count else p[0] for p in parts] for i in range(count)]
        return tuple(rebuild_dataclasses(unflatten_as(tree, row, is_result_leaf)) for row in rows)

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of a v1 session configuration, adapted to this strategy.

        There are no sessions here; the method exists so that v1 programs need no change.
        """
        return self._configured(config_proto)

    def reduce_value(self, reduce_op: AnyReduceOp, value: Any, axis: Axis) -> Any:
        """Implement ``reduce``, in its v1 and its current form."""
        require_cross_replica(self, "reduce")
        op = ReduceOp.parse(reduce_op)
        with strategy_scope(self):
            return map_in_order(lambda v: self._reduce_leaf(op, v, axis), value, _is_reducible)

    def _gather_leaf(self, value: Any, axis: int) -> Any:
        topology = self.devices_or_default
        if is_slices(value):
            return gather_slices(value, axis, topology)
        if not topology.is_fully_addressable and is_plain(value):
            value = plain_to_per_replica(value, topology, "gather", once=True)
        return gather_value(value, axis, topology) if isinstance(value, PerReplica) else value

    def _reduce_leaf(self, op: ReduceOp, value: Any, axis: Axis) -> Any:
        """Reduce one leaf: slices, a variable, a distributed value, or a plain value."""
        topology = self.devices_or_default
        if is_slices(value):
            return reduce_slices(op, value, axis, topology)
        variable = variable_of(value)
        if variable is not None:
            value = variable
            if variable.cell.per_replica:
                value = pieces([c.read_value() for c in variable.components], topology)
        if not topology.is_fully_addressable and is_plain(value):
            once = op is ReduceOp.SUM and axis is None
            value = plain_to_per_replica(value, topology, f"reduce({op.name})", once=once)
        if isinstance(value, PerReplica):
            return reduce_value(op, value, axis, topology)
        if isinstance(value, Distributed):
            value = value.values[0]
        value = value_of(value)
        if axis is None:
            return plain_reduction(op, value, self.num_replicas_in_sync)
        # Every replica has the same value, and reduces it over the axis.
        same = pieces([jnp.asarray(value)] * len(topology.local_replicas), topology)
        return reduce_value(op, same, axis, topology)

    @property
    def devices_or_default(self) -> Topology:
        """The topology; for the default strategy, JAX's default device."""
        return self.topology or Topology((jax.local_devices()[0],))

    def _configured(self, config_proto: Any) -> Any:
        changed = copy.deepcopy(config_proto)
        changed.isolate_session_state = True
        return changed

    def __copy__(self) -> NoReturn:
        raise ScopeError(
            "A strategy cannot be copied: variables and datasets belong to one strategy object."
            " Use it itself, or make a new one."
        )

    def __deepcopy__(self, memo: Any) -> StrategyBase:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A strategy cannot be pickled: it holds the devices of this process. Create it in each"
            " process, inside of the function that runs there."
        )


def _parts(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Distributed):
        return x.values
    variable = variable_of(x)
    return (x,) if variable is None else variable.components


def _brief(x: Any) -> str:
    """Return a value's type, and its repr if that is short."""
    text, kind = repr(x), type(x).__name__
    return f"{text} ({kind})" if len(text) <= 60 and "\n" not in text else f"a value of type {kind}"


def _is_reducible(x: Any) -> bool:
    """Whether `reduce` and `gather` take `x` as one value, not as a structure."""
    return is_distributed(x) or is_slices(x)
