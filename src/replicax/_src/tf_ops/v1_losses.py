"""The losses of `tf.compat.v1.losses`."""

from typing import Any

import jax
import jax.numpy as jnp

_COLLECTION = "losses"


class Reduction:
    """Ways to reduce the losses of examples.

    Example:
        >>> rx.compat.v1.losses.Reduction.SUM
        'weighted_sum'
    """

    NONE = "none"
    SUM = "weighted_sum"
    SUM_OVER_BATCH_SIZE = "weighted_sum_over_batch_size"
    MEAN = "weighted_mean"
    SUM_BY_NONZERO_WEIGHTS = "weighted_sum_by_nonzero_weights"
    SUM_OVER_NONZERO_WEIGHTS = SUM_BY_NONZERO_WEIGHTS

    @classmethod
    def all(cls) -> tuple[str, ...]:
        """Return all kinds of reduction."""
        return (
            cls.NONE,
            cls.SUM,
            cls.MEAN,
            cls.SUM_OVER_BATCH_SIZE,
            cls.SUM_OVER_NONZERO_WEIGHTS,
            cls.SUM_BY_NONZERO_WEIGHTS,
        )

    @classmethod
    def validate(cls, key: Any) -> None:
        """Raise a ValueError if ``key`` is not a kind of reduction."""
        if key not in cls.all():
            raise ValueError(f"Invalid Reduction Key {key}. Expected keys are {cls.all()}.")


