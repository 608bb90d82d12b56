"""Distribution strategies and related classes, under TensorFlow's names.

Example:
    >>> rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
"""

from typing import TYPE_CHECKING

from replicax._lazy import ASYNCHRONOUS, on_demand
from replicax._types import ReduceOp
from replicax.collectives._cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax.collectives._options import RunOptions
from replicax.context._current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.context._replica import ReplicaContext
from replicax.strategy._distributing import ValueContext
from replicax.strategy._extended import StrategyExtended
from replicax.strategy._strategies import MirroredStrategy, OneDeviceStrategy, Strategy
from replicax.values._per_replica import DistributedValues, Mirrored, PerReplica
from replicax.values._structures import PerReplicaSpec

if TYPE_CHECKING:
    from replicax.compat.v1._strategies import InputIterator
    from replicax.distribute import cluster_resolver, experimental
    from replicax.input._distributed import DistributedDataset, DistributedIterator
    from replicax.input._options import InputContext, InputOptions, InputReplicationMode
    from replicax.strategy._multi_worker import MultiWorkerMirroredStrategy
    from replicax.strategy._tpu import TPUStrategy

__all__ = [
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputIterator",
    "InputOptions",
    "InputReplicationMode",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "ValueContext",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

__dir__ = __all__.copy

_HOMES = {
    "DistributedDataset": "replicax.input._distributed",
    "DistributedIterator": "replicax.input._distributed",
    "InputContext": "replicax.input._options",
    "InputIterator": "replicax.compat.v1._strategies",
    "InputOptions": "replicax.input._options",
    "InputReplicationMode": "replicax.input._options",
    "MultiWorkerMirroredStrategy": "replicax.strategy._multi_worker",
    "TPUStrategy": "replicax.strategy._tpu",
    "cluster_resolver": "replicax.distribute.cluster_resolver",
    "experimental": "replicax.distribute.experimental",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, ASYNCHRONOUS)
