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

__all__ = [
    "DivergenceError",
    "PlacementError",
    "ReplicaError",
    "ReplicaxError",
    "ScopeError",
    "TracingError",
    "VariableError",
]
