"""Input sources of a worker, and the coordination of workers that read one dataset.

Workers that read different files have different numbers of steps, with batches of different sizes.
A worker that has run out of data continues with empty batches until all workers have. Before a
step, every worker must know whether the parts of all replicas have the same shapes, because that
decides how the step runs. The workers exchange the shapes of coming steps through the hub, in the
thread that reads the data, so training does not wait for it.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from threading import Event
from typing import Any

import jax
import numpy as np

from replicax._src.base.errors import warn_user
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import TensorSpec
from replicax._src.data.dataset import Dataset
from replicax._src.data.element_blocks import NewArray
from replicax._src.data.graph_facts import NoElementError, first_spec
from replicax._src.data.iterator import DatasetIterator
from replicax._src.data.node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax._src.data.optional import Failed, counted
from replicax._src.data.structure import flatten, from_json, to_json
from replicax._src.input.split import (
    HostStep,
    Share,
    Step,
    empty_batch,
    empty_like,
    skip_items,
    stack_parts,
)
from replicax._src.workers.group import Cancelled, Group, required
from replicax._src.workers.watchdog import load


class InputSource(ABC):
    """A dataset of another kind: batches that can be read in several passes.

    Pass an object of a subclass to `experimental_distribute_dataset`, which then reads global
    batches and splits them over the replicas; or return it from the function that
    `distribute_datasets_from_function` calls, which then reads batches of one replica. Both read in
    a background thread.

    An iterable of batches needs no class. Derive from this one to declare shapes without reading a
    batch, to skip batches without reading them, or to resume a random order.

    Example:
        >>> class Squares(rx.extend.InputSource):
        ...     @property
        ...     def element_spec(self):
        ...         return rx.TensorSpec((2,), "int32")
        ...
        ...     def open(self, state=None, skip=0):
        ...         start = state or 0
        ...         rows = (np.full(2, i * i, "int32") for i in range(start + skip, start + 3))
        ...         return rows, start
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> for batch in strategy.experimental_distribute_dataset(Squares()):
        ...     print(batch.values[0], batch.values[1])
        [0] [0]
        [1] [1]
        [4] [4]
    """

    @property
    @abstractmethod
    def element_spec(self) -> Any:
        """The spec of a batch: a structure of `rx.TensorSpec`. Unknown sizes are None."""

    @abstractmethod
    def open(self, state: Any = None, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """Start a pass.

        Args:
            state: None for a new pass; else a state that an earlier call returned, perhaps in
                another process: the pass must yield the same batches again.
            skip: The number of batches to skip.

        Returns:
            An iterator of batches, which are structures of NumPy arrays that must not be modified
            afterwards; and the state, a JSON-serializable value that identifies this pass, such as
            its random seed. Checkpoints save it. If all workers read the same batches, they use
            the state of worker 0. None if every pass yields the same batches.
        """

    @property
    def first_spec(self) -> Any:
        """The spec of elements, with inner sizes taken from the first element if unknown."""
        return self.element_spec

    @property
    def cardinality(self) -> int:
        """The number of batches of a pass, or a constant of `rx.data`; unknown by default."""
        return UNKNOWN_CARDINALITY


@dataclass(frozen=True)
class DatasetSource(InputSource):
    """An `rx.data.Dataset` as a source.

    Attributes:
        dataset: The part of the dataset that this worker reads.
        whole: The dataset of all workers, if it is sharded.
        new: Allocates the arrays of batches that no user function receives.
    """

    dataset: Dataset
    whole: Dataset | None = None
    new: NewArray | None = None

    @property
    def element_spec(self) -> Any:
        """The dataset's spec; inferred from the whole dataset if this worker's part is empty."""
        return self._infer(lambda dataset: dataset.element_spec)

    @property
    def first_spec(self) -> Any:
        """The dataset's spec, or that of the first element if inner sizes are unknown."""
        spec = self.element_spec
        shapes = [getattr(leaf, "shape", None) for leaf in flatten(spec)[1]]
        if all(shape is not None and None not in shape[1:] for shape in shapes):
            return spec
        return self._infer(lambda dataset: first_spec(dataset.node))

    def _infer(self, infer: Callable[[Dataset], Any]) -> Any:
        try:
            return infer(self.dataset)
        except NoElementError:
            if self.whole is None:
                raise
            return infer(self.whole)

    @property
    def cardinality(self) -> int:
        """The dataset's cardinality."""
        return int(self.dataset.cardinality())

    def open(self, state: Any = None, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """Start a pass, in the random order of the pass that returned `state`."""
        iterator = DatasetIterator[Any](self.dataset.node, self.new)
        begin_state = iterator.save_state() if state is None else state
        counted(begin_state, "position")
        if state is not None or skip:
            iterator.restore_state({**begin_state, "position": skip})
        return iterator, begin_state


class ForeignSource(InputSource):
    """Another library's dataset or loader, or any re-iterable of batches.

    It must support iteration, or indexing as Keras's PyDataset does. Its arrays are copied because
    the library may reuse their memory.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._is_used = False
        self._spec: Any = None
        _warn_if_sequences_only(batches)

    @property
    def element_spec(self) -> Any:
        """The spec inferred from the first element, with an unknown number of rows."""
        if self._spec is None:
            if _is_one_shot(self._batches):
                raise ValueError(
                    "A generator has no element_spec before it is read. Make a dataset of it with"
                    " `rx.data.Dataset.from_generator(function, output_signature=...)`."
                )
            first = next(iter(self._elements()), None)
            if first is None:
                raise ValueError("The dataset is empty, so its element_spec is unknown.")
            self._spec = jax.tree.map(_loose_spec, first)
        return self._spec

    @property
    def cardinality(self) -> int:
        """The length if it has one, otherwise unknown."""
        try:
            return len(self._batches)
        except TypeError:
            return UNKNOWN_CARDINALITY

    def open(self, state: Any = None, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """Start a pass, reading and discarding the first `skip` elements; the state is None."""
        return skip_items(iter(self._elements()), skip), None

    def _elements(self) -> Iterator[Any]:
        """Return the batches as NumPy arrays; raise if an iterator was used before."""
        if _is_one_shot(self._batches):
            if self._is_used:
                raise ValueError(
                    f"A {type(self._batches).__name__} can be iterated once, and this is the second"
                    " time. For several epochs pass something that can be iterated again: a list, a"
                    " DataLoader, or `rx.data.Dataset.from_generator(function)`."
                )
            self._is_used = True
        # Unlike a generator, `map` continues after an error.
        return map(self._checked, _batches_of(self._batches))

    def _checked(self, batch: Any) -> Any:
        element = to_numpy(batch)
        _check_batched(self._batches, element)
        return element


def source_of(dataset: Any) -> InputSource:
    """Return `dataset` as a source; an `InputSource` unchanged.

    Raises:
        TypeError: If it cannot be iterated.
    """
    if isinstance(dataset, InputSource):
        return dataset
    if isinstance(dataset, Dataset):
        return DatasetSource(dataset)
    if isinstance(dataset, np.ndarray | Mapping | tuple):
        return DatasetSource(Dataset.from_tensor_slices(dataset))
    if isinstance(dataset, Iterable) or hasattr(dataset, "__getitem__"):
        return ForeignSource(dataset)
    raise TypeError(
        f"{dataset!r} ({type(dataset).__name__}) is not a dataset. Pass an rx.data.Dataset, a torch"
        " DataLoader, a Grain, Hugging Face or tf.data dataset, a Keras PyDataset, any iterable of"
        " batches, or an rx.extend.InputSource."
    )


def to_numpy(batch: Any) -> Any:
    """Convert a batch of another library to NumPy arrays in tuples and dicts."""
    if isinstance(batch, Mapping):
        return {key: _column(key, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(to_numpy, batch))
    if isinstance(batch, list | tuple):
        parts = [to_numpy(x) for x in batch]
        if isinstance(batch, list) and parts and all(np.ndim(x) == 0 for x in parts):
            return np.asarray(parts)
        return tuple(parts)
    convert: Callable[[], Any] | None = getattr(batch, "numpy", None)
    if hasattr(batch, "detach"):  # a torch tensor, possibly on a device or requiring a gradient
        return np.array(batch.detach().cpu().numpy())
    return np.array(convert() if callable(convert) else batch)


def _column(name: Any, value: Any) -> Any:
    """Convert a value of a dictionary; a list of Python numbers or lists is one array of rows.

    Hugging Face datasets without a format have such columns. A list of arrays is a structure, as
    PyTorch's loaders make them.
    """
    if not isinstance(value, list) or not _is_pure_python(value):
        return to_numpy(value)
    try:
        return np.asarray(value)
    except ValueError as error:  # from NumPy 1.24 on
        raise ValueError(
            f"The rows of {name!r} have different lengths, so they do not make an array. Pad them"
            " to one length before they are batched, for example with the `padding` of a tokenizer."
        ) from error


def _is_pure_python(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_pure_python, value))
    return isinstance(value, bool | int | float | complex | str | bytes)


def _check_batched(dataset: Any, first: Any) -> None:
    """Raise if elements of a Hugging Face dataset are examples, whose parts would be split."""
    if not type(dataset).__module__.startswith("datasets.") or not isinstance(first, Mapping):
        return
    single = [key for key, value in first.items() if np.ndim(value) == 0]
    if single:
        raise ValueError(
            f"The elements of this Hugging Face dataset are single examples ({single[0]!r} has no"
            " rows), and need to be batches: pass `dataset.batch(batch_size)`."
        )


def _warn_if_sequences_only(dataset: Any) -> None:
    """Warn of a Hugging Face dataset whose elements are batches of numbers, or single sequences.

    Its features do not say which: `batch` leaves no trace but one more list around each column.
    """
    if not type(dataset).__module__.startswith("datasets."):
        return
    columns = getattr(dataset, "features", None)
    if columns and all(_is_sequence(column) for column in columns.values()):
        warn_user(
            f"All columns of this Hugging Face dataset ({', '.join(columns)}) are lists of values:"
            " each element is taken as a batch with one value for each example. If the elements"
            " are single examples, such as sequences of tokens, the sequences would be divided"
            " between the replicas: pass `dataset.batch(batch_size)`."
        )


def _is_sequence(column: Any) -> bool:
    """Whether a Hugging Face feature is a list of numbers or texts."""
    return type(getattr(column, "feature", None)).__name__ == "Value"


def _batches_of(dataset: Any) -> Iterable[Any]:
    """Return the batches of another library's dataset as an iterable."""
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
    """Return the spec of an array with an unknown number of rows."""
    array = np.asarray(x)
    return TensorSpec((None, *array.shape[1:]) if array.ndim else (), array.dtype)


_MAX_STEPS = 8  # steps to exchange at once


@dataclass(frozen=True)
class CoordinatedReading:
    """One worker's source, and its coordination with the workers that read the same dataset.

    Attributes:
        share: The replicas of this worker among all.
        source: The source of this worker.
        shared: Whether all workers read the same batches.
        drop: Whether all workers stop when one cannot provide data for all of its replicas.
    """

    share: Share
    source: InputSource
    shared: bool
    drop: bool = False

    @property
    def cardinality(self) -> int:
        """The number of common steps: infinite, or unknown without reading."""
        endless = self.source.cardinality == INFINITE_CARDINALITY
        return INFINITE_CARDINALITY if endless else UNKNOWN_CARDINALITY

    @property
    def needs_exchange(self) -> bool:
        """Whether a worker must ask the others for the number and shapes of their steps."""
        is_known = self.shared and self.source.cardinality != UNKNOWN_CARDINALITY
        return self.share.workers > 1 and not is_known

    def wait_context(self) -> AbstractContextManager[None]:
        """Return the context manager in which to wait for a batch.

        If workers exchange steps it marks a collective, so that the watchdog of a stuck worker can
        name it. Else this worker waits for its own data alone.
        """
        return required().collective("the next batch") if self.needs_exchange else load.reads()

    def align(self, local: Iterator[Step], stop: Event) -> Iterator[Step]:
        """Return this worker's steps, as many and of the same kind as those of the others."""
        if not self.needs_exchange:
            return local
        return StepAgreement(required(), self.share, self.empty_batch, self.drop).steps(local, stop)

    def empty_batch(self) -> Any:
        """Return a batch without rows."""
        return empty_batch(self.source.first_spec)

    def open(self, state: Any, skip: int = 0) -> tuple[Iterator[Any], Any]:
        """Start a pass; in a new one, all workers use the random order of worker 0."""
        elements, begin_state = self.source.open(state, skip)
        if state is not None or self.share.workers == 1:
            return elements, begin_state
        if not self.shared or begin_state is None:  # None: every pass yields the same elements
            return elements, begin_state
        chief_state: Any = required().agree("the order of a dataset", begin_state)[0]
        # The exchange converts to JSON and back: compare after the same conversion.
        is_same = chief_state == json.loads(json.dumps(begin_state))
        return (elements, begin_state) if is_same else self.source.open(chief_state, skip)


@dataclass(frozen=True)
class StepAgreement:
    """The exchange of steps between the workers of a group.

    Attributes:
        group: The workers.
        share: The replicas of this worker among all.
        empty_batch: Returns an empty batch, for a worker that has had no data and whose structure
            the other workers cannot send.
        drop: Whether all workers stop when one cannot provide data for all of its replicas.
    """

    group: Group
    share: Share
    empty_batch: Callable[[], Any]
    drop: bool = False

    def steps(self, local: Iterator[Step], stop: Any) -> Iterator[Step]:
        """Return the steps of a pass: the same number on all workers, stacked if shapes agree.

        Args:
            local: The steps that this worker reads.
            stop: An event that cancels a pending exchange.
        """
        # Take the feed's number on the calling thread, where all workers create feeds in the same
        # order; the generator below runs later, on the prefetching thread.
        return self._steps(local, stop, self.group.new_ticket())

    def _steps(self, local: Iterator[Step], stop: Any, feed: int) -> Iterator[Step]:
        size, empty = 1, None
        for number in itertools.count():
            with load.reads():
                ready = list(itertools.islice(local, size))
            shapes = [self._shapes(s) for s in ready]
            try:
                # One list of shapes for each worker; shorter than `size` at the end of its data.
                announced = self.group.exchange(f"feed {feed} {number}", shapes, stop.is_set)
            except Cancelled:
                return
            good = [step for step in ready if isinstance(step, HostStep)]
            if good:
                empty = empty_like(good[-1].pieces(self.share.replicas)[0])
            # Some workers have no data from the start: the others send them the element structure.
            if number == 0 and any(announced) and not all(announced):
                try:
                    empty = self._exchange_form(empty, feed, stop)
                except Cancelled:
                    return
            yield from self._align(ready, announced, empty)
            has_ended = [len(steps) < size for steps in announced]
            if all(has_ended) or (self.drop and any(has_ended)):
                return
            # Start with one step to return the first batch quickly, then exchange more at once.
            size = min(2 * size, _MAX_STEPS)

    def _exchange_form(self, empty: Any, feed: int, stop: Any) -> Any:
        """Return `empty`; if it is None, an empty part in the form that another worker sends."""
        form = None
        if empty is not None:
            structure, leaves = flatten(empty)
            form = [to_json(structure), [[x.dtype.name, list(x.shape)] for x in leaves]]
        forms = self.group.exchange(f"feed {feed} form", form, stop.is_set)
        if empty is not None:
            return empty
        sent_structure, sent_leaves = next(filter(None, forms), (None, []))
        nesting = from_json(sent_structure)
        if nesting is None:
            return self.empty_batch()
        return nesting.unflatten([np.zeros(shape, dtype) for dtype, shape in sent_leaves])

    def _shapes(self, step: Step) -> list[Any] | str:
        """Return the shapes of the leaves of each part, or the error message of a failed step."""
        if isinstance(step, Failed):
            return str(step)
        parts = step.pieces(self.share.replicas)
        return [[list(np.shape(x)) for x in jax.tree.leaves(p)] for p in parts]

    def _align(self, ready: list[Step], announced: list[list[Any]], empty: Any) -> Iterator[Step]:
        """Yield the common steps: this worker's own, or empty ones after the end of its data."""
        counts = [len(steps) for steps in announced]
        for i in range(min(counts) if self.drop else max(counts)):
            step = ready[i] if i < len(ready) else HostStep(parts=(empty,) * self.share.replicas)
            workers = [steps[i] if i < len(steps) else [None] for steps in announced]
            failed = [w for w, shapes in enumerate(workers) if isinstance(shapes, str)]
            if failed:  # a step that fails on one worker fails on all
                reason = str(workers[failed[0]])
                yield step if isinstance(step, Failed) else _worker_failure(failed[0], reason)
                continue
            assert isinstance(step, HostStep)
            shapes = [part for parts in workers for part in parts]
            parts = step.pieces(self.share.replicas)
            is_even = all(s == shapes[0] for s in shapes)
            yield stack_parts(parts) if is_even else HostStep(parts=tuple(parts))


def _worker_failure(worker: int, reason: str) -> Failed:
    return Failed(
        InvalidArgumentError(
            f"The input of worker {worker} failed at this step, which all workers run together:"
            f" {reason}. The next call of `next` continues with the next step."
        )
    )
