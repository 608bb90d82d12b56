"""Looking for what should not be, and at what is where.

Example:
    >>> rx.debug.check_in_sync()
"""

from replicax.debug._placement import Placement, placement
from replicax.state._held import check_in_sync

__all__ = ["Placement", "check_in_sync", "placement"]

__dir__ = __all__.copy
