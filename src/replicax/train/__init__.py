"""Cluster specifications, checkpoints, preemption handling and `tf.train.Example` records.

Example:
    >>> rx.train.ClusterSpec({"worker": ["a:1", "b:1"]}).jobs
    ['worker']
"""

from typing import TYPE_CHECKING

from replicax._lazy import on_demand
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
from replicax.train import experimental
from replicax.train._checkpoint import Checkpoint
from replicax.train._manager import CheckpointManager
from replicax.train._options import CheckpointOptions
from replicax.train._preemption import PreemptionCheckpointHandler, Resumable, TerminationConfig
from replicax.train._progress import ProgressBar, progress
from replicax.train._reader import (
    CheckpointReader,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)

__all__ = [
    "BytesList",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
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
    "ProgressBar",
    "Resumable",
    "SequenceExample",
    "TerminationConfig",
    "checkpoints_iterator",
    "experimental",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
    "progress",
]

__dir__ = __all__.copy

_ABSENT = {
    **dict.fromkeys(
        ("ClusterDef", "JobDef", "ServerDef"),
        "Clusters are not described by protocol buffers: write"
        ' `rx.train.ClusterSpec({"worker": ["host:port"]})`.',
    ),
    "CheckpointView": (
        "Write `rx.train.list_variables(path)`, or `rx.train.load_checkpoint(path)` for values."
    ),
    "Coordinator": "Write `threading.Event`, or a `concurrent.futures.ThreadPoolExecutor`.",
    "ExponentialMovingAverage": (
        "Write `average.assign(decay * average + (1 - decay) * v)` for each variable, `optax.ema`,"
        " or `use_ema=True` of Keras's optimizers."
    ),
    "TrackableView": "Objects are tracked by their attributes: see `vars(checkpoint)`.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
