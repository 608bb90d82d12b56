"""Debugging tools: replicas out of sync, the placement of variables, and step timelines.

Example:
    >>> rx.debug.check_in_sync()
"""

from replicax.debug._placement import Placement, placement
from replicax.debug._timeline import Timeline, timeline
from replicax.state._held import check_in_sync

__all__ = ["Placement", "Timeline", "check_in_sync", "placement", "timeline"]

__dir__ = __all__.copy
