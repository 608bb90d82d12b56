"""What belongs to training over machines and time: clusters and checkpoints.

Example:
    >>> rx.train.ClusterSpec({"worker": ["a:1", "b:1"]}).jobs
    ['worker']
"""

from replicax.cluster._spec import ClusterSpec
from replicax.train._checkpoint import Checkpoint
from replicax.train._manager import CheckpointManager
from replicax.train._preemption import PreemptionCheckpointHandler, Resumable, TerminationConfig
from replicax.train._reader import (
    CheckpointReader,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
)

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CheckpointReader",
    "ClusterSpec",
    "PreemptionCheckpointHandler",
    "Resumable",
    "TerminationConfig",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
]
