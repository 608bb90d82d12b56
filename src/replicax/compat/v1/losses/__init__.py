"""The losses of version 1.

Example:
    >>> rx.compat.v1.losses.mean_squared_error([0.0, 0.0], [1.0, 3.0])
    Array(5., dtype=float32)
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.tf_ops.v1_losses import (
    Reduction,
    absolute_difference,
    compute_weighted_loss,
    cosine_distance,
    hinge_loss,
    huber_loss,
    log_loss,
    mean_squared_error,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
    sparse_softmax_cross_entropy,
)

__all__ = [
    "Reduction",
    "absolute_difference",
    "compute_weighted_loss",
    "cosine_distance",
    "hinge_loss",
    "huber_loss",
    "log_loss",
    "mean_squared_error",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "sparse_softmax_cross_entropy",
]

__dir__ = __all__.copy

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, adviser="replicax._src.port.rules")
