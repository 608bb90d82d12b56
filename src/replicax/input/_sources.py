"""Sources: what a worker reads from, and what all workers agree on about it.

Agree: this worker's steps -> steps that all workers take together.

Workers that read different files have different numbers of steps, of different sizes. A worker that
has run out still steps, with nothing, until no worker has anything left; and all must know before a
step whether its parts are equal, as that decides how it runs. The workers tell each other through
the hub, ahead of time, in the thread that reads the data: training does not wait for it.
"""

from __future__ import annotations

import itertools
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event
from typing import Any, Protocol

import jax
import numpy as np

from replicax._types import TensorSpec
from replicax.data._ahead import Failed, counted
from replicax.data._blocks import NewArray
from replicax.data._dataset import Dataset
from replicax.data._errors import InvalidArgumentError
from replicax.data._iterator import DatasetIterator
from replicax.data._known import NoElementError, first_spec
from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.data._structure import flatten, from_json, to_json
from replicax.input._split import HostStep, Share, Step, emptied, evened, passed_over, without_rows
from replicax.workers._group import Cancelled, Group, required


class InputSource(Protocol):
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
        new: Makes the arrays of batches that nobody else sees.
    """

    dataset: Dataset
    whole: Dataset | None = None
    new: NewArray | None = None

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
        iterator = DatasetIterator[Any](self.dataset.node, self.new)
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


def source_of(dataset: Any) -> InputSource:
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


_MOST = 8  # steps that are agreed on at once


@dataclass(frozen=True)
class JointReading:
    """What the workers that read one dataset have to tell each other.

    Attributes:
        share: Which replicas are whose.
        source: What this worker reads.
        shared: Whether all workers read the same batches.
        drop: Whether the pass ends for all when one worker cannot serve all of its replicas.
    """

    share: Share
    source: InputSource
    shared: bool
    drop: bool = False

    @property
    def cardinality(self) -> int:
        """How many steps the workers take together, as far as it is known without asking."""
        endless = self.source.cardinality == INFINITE_CARDINALITY
        return INFINITE_CARDINALITY if endless else UNKNOWN_CARDINALITY

    @property
    def must_talk(self) -> bool:
        """Whether a worker cannot tell by itself what the others have."""
        knows = self.shared and self.source.cardinality != UNKNOWN_CARDINALITY
        return self.share.workers > 1 and not knows

    def waiting(self) -> AbstractContextManager[None]:
        """What surrounds the wait for a step: all workers take it together."""
        return required().collective("the next batch") if self.must_talk else nullcontext()

    def together(self, own: Iterator[Step], stop: Event) -> Iterator[Step]:
        """This worker's steps, made to fit those of the others."""
        if not self.must_talk:
            return own
        return Agreement(required(), self.share, self.nothing, self.drop).steps(own, stop)

    def nothing(self) -> Any:
        """A batch without rows."""
        return without_rows(self.source.first_spec)

    def open(self, state: Any, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """A pass over the source; in a new one, all workers read in the chief's random order."""
        elements, begun = self.source.open(state, skip)
        if state is not None or self.share.workers == 1:
            return elements, begun
        if not (self.shared and isinstance(self.source, DatasetSource)):
            return elements, begun
        told: Any = required().agree("the order of a dataset", begun)[0]
        is_mine = told == json.loads(json.dumps(begun))
        return (elements, begun) if is_mine else self.source.open(told, skip)


@dataclass(frozen=True)
class Agreement:
    """How the workers of a group agree on the steps of one pass.

    Attributes:
        group: The workers.
        share: Which replicas are whose.
        nothing: Makes a part without rows, for a worker that has never had any and cannot be told.
        drop: Whether the pass ends for all when one worker cannot serve all of its replicas.
    """

    group: Group
    share: Share
    nothing: Callable[[], Any]
    drop: bool = False

    def steps(self, own: Iterator[Step], stop: Any) -> Iterator[Step]:
        """The steps of the pass, as many and as even as all workers' together allow.

        Args:
            own: What this worker reads.
            stop: An event; when it is set, nobody waits any more.
        """
        return self._steps(own, stop, self.group.new_feed())

    def _steps(self, own: Iterator[Step], stop: Any, feed: int) -> Iterator[Step]:
        size, nothing = 1, None
        for number in itertools.count():
            ready = list(itertools.islice(own, size))
            sizes = [self._shapes(s) for s in ready]
            try:
                told = self.group.exchange(f"feed {feed} {number}", sizes, stop.is_set)
            except Cancelled:
                return
            good = [step for step in ready if isinstance(step, HostStep)]
            if good:
                nothing = emptied(good[-1].pieces(self.share.replicas)[0])
            if number == 0 and any(told) and not all(told):
                try:
                    nothing = self._tell_form(nothing, feed, stop)
                except Cancelled:
                    return
            yield from self._together(ready, told, nothing)
            if all(len(t) < size for t in told) or (self.drop and any(len(t) < size for t in told)):
                return
            size = min(2 * size, _MOST)

    def _tell_form(self, own: Any, feed: int, stop: Any) -> Any:
        """A part without rows, like those of the workers that have some."""
        told = None
        if own is not None:
            structure, leaves = flatten(own)
            told = [to_json(structure), [[x.dtype.name, list(x.shape)] for x in leaves]]
        forms = self.group.exchange(f"feed {feed} form", told, stop.is_set)
        if own is not None:
            return own
        structure_told, leaves_told = next(filter(None, forms), (None, []))
        nesting = from_json(structure_told)
        if nesting is None:
            return self.nothing()
        return nesting.unflatten([np.zeros(shape, dtype) for dtype, shape in leaves_told])

    def _shapes(self, step: Step) -> list[Any] | str:
        """Of each part: the shape of each leaf; or why there are none."""
        if isinstance(step, Failed):
            return str(step)
        parts = step.pieces(self.share.replicas)
        return [[list(np.shape(x)) for x in jax.tree.leaves(p)] for p in parts]

    def _together(self, ready: list[Step], told: list[list[Any]], nothing: Any) -> Iterator[Step]:
        counts = [len(t) for t in told]
        for i in range(min(counts) if self.drop else max(counts)):
            own = ready[i] if i < len(ready) else HostStep(parts=(nothing,) * self.share.replicas)
            now = [t[i] if i < len(t) else [None] for t in told]
            failed = [w for w, shapes in enumerate(now) if isinstance(shapes, str)]
            if failed:  # a step is of all workers
                yield own if isinstance(own, Failed) else _failed_at(failed[0], str(now[failed[0]]))
                continue
            assert isinstance(own, HostStep)
            shapes = [part for parts in now for part in parts]
            parts = own.pieces(self.share.replicas)
            is_even = all(s == shapes[0] for s in shapes)
            yield evened(parts) if is_even else HostStep(parts=tuple(parts))


def _failed_at(worker: int, reason: str) -> Failed:
    return Failed(
        InvalidArgumentError(
            f"The input of worker {worker} failed at this step, which all workers take together:"
            f" {reason}. The next step follows."
        )
    )
