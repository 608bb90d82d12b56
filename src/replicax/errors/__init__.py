"""The exceptions that replicax raises.

Example:
    >>> issubclass(rx.errors.DivergenceError, ValueError)
    True
"""

from replicax._src.base.errors import (
    CheckpointError,
    DivergenceError,
    PerReplicaError,
    PlacementError,
    ReplicaError,
    ReplicaxError,
    ScopeError,
    TracingError,
    VariableError,
)
from replicax._src.base.tf_errors import (
    AlreadyExistsError,
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    StructureError,
    UnimplementedError,
)
from replicax._src.cluster.checks import ClusterError, RollCallError, WorkerLostError

__all__ = [
    "AlreadyExistsError",
    "CheckpointError",
    "ClusterError",
    "DataLossError",
    "DivergenceError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "PerReplicaError",
    "PermissionDeniedError",
    "PlacementError",
    "ReplicaError",
    "ReplicaxError",
    "RollCallError",
    "ScopeError",
    "StructureError",
    "TracingError",
    "UnimplementedError",
    "VariableError",
    "WorkerLostError",
]

__dir__ = __all__.copy
