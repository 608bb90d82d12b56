"""Strategies and what belongs to them, under TensorFlow's names.

Example:
    >>> rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
"""

from typing import NoReturn

from replicax._enums import ReduceOp
from replicax.collectives._cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
)
from replicax.collectives._options import RunOptions
from replicax.compat.v1._iterators import InputIterator
from replicax.context._current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.context._replica import ReplicaContext
from replicax.distribute import cluster_resolver, experimental
from replicax.input._distributed import DistributedDataset, DistributedIterator
from replicax.input._options import InputContext, InputOptions, InputReplicationMode
from replicax.strategy._extended import StrategyExtended
from replicax.strategy._mirrored import MirroredStrategy
from replicax.strategy._multi_worker import MultiWorkerMirroredStrategy
from replicax.strategy._one_device import OneDeviceStrategy
from replicax.strategy._tpu import TPUStrategy
from replicax.strategy._v2 import Strategy
from replicax.strategy._value_context import ValueContext
from replicax.values._per_replica import (
    DistributedValues,
    Mirrored,
    PerReplica,
    PerReplicaSpec,
)

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

_ABSENT = {
    "ParameterServerStrategy": "MirroredStrategy or MultiWorkerMirroredStrategy",
    "CentralStorageStrategy": "MirroredStrategy, which keeps a copy on each device",
}


def __getattr__(name: str) -> NoReturn:
    if name in _ABSENT:
        raise AttributeError(
            f"replicax has no {name}: it trains synchronously, with every variable on its"
            f" replicas' devices. Use {_ABSENT[name]}."
        )
    raise AttributeError(f"module 'replicax.distribute' has no attribute {name!r}")
