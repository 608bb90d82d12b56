"""A dataset source: batches from anywhere, which can skip and resume without reading.

    python examples/extend/input_source.py

This one computes its batches from a seed. A checkpoint of its iterator stores the seed and the
position, so the iterator continues where it was, in another process too.
"""

import os
from collections.abc import Iterator

os.environ.setdefault("REPLICAX_CPU_DEVICES", "2")  # without accelerators: virtual devices

import numpy as np

import replicax as rx


class RandomRows(rx.extend.InputSource):
    """``steps`` batches of 4 random rows, in another random order in each pass."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @property
    def element_spec(self) -> rx.TensorSpec:
        """The shape and dtype of a batch."""
        return rx.TensorSpec((4, 2), "float32")

    @property
    def cardinality(self) -> int:
        """The number of batches."""
        return self.steps

    def open(self, state: int | None = None, skip: int = 0) -> tuple[Iterator[np.ndarray], int]:
        """Start a pass: a new seed for a new one, the seed of the old one to repeat it."""
        seed = int(np.random.default_rng().integers(2**31)) if state is None else state
        steps = range(skip, self.steps)
        return (np.random.default_rng([seed, i]).random((4, 2), "float32") for i in steps), seed


strategy = rx.distribute.MirroredStrategy()
dataset = strategy.experimental_distribute_dataset(RandomRows(steps=3))
iterator = iter(dataset)
next(iterator)
saved = iterator.save_state()  # what rx.train.Checkpoint(iterator=iterator) stores
rest = [strategy.gather(batch, axis=0) for batch in iterator]
iterator.restore_state(saved)
again = [strategy.gather(batch, axis=0) for batch in iterator]
print("From step 1, again:", np.asarray(again[0])[0])
assert len(rest) == 2
np.testing.assert_array_equal(rest, again)
