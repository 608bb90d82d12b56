"""Names that TensorFlow keeps under ``tf.distribute.experimental``.

Example:
    >>> rx.distribute.experimental.CommunicationOptions(bytes_per_pack=1024).bytes_per_pack
    1024
"""

from typing import TYPE_CHECKING

from replicax._lazy import ASYNCHRONOUS, on_demand
from replicax.collectives._options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from replicax.strategy._distributing import ValueContext
from replicax.strategy._multi_worker import ExperimentalMultiWorkerMirroredStrategy
from replicax.strategy._tpu import ExperimentalTPUStrategy

if TYPE_CHECKING:
    from replicax.train._preemption import PreemptionCheckpointHandler, TerminationConfig

CollectiveCommunication = CommunicationImplementation
MultiWorkerMirroredStrategy = ExperimentalMultiWorkerMirroredStrategy
TPUStrategy = ExperimentalTPUStrategy

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
]

__dir__ = __all__.copy

_HOMES = {
    "PreemptionCheckpointHandler": "replicax.train._preemption",
    "TerminationConfig": "replicax.train._preemption",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, ASYNCHRONOUS)
