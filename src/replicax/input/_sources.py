"""Sources: anything that gives batches, as streams of NumPy structures that can be resumed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._ahead import counted
from replicax.data._dataset import Dataset
from replicax.data._first import NoElementError, first_spec
from replicax.data._node import UNKNOWN_CARDINALITY
from replicax.data._structure import flatten
from replicax.input._split import passed_over


class Source(Protocol):
    """A re-iterable stream of elements."""

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The structure of elements, with a spec for each leaf."""

    @property
    @abstractmethod
    def first_spec(self) -> Any:
        """The same, with all sizes as they are in the first element."""

    @property
    @abstractmethod
    def cardinality(self) -> int:
        """How many elements there are, or a negative constant of rx.data."""

    @abstractmethod
    def open(self, state: Any = None, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """A pass over the elements, from ``skip`` on, and what to give to have it again.

        Args:
            state: What an earlier call returned beside its pass; None for a new one.
            skip: How many elements to pass over.
        """


@dataclass(frozen=True)
class DatasetSource:
    """One of our own datasets.

    Attributes:
        dataset: What this worker reads.
        whole: What all workers read, if it is more.
    """

    dataset: Dataset
    whole: Dataset | None = None

    @property
    def element_spec(self) -> Any:
        """As the dataset says; a worker that has no element looks at those of the others."""
        return self._learn(lambda dataset: dataset.element_spec)

    @property
    def first_spec(self) -> Any:
        """Read from the first element, where the dataset leaves more open than the rows."""
        spec = self.element_spec
        shapes = [getattr(leaf, "shape", None) for leaf in flatten(spec)[1]]
        if all(shape is not None and None not in shape[1:] for shape in shapes):
            return spec
        return self._learn(lambda dataset: first_spec(dataset.node))

    def _learn(self, ask: Callable[[Dataset], Any]) -> Any:
        try:
            return ask(self.dataset)
        except NoElementError:
            if self.whole is None:
                raise
            return ask(self.whole)

    @property
    def cardinality(self) -> int:
        """As the dataset says."""
        return int(self.dataset.cardinality())

    def open(self, state: Any = None, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """A pass with the same random order as the one that ``state`` was taken from."""
        iterator = iter(self.dataset)
        begun = iterator.save_state() if state is None else state
        counted(begun, "position")
        if state is not None or skip:
            iterator.restore_state({**begun, "position": skip})
        return iterator, begun


class ForeignSource:
    """Another library's dataset or loader, or any re-iterable of batches.

    Known by what it can do: iteration, or numbered access as Keras's PyDataset has it. The arrays
    that it gives are copied, as nobody knows what becomes of them afterwards.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._is_used = False
        self._spec: Any = None

    @property
    def element_spec(self) -> Any:
        """Learnt from the first element."""
        if self._spec is None:
            if _is_one_shot(self._batches):
                raise ValueError(
                    "A generator has no element_spec before it is read. Make a dataset of it with"
                    " `rx.data.Dataset.from_generator(function, output_signature=...)`."
                )
            first = next(iter(self._elements()), None)
            if first is None:
                raise ValueError("The dataset is empty, so that its element_spec is unknown.")
            self._spec = jax.tree.map(_loose_spec, first)
        return self._spec

    @property
    def first_spec(self) -> Any:
        """The same: only the rows are open."""
        return self.element_spec

    @property
    def cardinality(self) -> int:
        """Its length, if it has one."""
        try:
            return len(self._batches)
        except TypeError:
            return UNKNOWN_CARDINALITY

    def open(self, state: Any = None, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """A pass; ``skip`` elements are read and passed over."""
        return passed_over(iter(self._elements()), skip), None

    def _elements(self) -> Iterator[Any]:
        if _is_one_shot(self._batches):
            if self._is_used:
                raise ValueError(
                    f"A {type(self._batches).__name__} can be iterated once, and this is the second"
                    " time. For several epochs pass something that can be iterated anew: a list, a"
                    " DataLoader, or `rx.data.Dataset.from_generator(function)`."
                )
            self._is_used = True
        return map(to_numpy, _batches_of(self._batches))  # unlike a generator, outlives an error


def source_of(dataset: Any) -> Source:
    """Whatever was given as a dataset, as a source.

    Raises:
        TypeError: If it cannot be iterated.
    """
    if isinstance(dataset, Dataset):
        return DatasetSource(dataset)
    if isinstance(dataset, np.ndarray | Mapping | tuple):
        return DatasetSource(Dataset.from_tensor_slices(dataset))
    if isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__"):
        return ForeignSource(dataset)
    raise TypeError(
        f"{dataset!r} ({type(dataset).__name__}) is no dataset. Pass a rx.data.Dataset, a torch"
        " DataLoader, a Grain, Hugging Face or tf.data dataset, a Keras PyDataset, or any iterable"
        " of batches."
    )


def to_numpy(batch: Any) -> Any:
    """A batch of another library as NumPy arrays in tuples and dicts."""
    if isinstance(batch, Mapping):
        return {key: to_numpy(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_numpy, batch))
    if isinstance(batch, list | tuple):
        parts = [to_numpy(x) for x in batch]
        if isinstance(batch, list) and parts and all(np.ndim(x) == 0 for x in parts):
            return np.asarray(parts)
        return tuple(parts)
    convert: Callable[[], Any] | None = getattr(batch, "numpy", None)
    if hasattr(batch, "detach"):  # a torch tensor, perhaps on a device or part of a gradient
        return np.array(batch.detach().cpu().numpy())
    return np.array(convert() if callable(convert) else batch)


def _batches_of(dataset: Any) -> Iterable[Any]:
    as_numpy: Callable[[], Any] | None = getattr(dataset, "as_numpy_iterator", None)
    if as_numpy is not None:  # tf.data
        batches: Iterable[Any] = as_numpy()
        return batches
    if isinstance(dataset, Iterable) and not hasattr(dataset, "num_batches"):
        return dataset
    numbered: Any = dataset  # Keras's PyDataset
    count = getattr(numbered, "num_batches", None)
    return (numbered[i] for i in range(len(numbered) if count is None else count))


def _is_one_shot(dataset: Any) -> bool:
    return isinstance(dataset, Iterator)


def _loose_spec(x: Any) -> TensorSpec:
    array = np.asarray(x)
    return TensorSpec((None, *array.shape[1:]) if array.ndim else (), array.dtype)
