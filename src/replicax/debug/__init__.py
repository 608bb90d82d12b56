"""Looking for what should not be, and at what is where.

Example:
    >>> rx.debug.check_in_sync()
"""

from replicax.debug._placement import Placement, placement
from replicax.debug._timeline import Timeline, timeline
from replicax.state._held import check_in_sync

__all__ = ["Placement", "Timeline", "check_in_sync", "placement", "timeline"]

__dir__ = __all__.copy
