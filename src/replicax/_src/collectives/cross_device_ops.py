"""Cross-device ops: algorithms that reduce the replicas' values to one on all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src.base.types import AnyReduceOp, ReduceOp
from replicax._src.collectives.options import (
    CommunicationOptions,
    Pairs,
    check_destinations,
    checked_pairs,
    common_topology,
    deliver,
    joined_slices,
    place,
    plain_reduction,
    replicas_of,
)
from replicax._src.collectives.packing import WITHIN_PROCESS, Packing, for_sharded_variables, packed
from replicax._src.topology.devices import resolve
from replicax._src.topology.mesh import (
    MESH_AXIS,
    REPLICA_AXIS,
    Across,
    Topology,
    sum_of_gathered,
    sum_over_mesh,
)
from replicax._src.values.per_replica import (
    InBody,
    Mirrored,
    PerReplica,
)
from replicax._src.values.reduce import is_slices
from replicax._src.values.replica_functions import apply_in_body, local_piece, mean_dtype, summand

Leaves = list[jax.Array]


class CrossDeviceOps:
    """An algorithm that combines values; derive from it, or from a subclass, to write your own.

    `rx.extend.CollectiveOps` needs one method. To derive from this class, override
    ``reduce_implementation``, ``batch_reduce_implementation`` and ``broadcast_implementation``. In
    eager code they get all replicas' values; while a compiled
    function is traced they get this replica's value. In both cases the per-replica value can be
    passed on to the ops of this module.

    Example:
        >>> class Logged(rx.distribute.ReductionToOneDevice):
        ...     def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        ...         calls.append(len(value_destination_pairs))
        ...         return super().batch_reduce_implementation(
        ...             reduce_op, value_destination_pairs, options
        ...         )
        >>> calls = []
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], Logged())
        >>> total = strategy.run(
        ...     lambda: rx.distribute.get_replica_context().all_reduce("SUM", jnp.ones(()))
        ... )
        >>> calls
        [1]
    """

    def reduce(
        self,
        reduce_op: AnyReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce one per-replica value.

        Args:
            reduce_op: SUM or MEAN.
            per_replica_value: A per-replica value; a plain value is its own mean. For
                `rx.IndexedSlices` the rows of all replicas are concatenated.
            destinations: Where to put the result: a variable, a distributed value, a device's
                name or a list of them.
            options: How to pack and transfer the data.

        Raises:
            ValueError: Without destinations, or for the sum of a plain value.
        """
        check_destinations(destinations)
        op, options = ReduceOp.parse(reduce_op), options or CommunicationOptions()
        if is_slices(per_replica_value) and isinstance(per_replica_value.values, PerReplica):
            return joined_slices(op, per_replica_value, destinations)
        if not isinstance(per_replica_value, PerReplica):
            return plain_reduction(op, per_replica_value, replicas_of(destinations))
        return self.reduce_implementation(op, per_replica_value, destinations, options)

    def batch_reduce(
        self,
        reduce_op: AnyReduceOp,
        value_destination_pairs: Pairs,
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several per-replica values, packed where that is faster.

        Args:
            reduce_op: SUM or MEAN.
            value_destination_pairs: A list of (per-replica value, destinations).
            options: How to pack and transfer the data.

        Raises:
            ValueError: If ``value_destination_pairs`` is not a list of pairs.
        """
        pairs = checked_pairs(value_destination_pairs)
        op, options = ReduceOp.parse(reduce_op), options or CommunicationOptions()
        if not pairs:
            return []
        if all(isinstance(v, PerReplica) for v, _ in pairs):
            return self.batch_reduce_implementation(op, pairs, options)
        return [self.reduce(op, v, d, options) for v, d in pairs]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to all destinations."""
        check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Implement `reduce` for checked arguments."""
        raise NotImplementedError(_abstract(self, "reduce_implementation"))

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Any]:
        """Implement `batch_reduce` for checked arguments."""
        raise NotImplementedError(_abstract(self, "batch_reduce_implementation"))

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Implement `broadcast` for checked arguments."""
        return place(tensor, destinations)


class CollectiveOps(CrossDeviceOps):
    """An all-reduce algorithm: one function that runs on every replica, inside compiled code.

    Derive from it and implement `sum_replicas`. The same function then serves `all_reduce`,
    `reduce_to`, gradients of optimizers and eager code; means, packing of batches and destinations
    are done for it.

    Example:
        >>> class Float16AllReduce(rx.extend.CollectiveOps):
        ...     def sum_replicas(self, leaves, options, topology):
        ...         half = [x.astype("float16") for x in leaves]
        ...         sums = jax.lax.psum(half, rx.extend.REPLICA_AXIS)
        ...         return [s.astype(x.dtype) for s, x in zip(sums, leaves)]
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], Float16AllReduce())
        >>> one_third = lambda: rx.distribute.get_replica_context().all_reduce("SUM", 1 / 3)
        >>> strategy.run(one_third).values[0]
        Array(0.6665039, dtype=float32)
    """

    def sum_replicas(
        self, leaves: Leaves, options: CommunicationOptions, topology: Topology
    ) -> Leaves:
        """Return the sum of each leaf over the replicas.

        It is traced inside `jax.shard_map`, so it uses JAX's collectives over the mesh axis
        `rx.extend.REPLICA_AXIS`, and must return the same arrays on every replica.

        Args:
            leaves: The arrays of this replica.
            options: How to pack and transfer the data.
            topology: The replicas.
        """
        raise NotImplementedError(_abstract(self, "sum_replicas"))

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduce the value as a batch of one."""
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Any]:
        """Reduce all values of the batch in one compiled call."""
        topology = common_topology(value_destination_pairs)
        values = [v for v, _ in value_destination_pairs]
        form = values[0].form
        if isinstance(form, InBody) and form.across is not MESH_AXIS:
            return _reduce_in_rendezvous(reduce_op, values, form.across, topology)
        plan = _Plan(self, reduce_op, options, topology)
        results = apply_in_body(plan, values, topology)
        return [deliver(r, d) for r, (_, d) in zip(results, value_destination_pairs, strict=True)]


def _reduce_in_rendezvous(
    op: ReduceOp, values: Sequence[PerReplica], across: Across, topology: Topology
) -> list[Any]:
    """Reduce in a rendezvous of replicas that are compiled separately."""
    is_mean, size = op is ReduceOp.MEAN, topology.num_replicas
    leaves = [jnp.asarray(local_piece(v)) for v in values]
    sums = across.sum([summand(op, x) for x in leaves])
    if is_mean:
        sums = [(s / size).astype(mean_dtype(x.dtype)) for s, x in zip(sums, leaves, strict=True)]
    return [Mirrored.of(InBody(x, topology, across)) for x in sums]


@dataclass(frozen=True)
class _Plan:
    """A reduction as a hashable function of this replica's pieces."""

    ops: CollectiveOps
    op: ReduceOp
    options: CommunicationOptions
    topology: Topology

    @property
    def purpose(self) -> str:
        """Its description in messages."""
        return f"all_reduce({self.op.name})"

    def __call__(self, leaves: Leaves) -> Leaves:
        # XLA's compiler for CPUs crashes with JAX 0.11 if a program packs or combines the sums of
        # empty arrays and others.
        reduced = iter(self._reduced([x for x in leaves if x.size]))
        return [next(reduced) if x.size else self._reduced_empty(x) for x in leaves]

    def _reduced_empty(self, x: jax.Array) -> jax.Array:
        dtype = mean_dtype(x.dtype) if self.op is ReduceOp.MEAN else summand(self.op, x).dtype
        return jnp.zeros(x.shape, dtype)

    def _reduced(self, leaves: Leaves) -> Leaves:
        if not leaves:
            return []
        dtypes = [mean_dtype(x.dtype) for x in leaves]
        leaves = [summand(self.op, x) for x in leaves]
        if self.op is ReduceOp.SUM:
            return self.ops.sum_replicas(leaves, self.options, self.topology)
        size, is_whole = self.topology.num_replicas, self.topology.is_fully_addressable
        # Across workers, results become rows of stacked arrays. XLA divides a sum in place only if
        # nothing reshapes it afterwards, so the row axis is added before the sum.
        leaves = leaves if is_whole else [x[None] for x in leaves]
        sums = self.ops.sum_replicas(leaves, self.options, self.topology)
        means = [(s / size).astype(d) for s, d in zip(sums, dtypes, strict=True)]
        return means if is_whole else [x[0] for x in means]


class NcclAllReduce(CollectiveOps):
    """One all-reduce over all replicas; the default, on every platform.

    On GPUs XLA runs it with NCCL. Elsewhere it is the platform's own all-reduce.

    Args:
        num_packs: 1 packs small values into one all-reduce; 0 packs nothing; more packs all values,
            including large ones, into about that many.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(
        ...     ["CPU:0", "CPU:1"], cross_device_ops=rx.distribute.NcclAllReduce(num_packs=2)
        ... )
    """

    packing: Packing = WITHIN_PROCESS

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = _checked_packs(num_packs)

    @classmethod
    def for_variables(cls, *, sharded: bool) -> "NcclAllReduce":
        """Return ops for the gradients of mirrored variables, or of sharded ones."""
        ops = cls()
        if sharded:
            ops.packing = for_sharded_variables(ops.packing)
        return ops

    def sum_replicas(
        self, leaves: Leaves, options: CommunicationOptions, topology: Topology
    ) -> Leaves:
        """Sum each pack by an all-reduce, or by all-gather and a local sum if that is faster."""
        return packed(
            partial(self._sum_of_packs, topology.num_replicas),
            leaves,
            bytes_per_pack=options.bytes_per_pack,
            num_packs=self.num_packs,
            packing=self.packing,
        )

    def _sum_of_packs(self, num_replicas: int, packs: Leaves) -> Leaves:
        is_gathered = [self.packing.is_gathered(x, num_replicas) for x in packs]
        pairs = list(zip(packs, is_gathered, strict=True))
        sums = iter(sum_over_mesh([x for x, gathered in pairs if not gathered]))
        return [sum_of_gathered(x) if gathered else next(sums) for x, gathered in pairs]


class HierarchicalCopyAllReduce(CollectiveOps):
    """All-reduce in two steps: within each half of the replicas, then between the halves.

    For machines whose devices form two groups with fast links inside. With an odd number of
    replicas, or fewer than four, there is one group.

    Args:
        num_packs: As for `NcclAllReduce`.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(
        ...     ["CPU:0", "CPU:1"], cross_device_ops=rx.distribute.HierarchicalCopyAllReduce()
        ... )
    """

    def __init__(self, num_packs: int = 1) -> None:
        self.num_packs = _checked_packs(num_packs)

    def sum_replicas(
        self, leaves: Leaves, options: CommunicationOptions, topology: Topology
    ) -> Leaves:
        """Sum each pack by two grouped all-reduces."""
        size = topology.num_replicas
        half = size // 2
        inside: list[list[int]] | None = None
        across: list[list[int]] | None = None
        if size >= 4 and size % 2 == 0:
            inside = [list(range(half)), list(range(half, size))]
            across = [[i, i + half] for i in range(half)]

        def two_steps(flat: Leaves) -> Leaves:
            flat = sum_over_mesh(flat, inside)
            return sum_over_mesh(flat, across) if across else flat

        return packed(
            two_steps, leaves, bytes_per_pack=options.bytes_per_pack, num_packs=self.num_packs
        )


class ReductionToOneDevice(CollectiveOps):
    """Sum on one device, then copy the result to all.

    Args:
        reduce_to_device: The device that sums, which must be a replica's; otherwise (for example
            the host of GPUs), and by default, the first replica's.
        accumulation_fn: Combines the list of all replicas' values; their sum by default.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(
        ...     ["CPU:0", "CPU:1"], cross_device_ops=rx.distribute.ReductionToOneDevice()
        ... )
    """

    def __init__(
        self,
        reduce_to_device: str | jax.Device | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        self.reduce_to_device = reduce_to_device
        self.accumulation_fn = accumulation_fn

    def sum_replicas(
        self, leaves: Leaves, options: CommunicationOptions, topology: Topology
    ) -> Leaves:
        """Sum along a tree of copies to one replica, then broadcast along a tree from it."""
        size = topology.num_replicas
        if self.accumulation_fn is not None:
            accumulate = self.accumulation_fn
            rows = [jax.lax.all_gather(x, REPLICA_AXIS) for x in leaves]
            return [accumulate([r[i] for i in range(size)]) for r in rows]
        root = self._root(topology)
        return [_broadcast_from(root, _sum_to(root, x, size), size) for x in leaves]

    def _root(self, topology: Topology) -> int:
        if self.reduce_to_device is None:
            return 0
        device = resolve(self.reduce_to_device)
        return topology.devices.index(device) if device in topology.devices else 0


def _sum_to(root: int, x: jax.Array, size: int) -> jax.Array:
    """Sum over the replicas along a binary tree; only replica `root` gets the total."""
    step = 1
    while step < size:
        moves = [
            ((root + i + step) % size, (root + i) % size)
            for i in range(0, size, 2 * step)
            if i + step < size
        ]
        # All replicas run this addition: `ppermute` returns zeros where nothing is received.
        x = x + jax.lax.ppermute(x, REPLICA_AXIS, moves)
        step *= 2
    return x


def _broadcast_from(root: int, x: jax.Array, size: int) -> jax.Array:
    """Copy the value of replica `root` to all along a binary tree."""
    rank = (jax.lax.axis_index(REPLICA_AXIS) - root) % size
    step = 1
    while step < size:
        moves = [
            ((root + i) % size, (root + i + step) % size) for i in range(step) if i + step < size
        ]
        arrived = jax.lax.ppermute(x, REPLICA_AXIS, moves)
        # Each step doubles the number of replicas that have the value.
        x = jnp.where((rank >= step) & (rank < 2 * step), arrived, x)
        step *= 2
    return x


def _checked_packs(num_packs: int) -> int:
    if num_packs < 0:
        raise ValueError(f"num_packs must be 0 or more, got {num_packs}.")
    return num_packs


def _abstract(ops: CrossDeviceOps, method: str) -> str:
    return (
        f"{type(ops).__name__} does not define {method}. Define it; or derive from"
        " rx.extend.CollectiveOps, which needs one method, or from rx.distribute.NcclAllReduce,"
        " HierarchicalCopyAllReduce or ReductionToOneDevice."
    )
