"""What belongs to training over machines and time: clusters and checkpoints.

Example:
    >>> rx.train.ClusterSpec({"worker": ["a:1", "b:1"]}).jobs
    ['worker']
"""

from replicax.cluster._spec import ClusterSpec
from replicax.data._records._examples import (
    Example,
    Feature,
    FeatureList,
    FeatureLists,
    Features,
    SequenceExample,
)
from replicax.data._records._messages import BytesList, FloatList, Int64List
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
    "BytesList",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointReader",
    "ClusterSpec",
    "Example",
    "Feature",
    "FeatureList",
    "FeatureLists",
    "Features",
    "FloatList",
    "Int64List",
    "PreemptionCheckpointHandler",
    "Resumable",
    "SequenceExample",
    "TerminationConfig",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
]

__dir__ = __all__.copy
