"""Metrics that compare predictions with labels."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.metrics.metric import Averaged, same_rank

_EPSILON = 1e-7  # Keras's


class _Compared(Averaged):
    """Base class: the weighted mean of a value computed from each label and prediction."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Accumulate a batch of labels and predictions, optionally weighted."""
        values = self._values(jnp.asarray(y_true), jnp.asarray(y_pred))
        self.add_rows(values, sample_weight)

    @abstractmethod
    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        """Return one value per row, or one per element."""

    def _alike(self, true: jax.Array, pred: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = same_rank(true, pred)
        if a.shape != b.shape:
            raise InvalidArgumentError(
                f"{type(self).__name__} compares y_true of shape {true.shape} with y_pred of shape"
                f" {pred.shape}: they must be the same."
            )
        return a, b

    def _labels(self, true: jax.Array, pred: jax.Array) -> jax.Array:
        labels = true[..., 0] if true.ndim == pred.ndim and true.shape[-1] == 1 else true
        if labels.shape != pred.shape[:-1]:
            raise InvalidArgumentError(
                f"{type(self).__name__} takes one label for each row of y_pred, which has shape"
                f" {pred.shape}: got y_true of shape {true.shape}, expected {pred.shape[:-1]}. For"
                " one-hot labels, use the metric without `Sparse`."
            )
        return labels.astype(jnp.int32)


class Accuracy(_Compared):
    """How often predictions equal labels.

    Example:
        >>> metric = rx.metrics.Accuracy()
        >>> float(metric([1, 2, 3, 4], [0, 2, 3, 4]))
        0.75
    """

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        return a == b


class BinaryAccuracy(_Compared):
    """How often predictions above a threshold equal labels of 0 and 1.

    Example:
        >>> metric = rx.metrics.BinaryAccuracy()
        >>> float(metric([1.0, 1.0, 0.0, 0.0], [0.98, 1.0, 0.0, 0.6]))
        0.75
    """

    def __init__(self, name: str | None = None, dtype: Any = None, threshold: float = 0.5) -> None:
        super().__init__(name, dtype)
        self.threshold = threshold

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        return a == (b > self.threshold)


class CategoricalAccuracy(_Compared):
    """How often the class with the largest prediction is that of the one-hot label.

    Example:
        >>> metric = rx.metrics.CategoricalAccuracy()
        >>> float(metric([[0.0, 1.0], [1.0, 0.0]], [[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        return a.argmax(-1) == b.argmax(-1)


class SparseCategoricalAccuracy(_Compared):
    """How often the class with the largest prediction equals the integer label.

    Example:
        >>> metric = rx.metrics.SparseCategoricalAccuracy()
        >>> float(metric([1, 0], [[0.1, 0.9], [0.2, 0.8]]))
        0.5
    """

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        return self._labels(true, pred) == pred.argmax(-1)


class SparseTopKCategoricalAccuracy(_Compared):
    """How often the integer label is among the ``k`` largest predictions.

    Example:
        >>> metric = rx.metrics.SparseTopKCategoricalAccuracy(k=2)
        >>> float(metric([2, 0], [[0.1, 0.7, 0.2], [0.1, 0.7, 0.2]]))
        0.5
    """

    def __init__(self, k: int = 5, name: str | None = None, dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.k = k

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        return _in_top(pred, self._labels(true, pred), self.k)


class TopKCategoricalAccuracy(SparseTopKCategoricalAccuracy):
    """How often the one-hot label is among the ``k`` largest predictions.

    Example:
        >>> metric = rx.metrics.TopKCategoricalAccuracy(k=2)
        >>> float(metric([[0, 0, 1], [1, 0, 0]], [[0.1, 0.7, 0.2], [0.1, 0.7, 0.2]]))
        0.5
    """

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        return _in_top(b, a.argmax(-1), self.k)


class MeanSquaredError(_Compared):
    """The mean of the squared differences.

    Example:
        >>> float(rx.metrics.MeanSquaredError()([[0.0, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]))
        0.25
    """

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        return jnp.square(a - b)


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean of the squared differences.

    Example:
        >>> float(rx.metrics.RootMeanSquaredError()([0.0, 0.0], [2.0, 2.0]))
        2.0
    """

    def result(self) -> jax.Array:
        """Return the square root of the mean over all steps and replicas."""
        return jnp.sqrt(Averaged.result(self))


class MeanAbsoluteError(_Compared):
    """The mean of the absolute differences.

    Example:
        >>> float(rx.metrics.MeanAbsoluteError()([0.0, 0.0], [-1.0, 2.0]))
        1.5
    """

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        return jnp.abs(a - b)


class BinaryCrossentropy(_Compared):
    """The cross-entropy between binary labels and probabilities or logits.

    Example:
        >>> metric = rx.metrics.BinaryCrossentropy(from_logits=True)
        >>> round(float(metric([[1.0]], [[0.0]])), 4)
        0.6931
    """

    def __init__(
        self,
        name: str | None = None,
        dtype: Any = None,
        *,
        from_logits: bool = False,
        label_smoothing: float = 0,
    ) -> None:
        super().__init__(name, dtype)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        a = a * (1 - self.label_smoothing) + 0.5 * self.label_smoothing
        if self.from_logits:
            return -(a * jax.nn.log_sigmoid(b) + (1 - a) * jax.nn.log_sigmoid(-b))
        p = jnp.clip(b, _EPSILON, 1 - _EPSILON)
        return -(a * jnp.log(p) + (1 - a) * jnp.log(1 - p))


class CategoricalCrossentropy(BinaryCrossentropy):
    """The cross-entropy between one-hot labels and probabilities or logits.

    Example:
        >>> metric = rx.metrics.CategoricalCrossentropy()
        >>> round(float(metric([[0.0, 1.0]], [[0.5, 0.5]])), 4)
        0.6931
    """

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        a, b = self._alike(true, pred)
        a = a * (1 - self.label_smoothing) + self.label_smoothing / a.shape[-1]
        if self.from_logits:
            return -(a * jax.nn.log_softmax(b)).sum(-1)
        p = jnp.clip(b / b.sum(-1, keepdims=True), _EPSILON, 1 - _EPSILON)
        return -(a * jnp.log(p)).sum(-1)


class SparseCategoricalCrossentropy(_Compared):
    """The cross-entropy between integer labels and probabilities or logits.

    Example:
        >>> metric = rx.metrics.SparseCategoricalCrossentropy()
        >>> round(float(metric([1], [[0.5, 0.5]])), 4)
        0.6931
    """

    def __init__(
        self, name: str | None = None, dtype: Any = None, *, from_logits: bool = False
    ) -> None:
        super().__init__(name, dtype)
        self.from_logits = from_logits

    def _values(self, true: jax.Array, pred: jax.Array) -> Any:
        labels = self._labels(true, pred)
        logits = pred if self.from_logits else jnp.log(jnp.clip(pred, _EPSILON, 1 - _EPSILON))
        return -_picked(jax.nn.log_softmax(logits), labels)


def _in_top(pred: jax.Array, labels: jax.Array, k: int) -> jax.Array:
    chosen = _picked(pred, labels)
    # Equal predictions share a rank, as in tf.math.in_top_k.
    return ((pred > chosen[..., None]).sum(-1) < k) & jnp.isfinite(chosen)


def _picked(pred: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the prediction at each row's label; NaN if the label is out of range."""
    at = jnp.where(labels < 0, pred.shape[-1], labels)
    return jnp.take_along_axis(pred, at[..., None], axis=-1, mode="fill")[..., 0]
