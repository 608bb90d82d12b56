"""Older forms of the API.

Example:
    >>> rx.compat.v1.distribute.OneDeviceStrategy("CPU:0").num_replicas_in_sync
    1
"""

from replicax.compat import v1

__all__ = ["v1"]

__dir__ = __all__.copy
