"""Strategies with the verbs of TensorFlow 1.

Example:
    >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(()))))
    2.0
"""

from replicax._enums import ReduceOp
from replicax.compat.v1._strategies import MirroredStrategy, OneDeviceStrategy, Strategy
from replicax.compat.v1.distribute import experimental
from replicax.context._current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.context._replica import ReplicaContext
from replicax.strategy._extended import StrategyExtended

__all__ = [
    "MirroredStrategy",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

__dir__ = __all__.copy