def compute_weighted_loss(
    losses: Any,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Multiply losses by weights, and reduce them.

    The mean is taken over one replica's examples, as in TensorFlow. There are no collections: add
    the losses yourself.

    Example:
        >>> rx.compat.v1.losses.compute_weighted_loss(jnp.array([1.0, 2.0, 6.0]), [1.0, 1.0, 0.0])
        Array(1.5, dtype=float32)
    """
    Reduction.validate(reduction)
    losses = jnp.asarray(losses)
    weights = jnp.asarray(weights, jnp.float32)
    _check_weights(weights.shape, losses.shape)
    weighted = jnp.asarray(losses, jnp.float32) * weights
    if reduction == Reduction.NONE:
        return jnp.asarray(weighted, losses.dtype)
    total = jnp.sum(weighted)
    if reduction == Reduction.MEAN:
        total = _divide(total, jnp.sum(jnp.broadcast_to(weights, losses.shape)))
    elif reduction == Reduction.SUM_OVER_BATCH_SIZE:
        total = _divide(total, jnp.float32(losses.size))
    elif reduction == Reduction.SUM_BY_NONZERO_WEIGHTS:
        present = jnp.broadcast_to(weights != 0, losses.shape)
        total = _divide(total, jnp.sum(present, dtype=jnp.float32))
    return jnp.asarray(total, losses.dtype)


def _check_weights(weights: tuple[int, ...], losses: tuple[int, ...]) -> None:
    """Raise unless weights are a scalar, or have the sizes of the losses, or 1."""
    is_fit = len(weights) == len(losses) and all(
        one in (1, other) for one, other in zip(weights, losses, strict=True)
    )
    if weights and not is_fit:
        raise ValueError(
            f"weights of shape {weights} cannot be broadcast to losses of shape {losses}: write a"
            " number, or an array of the same rank with sizes that are equal or 1."
        )


def _divide(total: Any, count: Any) -> Any:
    return jnp.where(count == 0, 0.0, total / jnp.where(count == 0, 1.0, count))


def _floats(labels: Any, predictions: Any) -> tuple[Any, Any]:
    """Return both as float32 arrays; raise if their shapes differ."""
    labels, predictions = (jnp.asarray(x, jnp.float32) for x in (labels, predictions))
    _check_same_shape(labels, predictions)
    return labels, predictions


def _check_same_shape(labels: Any, predictions: Any) -> None:
    if labels.shape != predictions.shape:
        raise ValueError(f"Shapes {predictions.shape} and {labels.shape} are incompatible")


def absolute_difference(
    labels: Any,
    predictions: Any,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the absolute error, reduced over the examples.

    Example:
        >>> rx.compat.v1.losses.absolute_difference([0.0, 1.0], [1.0, 4.0])
        Array(2., dtype=float32)
    """
    labels, predictions = _floats(labels, predictions)
    return compute_weighted_loss(jnp.abs(predictions - labels), weights, reduction=reduction)


def cosine_distance(
    labels: Any,
    predictions: Any,
    axis: Any = None,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
    dim: Any = None,
) -> Any:
    """Return the cosine distance of labels and predictions, which must be unit vectors.

    Example:
        >>> rx.compat.v1.losses.cosine_distance([[1.0, 0.0]], [[0.0, 1.0]], axis=1)
        Array(1., dtype=float32)
    """
    axis = dim if axis is None else axis
    if axis is None:
        raise ValueError("You must specify argument `axis`.")
    labels, predictions = _floats(labels, predictions)
    losses = 1 - jnp.sum(predictions * labels, axis=axis, keepdims=True)
    return compute_weighted_loss(losses, weights, reduction=reduction)


def hinge_loss(
    labels: Any,
    logits: Any,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the hinge loss of labels that are 0 or 1.

    Example:
        >>> rx.compat.v1.losses.hinge_loss([[1.0, 0.0]], [[0.5, 0.5]])
        Array(1., dtype=float32)
    """
    labels, logits = _floats(labels, logits)
    losses = jax.nn.relu(1 - (2 * labels - 1) * logits)
    return compute_weighted_loss(losses, weights, reduction=reduction)


def huber_loss(
    labels: Any,
    predictions: Any,
    weights: Any = 1.0,
    delta: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the Huber loss: quadratic for errors up to ``delta``, linear above.

    Example:
        >>> rx.compat.v1.losses.huber_loss([0.0, 0.0], [1.0, 3.0])
        Array(1.5, dtype=float32)
    """
    labels, predictions = _floats(labels, predictions)
    errors = jnp.abs(predictions - labels)
    quadratic = jnp.minimum(errors, delta)
    losses = 0.5 * jnp.square(quadratic) + delta * (errors - quadratic)
    return compute_weighted_loss(losses, weights, reduction=reduction)


def log_loss(
    labels: Any,
    predictions: Any,
    weights: Any = 1.0,
    epsilon: Any = 1e-7,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the cross entropy of labels and predicted probabilities.

    Example:
        >>> round(float(rx.compat.v1.losses.log_loss([1.0], [0.5])), 4)
        0.6931
    """
    labels, predictions = _floats(labels, predictions)
    losses = -labels * jnp.log(predictions + epsilon)
    losses = losses - (1 - labels) * jnp.log(1 - predictions + epsilon)
    return compute_weighted_loss(losses, weights, reduction=reduction)


def mean_squared_error(
    labels: Any,
    predictions: Any,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the squared error, reduced over the examples.

    Example:
        >>> rx.compat.v1.losses.mean_squared_error([0.0, 0.0], [1.0, 3.0])
        Array(5., dtype=float32)
    """
    labels, predictions = _floats(labels, predictions)
    return compute_weighted_loss(jnp.square(predictions - labels), weights, reduction=reduction)


def sigmoid_cross_entropy(
    multi_class_labels: Any,
    logits: Any,
    weights: Any = 1.0,
    label_smoothing: Any = 0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the cross entropy of independent binary classes, from logits.

    Example:
        >>> round(float(rx.compat.v1.losses.sigmoid_cross_entropy([[1.0]], [[0.0]])), 4)
        0.6931
    """
    logits = jnp.asarray(logits)
    labels = jnp.asarray(multi_class_labels, logits.dtype)
    _check_same_shape(labels, logits)
    labels = labels * (1 - label_smoothing) + 0.5 * label_smoothing
    losses = jax.nn.relu(logits) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
    return compute_weighted_loss(losses, weights, reduction=reduction)


def softmax_cross_entropy(
    onehot_labels: Any,
    logits: Any,
    weights: Any = 1.0,
    label_smoothing: Any = 0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the cross entropy of one-hot labels and the softmax of logits.

    Example:
        >>> round(float(rx.compat.v1.losses.softmax_cross_entropy([[1, 0]], [[0.0, 0.0]])), 4)
        0.6931
    """
    logits = jnp.asarray(logits)
    labels = jnp.asarray(onehot_labels, logits.dtype)
    _check_same_shape(labels, logits)
    labels = labels * (1 - label_smoothing) + label_smoothing / logits.shape[-1]
    losses = -jnp.sum(jax.lax.stop_gradient(labels) * jax.nn.log_softmax(logits), axis=-1)
    return compute_weighted_loss(losses, weights, reduction=reduction)


def sparse_softmax_cross_entropy(
    labels: Any,
    logits: Any,
    weights: Any = 1.0,
    scope: Any = None,
    loss_collection: Any = _COLLECTION,
    reduction: Any = Reduction.SUM_BY_NONZERO_WEIGHTS,
) -> Any:
    """Return the cross entropy of class indices and the softmax of logits.

    A class outside of the logits gives NaN, as in TensorFlow on GPUs.

    Example:
        >>> round(float(rx.compat.v1.losses.sparse_softmax_cross_entropy([0], [[0.0, 0.0]])), 4)
        0.6931
    """
    labels, logits, weights = jnp.asarray(labels), jnp.asarray(logits), jnp.asarray(weights)
    if labels.ndim == logits.ndim and labels.shape[-1] == 1:
        labels = labels[..., 0]
    if weights.ndim == logits.ndim and weights.shape[-1] == 1:
        weights = weights[..., 0]
    scores = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(
        scores, labels[..., None], axis=-1, mode="fill", fill_value=jnp.nan
    )
    is_class = (labels >= 0) & (labels < logits.shape[-1])
    losses = jnp.where(is_class, -chosen[..., 0], jnp.nan)
    return compute_weighted_loss(losses, weights, reduction=reduction)
