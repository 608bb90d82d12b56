"""Distribution strategies and related classes, under TensorFlow's names.

Example:
    >>> rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import ASYNCHRONOUS, on_demand
from replicax._src.base.types import ReduceOp
from replicax._src.collectives.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax._src.collectives.options import RunOptions
from replicax._src.context.current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax._src.context.replica import ReplicaContext
from replicax._src.strategy.distribute_methods import ValueContext
from replicax._src.strategy.extended import StrategyExtended
from replicax._src.strategy.strategies import MirroredStrategy, OneDeviceStrategy, Strategy
from replicax._src.values.per_replica import DistributedValues, Mirrored, PerReplica
from replicax._src.values.structures import PerReplicaSpec

if TYPE_CHECKING:
    from replicax._src.input.distributed_dataset import DistributedDataset, DistributedIterator
    from replicax._src.input.options import InputContext, InputOptions, InputReplicationMode
    from replicax._src.strategy.multi_worker import MultiWorkerMirroredStrategy
    from replicax._src.strategy.tpu import TPUStrategy
    from replicax._src.strategy.v1 import InputIterator
    from replicax.distribute import cluster_resolver, experimental

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
    "DistributedDataset": "replicax._src.input.distributed_dataset",
    "DistributedIterator": "replicax._src.input.distributed_dataset",
    "InputContext": "replicax._src.input.options",
    "InputIterator": "replicax._src.strategy.v1",
    "InputOptions": "replicax._src.input.options",
    "InputReplicationMode": "replicax._src.input.options",
    "MultiWorkerMirroredStrategy": "replicax._src.strategy.multi_worker",
    "TPUStrategy": "replicax._src.strategy.tpu",
    "cluster_resolver": "replicax.distribute.cluster_resolver",
    "experimental": "replicax.distribute.experimental",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, ASYNCHRONOUS)
