"""Names that TensorFlow keeps under ``tf.distribute.experimental``.

Example:
    >>> rx.distribute.experimental.CommunicationOptions(bytes_per_pack=1024).bytes_per_pack
    1024
"""

from replicax.collectives._options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from replicax.strategy._multi_worker import ExperimentalMultiWorkerMirroredStrategy
from replicax.strategy._tpu import ExperimentalTPUStrategy
from replicax.strategy._value_context import ValueContext

CollectiveCommunication = CommunicationImplementation
MultiWorkerMirroredStrategy = ExperimentalMultiWorkerMirroredStrategy
TPUStrategy = ExperimentalTPUStrategy

__all__ = [
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "TPUStrategy",
    "ValueContext",
]
