"""Names that TensorFlow keeps under ``tf.compat.v1.distribute.experimental``.

Example:
    >>> v1 = rx.compat.v1.distribute
    >>> v1.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync
    1
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import ASYNCHRONOUS, on_demand
from replicax._src.collectives.options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from replicax._src.strategy.v1 import MultiWorkerMirroredStrategy, TPUStrategy

CollectiveCommunication = CommunicationImplementation

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "TPUStrategy",
]

__dir__ = __all__.copy

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, ASYNCHRONOUS)
