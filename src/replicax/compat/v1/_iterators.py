"""InputIterator: the iterators of v1 strategies, which are initialized by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replicax.data._optional import Optional
from replicax.input._distributed import DistributedDataset, DistributedIterator


class InputIterator:
    """One pass over a distributed dataset, begun anew by `initialize`.

    Example:
        >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> iterator = strategy.make_dataset_iterator(rx.data.Dataset.range(4).batch(2))
        >>> iterator.initialize()
        >>> [x.tolist() for x in strategy.experimental_local_results(iterator.get_next())]
        [[0], [1]]
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._pass: DistributedIterator | None = None

    def initialize(self) -> None:
        """Begin a new pass."""
        if self._pass is not None:
            self._pass.close()
        self._pass = iter(self._dataset)

    @property
    def initializer(self) -> None:
        """Begin a new pass; there are no operations to run later."""
        return self.initialize()

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: At the end.
        """
        return self._current().get_next()

    def get_next_as_optional(self) -> Optional:
        """The next element, or an empty optional at the end."""
        return self._current().get_next_as_optional()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._current())

    def _current(self) -> DistributedIterator:
        if self._pass is None:
            self.initialize()
        assert self._pass is not None
        return self._pass
