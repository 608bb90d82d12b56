"""Names that TensorFlow keeps under ``tf.compat.v1.distribute.experimental``.

Example:
    >>> v1 = rx.compat.v1.distribute
    >>> v1.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync
    1
"""

from replicax.compat.v1._multi_worker import MultiWorkerMirroredStrategy
from replicax.compat.v1._tpu import TPUStrategy

__all__ = ["MultiWorkerMirroredStrategy", "TPUStrategy"]

__dir__ = __all__.copy
