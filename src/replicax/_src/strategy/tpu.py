"""`TPUStrategy`: replicas on a TPU slice, each with one or several logical devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import jax

from replicax._src.base.errors import PlacementError
from replicax._src.base.managers import contextmanager
from replicax._src.base.types import AnyReduceOp
from replicax._src.collectives.cross_device_ops import NcclAllReduce
from replicax._src.collectives.options import RunOptions
from replicax._src.strategy.across_workers import AcrossWorkers
from replicax._src.strategy.extended import StrategyExtended
from replicax._src.strategy.strategies import Strategy
from replicax._src.topology.device_assignment import DeviceAssignment
from replicax._src.topology.tpu_slice import current_slice
from replicax._src.topology.tpu_system import TPUClusterResolver, require_local
from replicax._src.values.per_replica import is_opaque, is_ragged
from replicax._src.values.placement import is_traced, on_device
from replicax._src.values.reduce import Axis


class SliceExtended(StrategyExtended):
    """Strategy methods for libraries, including those that only TPU strategies have."""

    @property
    def num_replicas_per_host(self) -> int:
        """The number of replicas in this process."""
        topology = self._strategy.topology
        return 1 if topology is None else len(topology.local_replicas)

    @property
    def tpu_hardware_feature(self) -> Any:
        """The hardware features reported by the resolver."""
        resolver: Any = getattr(self._strategy, "cluster_resolver", None)
        return None if resolver is None else resolver.tpu_hardware_feature

    @contextmanager
    def experimental_logical_device(self, logical_device_id: int) -> Iterator[None]:
        """Place variables and operations of the block on one logical device of each replica.

        XLA compiles one program for all logical devices, so each of them has the values, including
        the requested one; see `experimental_assign_to_logical_device`.

        Raises:
            ValueError: If a replica has no logical device with that number.
        """
        topology = self._strategy.topology
        cores = 1 if topology is None else topology.cores
        if not 0 <= logical_device_id < cores:
            raise ValueError(
                f"There is no logical device {logical_device_id}: each replica has {cores}, counted"
                " from 0."
            )
        yield


class OnSlice(AcrossWorkers):
    """The common base class of TPU strategies, which differ in the names of their arguments."""

    has_logical_devices = True
    compiles_runs = True

    def __init__(
        self, resolver: TPUClusterResolver | None, assignment: DeviceAssignment | None
    ) -> None:
        require_local(resolver)
        topology = current_slice().laid_out(assignment)
        # Gradients that are sharded over logical devices are not packed: that would reshard them,
        # and the TPU compiler combines small all-reduces automatically.
        packs = 1 if topology.cores == 1 else 0
        super().__init__(topology, NcclAllReduce(num_packs=packs))
        self._resolver = resolver or TPUClusterResolver("local")
        self._on_slice = SliceExtended(self)

    @property
    def extended(self) -> SliceExtended:
        """Strategy methods for libraries, including those that only TPU strategies have."""
        return self._on_slice

    @property
    def cluster_resolver(self) -> TPUClusterResolver:
        """The resolver of the TPU."""
        return self._resolver

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call ``fn`` on every replica, always as one compiled program.

        In TensorFlow ``fn`` has to be a ``tf.function`` here. A plain function is compiled
        automatically, once for each signature of its arguments.

        Args:
            fn: Called in replica context; see `rx.distribute.get_replica_context`.
            args: Its arguments; of a distributed value each replica gets its component.
            kwargs: Its keyword arguments.
            options: See `rx.distribute.RunOptions`.

        Returns:
            The structure that ``fn`` returned, with per-replica values in it.

        Raises:
            ValueError: If the replicas hold different shapes, such as after a short last batch,
                and either `RunOptions` forbids it or a replica has several logical devices.

        Example:
            >>> strategy = rx.distribute.TPUStrategy()
            >>> traced = []
            >>> def double(x):
            ...     traced.append(x)
            ...     return x * 2
            >>> for i in range(3):
            ...     y = strategy.run(double, args=(jnp.float32(i),))
            >>> len(traced), float(strategy.reduce("MEAN", y, axis=None))
            (1, 4.0)
        """
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_opaque)
        if any(map(is_ragged, leaves)):
            self._check_dynamic(options or RunOptions())
        return super().run(fn, args, kwargs)

    def reduce(self, reduce_op: AnyReduceOp, value: Any, axis: Axis) -> Any:
        """Reduce a per-replica value to one value, in host memory.

        Args:
            reduce_op: SUM or MEAN, as an enum member or a string.
            value: A result of `run`.
            axis: Also reduce over this axis of each replica's value; None for no axis.

        Returns:
            One value of the same structure, on the host's CPU.

        Example:
            >>> strategy = rx.distribute.TPUStrategy()
            >>> total = strategy.reduce("SUM", strategy.run(lambda: jnp.ones(2)), axis=None)
            >>> total.tolist(), rx.device_name(total)
            ([8.0, 8.0], '/job:localhost/replica:0/task:0/device:CPU:0')
        """
        return jax.tree.map(_to_host, self.reduce_value(reduce_op, value, axis))

    def _check_dynamic(self, options: RunOptions) -> None:
        if self.extended.experimental_require_static_shapes:
            reason = f"{self} needs the same shapes on all replicas"
        elif not options.allows_dynamic_batch:
            reason = "the RunOptions of this run allow one batch size only"
        else:
            return
        raise PlacementError(
            f"The replicas hold values of different shapes, such as a short last batch, and"
            f" {reason}. Batch with `drop_remainder=True`."
        )


@final
class TPUStrategy(OnSlice, Strategy):
    """Synchronous training on a TPU slice, or on virtual CPU devices in its place.

    Args:
        tpu_cluster_resolver: The TPU; by default the one of this machine.
        experimental_device_assignment: Which cores form which replica; one replica on each core by
            default. With several cores per replica, these are its logical devices.
        experimental_spmd_xla_partitioning: Accepted for compatibility with TensorFlow: XLA's SPMD
            partitioner is the only one here.

    Raises:
        ValueError: If the assignment is for another slice, or the TPU is on another machine.

    Example:
        >>> strategy = rx.distribute.TPUStrategy()
        >>> strategy.num_replicas_in_sync
        8
        >>> strategy.extended.worker_devices[7]
        '/job:localhost/replica:0/task:0/device:TPU:7'
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        del experimental_spmd_xla_partitioning
        super().__init__(tpu_cluster_resolver, experimental_device_assignment)


@final
class ExperimentalTPUStrategy(OnSlice, Strategy):
    """`rx.distribute.TPUStrategy` with its original argument names.

    Args:
        tpu_cluster_resolver: The TPU; by default the one of this machine.
        device_assignment: Which cores form which replica; one replica on each core by default.

    Example:
        >>> resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
        >>> topology = rx.tpu.experimental.initialize_tpu_system(resolver)
        >>> assignment = rx.tpu.experimental.DeviceAssignment.build(
        ...     topology, computation_shape=[1, 1, 2], num_replicas=4
        ... )
        >>> rx.distribute.experimental.TPUStrategy(resolver, device_assignment=assignment)
        <TPUStrategy of 4 replicas of 2 logical devices>
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


def _to_host(x: Any) -> Any:
    if not isinstance(x, jax.Array) or is_traced(x):
        return x
    host = jax.local_devices(backend="cpu")[0]
    return x if x.devices() == {host} else on_device(x, host)
