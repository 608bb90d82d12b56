"""Strategies with the methods of TensorFlow 1.

Example:
    >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(()))))
    2.0
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
from replicax._src.input.options import InputContext, InputReplicationMode
from replicax._src.strategy.extended import StrategyExtended
from replicax._src.strategy.v1 import MirroredStrategy, OneDeviceStrategy, Strategy
from replicax.compat.v1.distribute import experimental

if TYPE_CHECKING:
    from replicax.distribute import cluster_resolver

__all__ = [
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

__dir__ = __all__.copy

_ABSENT = {
    **ASYNCHRONOUS,
    "get_loss_reduction": (
        "There is no global loss reduction: name the reduction, as in"
        ' `strategy.reduce("SUM", loss, axis=None)`, and divide by the global batch size with'
        " `rx.nn.compute_average_loss`."
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {"cluster_resolver": "replicax.distribute"}, _ABSENT)
