"""Losses that add up to the right mean over all replicas."""

from typing import Any

import jax
import jax.numpy as jnp

from replicax._errors import ScopeError
from replicax.context._current import get_replica_context, get_strategy


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """This replica's share of the mean loss over the global batch.

    The shares of all replicas add up to the mean, so that summed gradients are the gradients of
    the mean.

    Args:
        per_example_loss: The loss of each of this replica's examples.
        sample_weight: A weight for each of them.
        global_batch_size: How many examples all replicas have together; by default this replica's
            times the number of replicas.

    Raises:
        RuntimeError: In cross-replica context, where there is no share.
        ValueError: If the batch size is not a scalar, or not positive.

    Example:
        >>> float(rx.nn.compute_average_loss(jnp.array([1.0, 3.0])))
        2.0
    """
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "per_example_loss is a scalar: compute the loss of each example, without reducing over"
            " the batch, and let compute_average_loss divide by the global batch size."
        )
    if not jnp.issubdtype(losses.dtype, jnp.inexact):
        losses = losses.astype(jnp.float32)
    if sample_weight is not None:
        losses = losses * jnp.asarray(sample_weight, losses.dtype)
    if global_batch_size is None:
        if get_replica_context() is None:
            raise ScopeError(
                "compute_average_loss without global_batch_size belongs into the replica function:"
                " in cross-replica context there is no replica whose share it could compute."
            )
        global_batch_size = losses.shape[0] * get_strategy().num_replicas_in_sync
    size = jnp.asarray(global_batch_size)
    if size.ndim:
        raise ValueError(f"global_batch_size must be a scalar, got shape {size.shape}.")
    if not isinstance(size, jax.core.Tracer) and size <= 0:
        raise ValueError(f"global_batch_size must be positive, got {global_batch_size}.")
    return jnp.sum(losses) / size.astype(losses.dtype)


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """This replica's share of a loss that does not depend on the examples.

    Example:
        >>> float(rx.nn.scale_regularization_loss(jnp.float32(3)))
        3.0
    """
    if get_replica_context() is None:
        raise ScopeError(
            "scale_regularization_loss belongs into the replica function: in cross-replica context"
            " there is no replica whose share it could compute."
        )
    share: jax.Array = jnp.sum(jnp.asarray(regularization_loss))
    return share / int(get_strategy().num_replicas_in_sync)
