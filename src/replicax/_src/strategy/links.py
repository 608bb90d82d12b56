"""Links: the connection of a replica to the others (none, between threads, in compiled code).

`as_replica` sets up the context of an eager replica in its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._src.base.managers import contextmanager
from replicax._src.base.types import ReduceOp
from replicax._src.collectives import eager
from replicax._src.collectives.consistency import Call
from replicax._src.collectives.cross_device_ops import CrossDeviceOps
from replicax._src.collectives.options import CommunicationOptions
from replicax._src.compat.jax import concrete
from replicax._src.context.current import entered
from replicax._src.context.replica import ReplicaContext
from replicax._src.state.levels import Overlay, ReplicaStorage, exit_callbacks, level, trace_key
from replicax._src.topology.mesh import MESH_AXIS, REPLICA_AXIS, Across, Topology
from replicax._src.topology.program_cache import sharing_programs
from replicax._src.values.per_replica import in_body, is_opaque
from replicax._src.values.placement import is_array, is_traced, on_device
from replicax._src.values.replica_functions import equal_across, local_piece, summand
from replicax._src.values.structures import map_in_order, regroup, select, unflatten_as

if TYPE_CHECKING:
    from replicax._src.strategy.base import StrategyBase
    from replicax._src.topology.mesh import Topology


@dataclass(frozen=True)
class SoloLink:
    """The only replica: every collective is the identity."""

    topology: Topology | None

    @property
    def has_rows(self) -> bool:
        """Always True."""
        return True

    @property
    def across(self) -> Across:
        """The mesh collectives, which code for a single replica never uses."""
        return MESH_AXIS

    @property
    def position(self) -> int:
        """0: the only replica."""
        return 0

    def replica_id(self) -> Any:
        """Return zero, as a concrete number."""
        with concrete():
            return jnp.zeros((), jnp.int32) if self.topology is not None else 0

    def device(self) -> jax.Device:
        """Return the strategy's device, or JAX's default."""
        return self.topology.primary_devices[0] if self.topology else jax.local_devices()[0]

    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[jax.Array],
        options: CommunicationOptions,
        structure: str = "",
    ) -> list[jax.Array]:
        """Return the leaves unchanged, as in TensorFlow; booleans as counts."""
        return [summand(ReduceOp.SUM, x) for x in leaves]

    def all_gather(
        self, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
    ) -> jax.Array:
        """Return the value unchanged."""
        return x

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any, context: ReplicaContext) -> Any:
        """Call `fn` directly, in cross-replica context."""
        with entered(strategy=context.strategy, replica=None):
            return fn(context.strategy, *args, **kwargs)


@dataclass(frozen=True)
class ThreadLink:
    """A replica that runs op by op in its own thread."""

    seat: eager.Seat
    has_rows: bool = True

    @property
    def across(self) -> Across:
        """The collectives of this replica: rendezvous with the other replicas' threads."""
        return eager.SeatAcross(self.seat)

    @property
    def position(self) -> int:
        """The index of this thread's replica in this process."""
        return self.seat.replica

    def replica_id(self) -> Any:
        """Return this replica's number, as a concrete array on its device."""
        with concrete():
            return on_device(jnp.int32(self.seat.number), self.seat.device)

    def device(self) -> jax.Device:
        """Return this replica's device."""
        return self.seat.device

    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[jax.Array],
        options: CommunicationOptions,
        structure: str = "",
    ) -> list[jax.Array]:
        """Reduce in a rendezvous with the other replicas."""
        return eager.all_reduce(self.seat, op, leaves, options, structure)

    def all_gather(
        self, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
    ) -> jax.Array:
        """Gather in a rendezvous with the other replicas."""
        return eager.all_gather(self.seat, x, axis, options, structure)

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any, context: ReplicaContext) -> Any:
        """Meet the other replicas; the thread that started them calls `fn` once.

        While JAX traces or differentiates this replica, the values of the others are not concrete:
        each replica then calls `fn` in its own trace, as in compiled code.
        """
        strategy, topology = context.strategy, self.seat.topology
        purpose = getattr(fn, "purpose", "merge_call")
        if not getattr(fn, "once", False) and self._is_traced((args, kwargs)):
            call = self._with_own_numbers((args, kwargs), purpose)
            return merge_in_body(fn, call, context, topology)

        def settle(calls: list[Any]) -> list[Any]:
            with entered(strategy=strategy, replica=None, level=None, body=None):
                merged_args, merged_kwargs = regroup(calls, topology)
                result = fn(strategy, *merged_args, **merged_kwargs)
            return [select(result, i) for i in range(len(topology.local_replicas))]

        called = Call(purpose, getattr(fn, "subject", {"merge_fn": fn}))
        return self.seat.rendezvous.meet(self.seat.replica, called, (args, kwargs), settle)

    def _with_own_numbers(self, call: Any, purpose: str) -> Any:
        """Return the call with Python numbers that differ between replicas converted to arrays."""
        leaves = jax.tree.leaves(call)
        places = [i for i, x in enumerate(leaves) if isinstance(x, int | float | complex)]
        if not places:
            return call
        topology = self.seat.topology

        def settle(rows: list[Any]) -> list[Any]:
            # By repr, because 1 and 1.0, or 0.0 and -0.0, are equal but not interchangeable.
            same = [
                all(repr(x) == repr(column[0]) for x in column)
                for column in zip(*rows, strict=True)
            ]
            shared = repr([x if alike else None for x, alike in zip(rows[0], same, strict=True)])
            # All workers must convert the same numbers: they are about to run one program.
            if not equal_across(shared, topology, f"the numbers given to {purpose}"):
                same = [False] * len(same)
            return [same] * len(rows)

        numbers = [leaves[i] for i in places]
        comparing = Call(f"{purpose}, comparing {len(numbers)} numbers")
        same = self.seat.rendezvous.meet(self.seat.replica, comparing, numbers, settle)
        for place, alike in zip(places, same, strict=True):
            if not alike:
                leaves[place] = jnp.asarray(leaves[place])
        return unflatten_as(call, leaves, lambda x: False)

    def _is_traced(self, call: Any) -> bool:
        where = level()
        kept = isinstance(where, Overlay)  # writes are buffered in this replica until it exits
        return (
            kept
            or not where.is_eager
            or any(map(is_traced, jax.tree.leaves(call, is_leaf=is_opaque)))
        )


