"""MultiWorkerMirroredStrategy: a replica for each device of every worker."""

from typing import Any

from replicax.cluster._resolver import ClusterResolver
from replicax.collectives._options import CommunicationImplementation, CommunicationOptions
from replicax.strategy._cluster import InCluster, OnWorkers, WorkersAllReduce
from replicax.strategy._v2 import Strategy
from replicax.values._cut import is_sharded


class MultiWorkerMirroredStrategy(OnWorkers, Strategy):
    """Synchronous training on the devices of several machines.

    Each variable has a copy on every device of every worker, and the copies are kept equal. Every
    worker runs the same program; which of them it is says ``TF_CONFIG``, a resolver, or the
    scheduler that started it. Without a cluster there is one worker.

    A worker takes all of its GPUs, else one CPU device, or ``REPLICAX_CPU_DEVICES`` of them.

    Args:
        cluster_resolver: Where to find the cluster; by default the environment.
        communication_options: How to pack and move data between workers.
        variable_policy: ``"mirrored"``, or ``"sharded"`` as for `MirroredStrategy`. Across workers,
            reading a sharded variable outside of `run` is something that all workers must do.

    Raises:
        ClusterError: If the cluster makes no sense, or its workers do not come together.
        RuntimeError: If JAX has already started: make the strategy first.

    Example:
        >>> strategy = rx.distribute.MultiWorkerMirroredStrategy()  # no cluster: one worker
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        variable_policy: str = "mirrored",
    ) -> None:
        sharded = is_sharded(variable_policy)
        self._cluster = InCluster(cluster_resolver)
        topology = self._cluster.topology
        ops = WorkersAllReduce(communication_options, topology, sharded=sharded)
        super().__init__(topology, ops, variable_policy)


class _OlderForm(type(MultiWorkerMirroredStrategy)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, MultiWorkerMirroredStrategy)


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy, metaclass=_OlderForm):
    """The older form of `rx.distribute.MultiWorkerMirroredStrategy`; all are instances of it.

    Args:
        communication: Which library moves the data; XLA chooses, whatever is named.
        cluster_resolver: Where to find the cluster; by default the environment.

    Example:
        >>> strategy = rx.distribute.experimental.MultiWorkerMirroredStrategy(
        ...     communication=rx.distribute.experimental.CollectiveCommunication.RING
        ... )
        >>> isinstance(strategy, rx.distribute.MultiWorkerMirroredStrategy)
        True
    """

    def __init__(
        self,
        communication: Any = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))
