"""The optimizers of version 1.

Example:
    >>> w = rx.Variable(1.0)
    >>> rx.compat.v1.train.GradientDescentOptimizer(0.25).minimize(lambda: w * w)
    >>> float(w)
    0.5
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.tf_ops.v1_optimizers import (
    AdagradOptimizer,
    AdamOptimizer,
    FtrlOptimizer,
    GradientDescentOptimizer,
    MomentumOptimizer,
    Optimizer,
    RMSPropOptimizer,
)

__all__ = [
    "AdagradOptimizer",
    "AdamOptimizer",
    "FtrlOptimizer",
    "GradientDescentOptimizer",
    "MomentumOptimizer",
    "Optimizer",
    "RMSPropOptimizer",
]

__dir__ = __all__.copy

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, adviser="replicax._src.port.rules")
