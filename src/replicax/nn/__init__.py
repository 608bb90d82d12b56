"""Loss scaling for replicas.

Example:
    >>> float(rx.nn.compute_average_loss(jnp.ones(4), global_batch_size=8))
    0.5
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.nn.loss import compute_average_loss, mean_loss, scale_regularization_loss

__all__ = ["compute_average_loss", "mean_loss", "scale_regularization_loss"]

__dir__ = __all__.copy

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, adviser="replicax._src.port.rules")
