"""Names that TensorFlow keeps under ``tf.distribute.experimental``.

Example:
    >>> rx.distribute.experimental.CommunicationOptions(bytes_per_pack=1024).bytes_per_pack
    1024
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import ASYNCHRONOUS, on_demand
from replicax._src.collectives.options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from replicax._src.strategy.distribute_methods import ValueContext
from replicax._src.strategy.multi_worker import ExperimentalMultiWorkerMirroredStrategy
from replicax._src.strategy.tpu import ExperimentalTPUStrategy

if TYPE_CHECKING:
    from replicax._src.train.preemption import PreemptionCheckpointHandler, TerminationConfig

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
    "PreemptionCheckpointHandler": "replicax._src.train.preemption",
    "TerminationConfig": "replicax._src.train.preemption",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, ASYNCHRONOUS)
