"""The v1 form of MultiWorkerMirroredStrategy."""

from typing import Any, final

from replicax.cluster._resolver import ClusterResolver
from replicax.collectives._options import CommunicationImplementation, CommunicationOptions
from replicax.compat.v1._strategies import Strategy
from replicax.strategy._cluster import InCluster, OnWorkers, WorkersAllReduce


@final
class MultiWorkerMirroredStrategy(OnWorkers, Strategy):
    """Synchronous training on several machines; see `rx.distribute.MultiWorkerMirroredStrategy`.

    Args:
        communication: Which library moves the data; XLA chooses, whatever is named.
        cluster_resolver: Where to find the cluster; by default the environment.

    Example:
        >>> v1 = rx.compat.v1.distribute
        >>> v1.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync
        1
    """

    def __init__(
        self,
        communication: Any = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        self._cluster = InCluster(cluster_resolver)
        options = CommunicationOptions(implementation=communication)
        super().__init__(self._cluster.topology, WorkersAllReduce(options, self._cluster.topology))
