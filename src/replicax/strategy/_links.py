"""How one replica reaches the others: alone, in threads, or in compiled code.

What surrounds the code of one eager replica in its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._blocks import contextmanager
from replicax._jax_private import concrete
from replicax._types import ReduceOp
from replicax.collectives import _eager
from replicax.collectives._cross_device_ops import CrossDeviceOps
from replicax.collectives._options import CommunicationOptions
from replicax.collectives._subjects import Call
from replicax.context._current import entered
from replicax.context._replica import ReplicaContext
from replicax.state._levels import Overlay, ReplicaStorage, ending, generation, level
from replicax.topology._mesh import MESH_AXIS, REPLICA_AXIS, Across, Topology
from replicax.topology._virtual import sharing_programs
from replicax.values._per_replica import in_body, is_opaque
from replicax.values._pieces import equal_across, local_piece, summand
from replicax.values._placement import is_array, is_traced, on_device
from replicax.values._structures import regroup, select

if TYPE_CHECKING:
    from replicax.strategy._base import StrategyBase
    from replicax.topology._mesh import Topology


@dataclass(frozen=True)
class SoloLink:
    """The only replica: every collective is the identity."""

    topology: Topology | None

    @property
    def has_rows(self) -> bool:
        """It has all rows."""
        return True

    @property
    def across(self) -> Across:
        """There is nobody else; code for several replicas does not ask."""
        return MESH_AXIS

    @property
    def position(self) -> int:
        """The first: there is one replica."""
        return 0

    def replica_id(self) -> Any:
        """Zero, as a number that Python can look at."""
        with concrete():
            return jnp.zeros((), jnp.int32) if self.topology is not None else 0

    def device(self) -> jax.Device:
        """The strategy's device, or JAX's default."""
        return self.topology.leads[0] if self.topology else jax.local_devices()[0]

    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[jax.Array],
        options: CommunicationOptions,
        structure: str = "",
    ) -> list[jax.Array]:
        """The leaves themselves, as in TensorFlow; truth values as the count of one."""
        return [summand(ReduceOp.SUM, x) for x in leaves]

    def all_gather(
        self, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
    ) -> jax.Array:
        """The value itself: there is nobody to join."""
        return x

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any, context: ReplicaContext) -> Any:
        """Call it here."""
        with entered(strategy=context.strategy, replica=None):
            return fn(context.strategy, *args, **kwargs)


@dataclass(frozen=True)
class ThreadLink:
    """A replica that runs op by op in a thread of its own."""

    seat: _eager.Seat
    has_rows: bool = True

    @property
    def across(self) -> Across:
        """The collectives of this replica: meetings with the others' threads."""
        return _eager.SeatAcross(self.seat)

    @property
    def position(self) -> int:
        """The one of this thread."""
        return self.seat.replica

    def replica_id(self) -> Any:
        """This replica's number, as an array on its device that Python can look at."""
        with concrete():
            return on_device(jnp.int32(self.seat.number), self.seat.device)

    def device(self) -> jax.Device:
        """This replica's device."""
        return self.seat.device

    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[jax.Array],
        options: CommunicationOptions,
        structure: str = "",
    ) -> list[jax.Array]:
        """Meet the other replicas."""
        return _eager.all_reduce(self.seat, op, leaves, options, structure)

    def all_gather(
        self, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
    ) -> jax.Array:
        """Meet the other replicas."""
        return _eager.all_gather(self.seat, x, axis, options, structure)

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any, context: ReplicaContext) -> Any:
        """Meet the other replicas, and have it called on the thread that started them.

        Where JAX traces or differentiates this replica the others' values are no numbers here:
        each replica calls it then, as in compiled code.
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
            return [select(result, i) for i in range(len(topology.own))]

        called = Call(purpose, getattr(fn, "subject", {"merge_fn": fn}))
        return self.seat.meeting.meet(self.seat.replica, called, (args, kwargs), settle)

    def _with_own_numbers(self, call: Any, purpose: str) -> Any:
        """The call, with arrays for the numbers of Python's that shapes made differ."""
        leaves, treedef = jax.tree.flatten(call)
        places = [i for i, x in enumerate(leaves) if isinstance(x, int | float | complex)]
        if not places:
            return call
        topology = self.seat.topology

        def settle(rows: list[Any]) -> list[Any]:
            same = [
                all(repr(x) == repr(column[0]) for x in column)
                for column in zip(*rows, strict=True)
            ]
            told = repr([x if alike else None for x, alike in zip(rows[0], same, strict=True)])
            if not equal_across(told, topology, f"the numbers given to {purpose}"):
                same = [False] * len(same)
            return [same] * len(rows)

        numbers = [leaves[i] for i in places]
        comparing = Call(f"{purpose}, comparing {len(numbers)} numbers")
        same = self.seat.meeting.meet(self.seat.replica, comparing, numbers, settle)
        for place, alike in zip(places, same, strict=True):
            if not alike:
                leaves[place] = jnp.asarray(leaves[place])
        return jax.tree.unflatten(treedef, leaves)

    def _is_traced(self, call: Any) -> bool:
        where = level()
        kept = isinstance(where, Overlay)  # what is written stays in this replica until its end
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
        """One program is for one shape, which all replicas hold."""
        return True

    @property
    def across(self) -> Across:
        """The collectives of this replica: those of the mesh."""
        return MESH_AXIS

    @property
    def position(self) -> int | None:
        """None: the code is that of all replicas."""
        return None

    def replica_id(self) -> Any:
        """This replica's number, known when the program runs."""
        return jax.lax.axis_index(REPLICA_AXIS)

    def device(self) -> jax.Device:
        """The first replica's device."""
        return self.topology.leads[0]

    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[jax.Array],
        options: CommunicationOptions,
        structure: str = "",
    ) -> list[jax.Array]:
        """The strategy's cross-device ops, in the program."""
        values = [in_body(x, self.topology) for x in leaves]
        results = self.ops.batch_reduce(op, [(v, v) for v in values], options)
        return [local_piece(r) for r in results]

    def all_gather(
        self, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
    ) -> jax.Array:
        """An all-gather, in the program."""
        return MESH_AXIS.gather(x, axis)

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any, context: ReplicaContext) -> Any:
        """Call it here, as computation that is the same on all replicas."""
        return merge_in_body(fn, (args, kwargs), context, self.topology)


def merge_in_body(
    fn: Callable[..., Any], call: Any, context: ReplicaContext, topology: Topology
) -> Any:
    """Call ``fn`` for merge_call in code that is compiled: arguments are this replica's pieces."""
    wrap = lambda x: in_body(x, topology, context.across) if is_array(x) else x  # noqa: E731
    args, kwargs = jax.tree.map(wrap, call, is_leaf=is_opaque)
    with entered(replica=None, body=context):
        result = fn(context.strategy, *args, **kwargs)
    return jax.tree.map(local_piece, result, is_leaf=is_opaque)


@contextmanager
def as_replica(
    strategy: StrategyBase, topology: Topology, replica: int, *, has_rows: bool
) -> Iterator[None]:
    """Be replica number ``replica`` of this process until the block ends."""
    seat = _eager.Seat(topology, replica, strategy.cross_device_ops)
    context = ReplicaContext(strategy, ThreadLink(seat, has_rows))
    with (
        jax.default_device(seat.device),
        sharing_programs(),
        # A function that JAX traces here may look at the replica: do not share it with others.
        generation(("replica", topology, replica)),
        entered(
            strategy=strategy,
            replica=context,
            level=ReplicaStorage(topology, replica),
            body=None,
        ),
        ending(),
    ):
        yield
