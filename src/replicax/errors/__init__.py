"""The errors that replicax raises.

Example:
    >>> issubclass(rx.errors.DivergenceError, ValueError)
    True
"""

from replicax._errors import (
    DivergenceError,
    PlacementError,
    ReplicaError,
    ReplicaxError,
    ScopeError,
    TracingError,
    VariableError,
)
from replicax.data._errors import (
    DataLossError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    StructureError,
)

__all__ = [
    "DataLossError",
    "DivergenceError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "PlacementError",
    "ReplicaError",
    "ReplicaxError",
    "ScopeError",
    "StructureError",
    "TracingError",
    "VariableError",
]
