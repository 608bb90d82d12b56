"""Loss scaling such that the sum over the replicas is the mean over the global batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from replicax._src.base.errors import ScopeError
from replicax._src.context.current import get_replica_context, get_strategy
from replicax._src.functions.accumulation import check_loss, replica_share


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
    losses = _float_losses(per_example_loss, "compute_average_loss")
    if sample_weight is not None:
        losses = losses * _fitted(jnp.asarray(sample_weight, losses.dtype), losses)
    if global_batch_size is None:
        if get_replica_context() is None:
            raise ScopeError(
                "compute_average_loss without global_batch_size belongs in the replica function:"
                " in cross-replica context there is no replica whose share it could compute."
            )
        global_batch_size = losses.shape[0] * get_strategy().num_replicas_in_sync
    own = losses.shape[0] * get_strategy().num_replicas_in_sync
    is_part = isinstance(global_batch_size, int) and global_batch_size == own
    check_loss(
        "rx.nn.compute_average_loss", is_weighted=None, divides_by="part" if is_part else "another"
    )
    return _quotient(losses.sum(), _batch_size(global_batch_size).astype(losses.dtype))


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


def mean_loss(per_example_loss: Any, weights: Any = None) -> jax.Array:
    """Return this replica's share of the mean loss over the global batch, for any batch size.

    The shares of all replicas add up to the mean, so sum them, and their gradients, over the
    replicas. Unlike in `compute_average_loss`, the examples of all replicas are counted, so the
    mean is exact for a short last batch too.

    Args:
        per_example_loss: The losses of this replica, one or more for each of its examples.
        weights: The weight of each loss, such as 0 for padding; the mean is then the weighted one,
            divided by the sum of all weights.

    Returns:
        A scalar; 0 if there are no examples, or all weights are 0.

    Raises:
        RuntimeError: Called in cross-replica context.
        ValueError: The losses are a scalar, or the weights do not fit them.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> share = strategy.run(lambda: rx.nn.mean_loss(jnp.array([1.0, 3.0])))
        >>> float(strategy.reduce("SUM", share, axis=None))
        2.0
    """
    losses = _float_losses(per_example_loss, "mean_loss")
    replica = get_replica_context()
    if replica is None:
        raise ScopeError(
            "mean_loss belongs in the replica function: in cross-replica context there is no"
            " replica whose share it could compute. For an array of all examples use `jnp.mean`."
        )
    precise = jnp.promote_types(losses.dtype, jnp.float32)  # bfloat16 counts only to 256
    check_loss("rx.nn.mean_loss", is_weighted=weights is not None, divides_by="part")
    own = jnp.asarray(losses.size, precise)
    if weights is not None:
        weights = _fitted(jnp.asarray(weights, losses.dtype), losses)
        weights = jnp.broadcast_to(weights, losses.shape)
        losses = losses * weights
        own = jax.lax.stop_gradient(weights).astype(precise).sum()
    share = replica_share()
    if share is not None:
        mean: jax.Array = _quotient(losses.sum().astype(precise), own) * share
        return mean.astype(losses.dtype)
    if weights is not None:
        count = replica.all_reduce("SUM", own)
    elif replica.position is None:  # compiled for all replicas, which have equal shapes
        count = jnp.asarray(losses.size * replica.num_replicas_in_sync, precise)
    else:
        count = replica.all_reduce("SUM", jnp.asarray(losses.size)).astype(precise)
    return _quotient(losses.sum().astype(precise), count).astype(losses.dtype)


def _float_losses(per_example_loss: Any, name: str) -> jax.Array:
    losses = jnp.asarray(per_example_loss)
    if losses.ndim == 0:
        raise ValueError(
            "per_example_loss is a scalar: compute the loss of each example, without reducing over"
            f" the batch, and let {name} divide by the global batch size."
        )
    is_float = jnp.issubdtype(losses.dtype, jnp.inexact)
    return losses if is_float else losses.astype(jnp.float32)


def _quotient(total: jax.Array, count: jax.Array) -> jax.Array:
    # The count is 0 if the replica has no examples of a short last batch: its share is 0.
    return jnp.where(count == 0, 0, total / jnp.where(count == 0, 1, count))


def scale_regularization_loss(regularization_loss: Any) -> jax.Array:
    """Return this replica's share of a loss that does not depend on the examples.

    Example:
        >>> float(rx.nn.scale_regularization_loss(jnp.float32(3)))
        3.0
    """
    if get_replica_context() is None:
        raise ScopeError(
            "scale_regularization_loss belongs in the replica function: in cross-replica context"
            " there is no replica whose share it could compute."
        )
    share: jax.Array = jnp.sum(jnp.asarray(regularization_loss))
    return share / int(get_strategy().num_replicas_in_sync)
