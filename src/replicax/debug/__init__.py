"""Debugging tools: replicas out of sync, the placement of variables, and step timelines.

Example:
    >>> rx.debug.check_in_sync()
"""

from replicax._src.debug.placement import Placement, placement
from replicax._src.debug.timeline import Timeline, timeline
from replicax._src.state.variables import check_in_sync

__all__ = ["Placement", "Timeline", "check_in_sync", "placement", "timeline"]

__dir__ = __all__.copy
