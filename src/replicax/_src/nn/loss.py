"""Loss scaling such that the sum over the replicas is the mean over the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from replicax._src.base.errors import ScopeError
from replicax._src.context.current import get_replica_context, get_strategy


def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> jax.Array:
    """Return this replica's share of the mean loss over the global batch.

    The shares of all replicas add up to the mean, so the sum of their gradients is the gradient of
    the mean.

    Args:
        per_example_loss: The loss of each of this replica's examples.
        sample_weight: The weight of each example.
        global_batch_size: The number of examples on all replicas; by default this replica's number
            times the number of replicas.

    Raises:
        RuntimeError: Called in cross-replica context without ``global_batch_size``.
        TypeError: The batch size is not an integer.
        ValueError: The losses are a scalar, or the batch size is not a scalar or is negative.

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
        losses = losses * _fitted(jnp.asarray(sample_weight, losses.dtype), losses)
    if global_batch_size is None:
        if get_replica_context() is None:
            raise ScopeError(
                "compute_average_loss without global_batch_size belongs into the replica function:"
                " in cross-replica context there is no replica whose share it could compute."
            )
        global_batch_size = losses.shape[0] * get_strategy().num_replicas_in_sync
    size = _batch_size(global_batch_size).astype(losses.dtype)
    # The size is 0 if the replica has no examples of a short last batch: its share is 0.
    return jnp.where(size == 0, 0, jnp.sum(losses) / jnp.where(size == 0, 1, size))


def _fitted(weights: jax.Array, losses: jax.Array) -> jax.Array:
    """Return the weights in a shape that broadcasts to the losses; they may be a column."""
    if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    if 0 < weights.ndim < losses.ndim:
        weights = weights.reshape(weights.shape + (1,) * (losses.ndim - weights.ndim))
    try:
        fits = jnp.broadcast_shapes(weights.shape, losses.shape) == losses.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"sample_weight of shape {weights.shape} does not fit losses of shape {losses.shape}:"
            " give one weight for each example."
        )
    return weights


def _batch_size(value: Any) -> jax.Array:
    size = jnp.asarray(value)
    if size.ndim:
        raise ValueError(f"global_batch_size must be a scalar, got shape {size.shape}.")
    if not jnp.issubdtype(size.dtype, jnp.integer):
        raise TypeError(f"global_batch_size must be an integer, got {value!r}.")
    if not isinstance(size, Tracer) and size < 0:
        raise ValueError(f"global_batch_size must not be negative, got {value!r}.")
    return size


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Return this replica's share of a loss that does not depend on the examples.

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