@dataclass(frozen=True)
class CompiledLink:
    """A replica in a program that is compiled once for all of them."""

    topology: Topology
    ops: CrossDeviceOps

    @property
    def has_rows(self) -> bool:
        """Always True: the program has one shape for all replicas."""
        return True

    @property
    def across(self) -> Across:
        """The collectives of the mesh."""
        return MESH_AXIS

    @property
    def position(self) -> int | None:
        """None: the code is the same for all replicas."""
        return None

    def replica_id(self) -> Any:
        """Return this replica's number, known at run time."""
        return jax.lax.axis_index(REPLICA_AXIS)

    def device(self) -> jax.Device:
        """Return the first replica's device."""
        return self.topology.primary_devices[0]

    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[jax.Array],
        options: CommunicationOptions,
        structure: str = "",
    ) -> list[jax.Array]:
        """Reduce with the strategy's cross-device ops, in the program."""
        values = [in_body(x, self.topology) for x in leaves]
        results = self.ops.batch_reduce(op, [(v, v) for v in values], options)
        return [local_piece(r) for r in results]

    def all_gather(
        self, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
    ) -> jax.Array:
        """Gather in the program."""
        return MESH_AXIS.gather(x, axis)

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any, context: ReplicaContext) -> Any:
        """Call `fn` in the trace; its computation is the same on all replicas."""
        return merge_in_body(fn, (args, kwargs), context, self.topology)


def merge_in_body(
    fn: Callable[..., Any], call: Any, context: ReplicaContext, topology: Topology
) -> Any:
    """Call `fn` of a merge_call in compiled code: its arguments are this replica's pieces."""
    wrap = lambda x: in_body(x, topology, context.across) if is_array(x) else x  # noqa: E731
    args, kwargs = map_in_order(wrap, call, is_opaque)
    with entered(replica=None, body=context):
        result = fn(context.strategy, *args, **kwargs)
    return map_in_order(local_piece, result, is_opaque)


@contextmanager
def as_replica(
    strategy: StrategyBase,
    topology: Topology,
    replica: int,
    *,
    has_rows: bool,
    reduce_dtype: Any = None,
) -> Iterator[None]:
    """Run the code in the block as replica number `replica` of this process."""
    seat = eager.Seat(topology, replica, strategy.cross_device_ops, reduce_dtype)
    context = ReplicaContext(strategy, ThreadLink(seat, has_rows))
    with (
        jax.default_device(seat.device),
        sharing_programs(),
        # A function that JAX traces here may depend on the replica: do not share its jaxpr.
        trace_key(("replica", topology, replica)),
        entered(
            strategy=strategy,
            replica=context,
            level=ReplicaStorage(topology, replica),
            body=None,
        ),
        exit_callbacks(),
    ):
        yield
