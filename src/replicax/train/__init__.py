"""What belongs to training over machines and time.

Example:
    >>> rx.train.ClusterSpec({"worker": ["a:1", "b:1"]}).jobs
    ['worker']
"""

from replicax.cluster._spec import ClusterSpec

__all__ = ["ClusterSpec"]
