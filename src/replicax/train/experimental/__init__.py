"""Names that TensorFlow keeps under ``tf.train.experimental``.

Example:
    >>> issubclass(rx.train.experimental.PythonState, object)
    True
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.train.object_graph import PythonState

__all__ = ["PythonState"]

__dir__ = __all__.copy

_ABSENT = dict.fromkeys(
    ("MaxShardSizePolicy", "ShardByTaskPolicy", "ShardableTensor", "ShardingCallback"),
    "Orbax divides the files of a checkpoint: there is nothing to choose.",
)

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
