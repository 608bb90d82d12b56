"""Cluster specifications, checkpoints, preemption handling and `tf.train.Example` records.

Example:
    >>> rx.train.ClusterSpec({"worker": ["a:1", "b:1"]}).jobs
    ['worker']
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.data.records.examples import (
    Example,
    Feature,
    FeatureList,
    FeatureLists,
    Features,
    SequenceExample,
)
from replicax._src.data.records.messages import BytesList, FloatList, Int64List
from replicax._src.summary.trackers import log, track
from replicax._src.train.checkpoint import Checkpoint
from replicax._src.train.manager import CheckpointManager
from replicax._src.train.options import CheckpointOptions
from replicax._src.train.preemption import PreemptionCheckpointHandler, Resumable, TerminationConfig
from replicax._src.train.progress import ProgressBar, progress
from replicax._src.train.reader import (
    CheckpointReader,
    checkpoints_iterator,
    get_checkpoint_state,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
    load_variable,
)
from replicax._src.train.safetensors import (
    StoredTensor,
    load_safetensors,
    open_safetensors,
    save_safetensors,
)
from replicax.train import experimental

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
    "StoredTensor",
    "TerminationConfig",
    "checkpoints_iterator",
    "experimental",
    "get_checkpoint_state",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_safetensors",
    "load_variable",
    "log",
    "open_safetensors",
    "progress",
    "save_safetensors",
    "track",
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
