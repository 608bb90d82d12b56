"""Older forms of the API, and TensorFlow's functions.

Example:
    >>> rx.compat.v1.distribute.OneDeviceStrategy("CPU:0").num_replicas_in_sync
    1
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax.compat import v1

if TYPE_CHECKING:
    from replicax._src.tf_ops.objects import dimension_at_index, dimension_value
    from replicax._src.tf_ops.strings import as_bytes, as_str, as_str_any, as_text, path_to_str
    from replicax.compat import preprocessing, tf, tfds

__all__ = [
    "as_bytes",
    "as_str",
    "as_str_any",
    "as_text",
    "dimension_at_index",
    "dimension_value",
    "path_to_str",
    "preprocessing",
    "tf",
    "tfds",
    "v1",
]

__dir__ = __all__.copy

_HOMES = {
    "preprocessing": "replicax.compat.preprocessing",
    "tf": "replicax.compat.tf",
    "tfds": "replicax.compat.tfds",
    **dict.fromkeys(("dimension_at_index", "dimension_value"), "replicax._src.tf_ops.objects"),
    **dict.fromkeys(
        ("as_bytes", "as_str", "as_str_any", "as_text", "path_to_str"),
        "replicax._src.tf_ops.strings",
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, adviser="replicax._src.port.rules")
