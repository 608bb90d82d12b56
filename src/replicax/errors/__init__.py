"""The exceptions that replicax raises.

Example:
    >>> issubclass(rx.errors.DivergenceError, ValueError)
    True
"""

from replicax._errors import (
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
from replicax.cluster._checks import ClusterError, RollCallError, WorkerLostError
from replicax.data._errors import (
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
