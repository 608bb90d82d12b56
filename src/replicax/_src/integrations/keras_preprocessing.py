"""Support for rx.data datasets in `adapt` of Keras's preprocessing layers.

Keras itself supports only `tf.data.Dataset`, and needs TensorFlow even for the type check.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from replicax._src.data.dataset import Dataset
from replicax._src.integrations import keras_private as private


def _inputs(dataset: Dataset[Any]) -> Iterator[np.ndarray]:
    """Yield the inputs of each batch, without targets."""
    for element in dataset:
        yield np.asarray(element[0] if isinstance(element, tuple) else element)


def _normalized(original: Any) -> Any:
    """Wrap ``Normalization.adapt`` to accept rx.data datasets.

    The moments are accumulated in float64. Keras then adapts to two rows with the same moments.
    """

    def adapt(self: Any, data: Any) -> None:
        if not isinstance(data, Dataset):
            original(self, data)
            return
        spec = data.element_spec
        if len((spec[0] if isinstance(spec, tuple) else spec).shape) == 1:
            data = data.batch(128)  # as Keras does for an unbatched tf.data.Dataset
        count, mean, squares, shape = 0.0, np.zeros(()), np.zeros(()), ()
        for batch in _inputs(data):
            rows = batch.astype(np.float64)
            kept = {axis % rows.ndim for axis in self.axis}
            reduced = tuple(axis for axis in range(rows.ndim) if axis not in kept)
            size = np.prod([rows.shape[axis] for axis in reduced])
            here = rows.mean(reduced, keepdims=True)
            # Chan's parallel algorithm: a difference of sums of squares would cancel.
            shift, total = here - mean, count + size
            squares = squares + np.square(rows - here).sum(reduced, keepdims=True)
            squares = squares + np.square(shift) * (count * size / total)
            mean, count, shape = mean + shift * (size / total), total, batch.shape
        if not shape:
            raise ValueError(
                f"`adapt` of layer {self.name!r} got a dataset without elements. Give it at least"
                " one batch."
            )
        if not self.built:
            self.build((None, *shape[1:]))
        spread = np.sqrt(squares / count)
        original(self, np.concatenate([mean - spread, mean + spread]))

    return adapt


def _discretized(original: Any) -> Any:
    """Wrap ``Discretization.adapt`` to accept rx.data datasets, one batch at a time."""

    def adapt(self: Any, data: Any, steps: int | None = None) -> None:
        if not isinstance(data, Dataset) or self.num_bins is None:  # Keras raises for the latter
            original(self, data, steps)
            return
        self.reset_state()
        for batch in _inputs(data if steps is None else data.take(steps)):
            self.update_state(batch)
        self.finalize_state()

    return adapt


REPLACEMENTS: tuple[tuple[Any, Any], ...] = (
    (private.ADAPT_NORMALIZATION, _normalized),
    (private.ADAPT_DISCRETIZATION, _discretized),
)
