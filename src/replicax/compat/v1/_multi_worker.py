"""The v1 form of MultiWorkerMirroredStrategy."""

from typing import Any, final

from replicax.cluster._resolver import ClusterResolver
from replicax.collectives._options import CommunicationImplementation, CommunicationOptions
from replicax.compat.v1._strategies import Strategy
from replicax.strategy._cluster import InCluster, WorkersAllReduce


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on several machines; see `rx.distribute.MultiWorkerMirroredStrategy`.

    Args:
        communication: Which library moves the data; XLA chooses, whatever is named.
        cluster_resolver: Where to find the cluster; by default the environment.

    Example:
        >>> v1 = rx.compat.v1.distribute
        >>> v1.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync
        1
    """

    between_graph = True

    def __init__(
        self,
        communication: Any = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        self._cluster = InCluster(cluster_resolver)
        options = CommunicationOptions(implementation=communication)
        super().__init__(self._cluster.topology, WorkersAllReduce(options, self._cluster.topology))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The cluster, and which task of it this process is."""
        return self._cluster.resolver

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one of all workers that writes files."""
        return self._cluster.is_chief

    def _configured(self, config_proto: Any) -> Any:
        return self._cluster.configured(config_proto)
