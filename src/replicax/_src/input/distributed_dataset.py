"""The distributed datasets that strategies return, and their iterators."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

import jax

from replicax._src.base.ops import NamedFields, Numbers, T_co
from replicax._src.base.rendering import Sheet
from replicax._src.base.tf_errors import EndOfSequenceError, InvalidArgumentError
from replicax._src.base.threads import deferred_signals
from replicax._src.base.types import TensorSpec
from replicax._src.base.weak import OrderedWeakSet
from replicax._src.context.current import current
from replicax._src.data.node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax._src.data.optional import (
    Ahead,
    Failed,
    as_state,
    begin_loop,
    counted,
    is_plain,
    take_in_function,
)
from replicax._src.input.feed import Feed, Prefetch
from replicax._src.input.split import Step, skip_items
from replicax._src.topology.devices import shown_devices
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import PerReplica, Pieces, SomeArray, is_distributed
from replicax._src.values.structures import PerReplicaSpec
from replicax._src.workers import elastic
from replicax._src.workers import group as _group
from replicax._src.workers.watchdog import load

_STATE_VERSION = 3
K = TypeVar("K")
V = TypeVar("V")
SCALED = (1, 0)  # the `parts` of a pipeline that takes a batch for each replica
INPUT_MARK = "replicax.input"  # the name of a wait for an element in JAX profiler traces


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The input pipeline of one worker, from a dataset to the devices.

    Attributes:
        steps: Starts a pass on the host. Takes the state of an earlier pass or None, the number of
            steps to skip, and an event that is set when the steps are no longer needed; returns
            the steps and the state of the pass. If `is_scaled`, it skips elements of the dataset
            instead of steps, and takes the numbers of elements of the first steps.
        feed: Puts a step on the devices.
        spec: Returns the spec of a step; evaluated lazily because it may read the first element.
        cardinality: The number of steps, or a negative constant of `rx.data`.
        depth: The number of steps to prefetch.
        parts: The number of pipelines of all workers, and the number of elements that each
            contributes to a step. A saved position is valid only for the same numbers.
        wait_context: Returns a context for waiting for a step that workers must agree on.
        rebuild: Returns this pipeline for the workers that are left of an elastic run.
        fixed_to_workers: Why it cannot be rebuilt for other workers; "" if it can.
        per_step: How many elements of the dataset make a step.
    """

    steps: Callable[..., tuple[Iterator[Step], Any]]
    feed: Feed
    spec: Callable[[], Any]
    cardinality: int
    depth: int
    parts: tuple[int, int]
    wait_context: Callable[[], AbstractContextManager[None]] = nullcontext
    rebuild: Callable[[], Pipeline] | None = None
    fixed_to_workers: str = ""
    per_step: int = 1

    @property
    def is_scaled(self) -> bool:
        """Whether a step takes an element for each replica, however many there are."""
        return self.parts == SCALED

    def __post_init__(self) -> None:
        if elastic.is_on():
            _pipelines.add(self)

    def next_per_step(self, *, is_used: bool) -> int:
        """Return how many elements the next step takes if it was begun before a resize; else 0.

        If some workers had begun a step before the resize and others had not, all of them run it
        with the batch size from before the resize, and not with `per_step` elements.

        Args:
            is_used: Whether the program has taken the batch of its current step.
        """
        group = _group.current()
        if not self.is_scaled or group is None or not group.are_apart:
            return 0
        here = len(self.feed.topology.local_replicas)
        if group.is_behind_others:
            return (group.next_workers or 0) * here
        return 0 if is_used else group.call_workers * here

    def move(self) -> None:
        """Become the pipeline of the workers that are left."""
        assert self.rebuild is not None
        new = vars(self.rebuild())
        vars(self).clear()
        vars(self).update(new)

    @cached_property
    def element_spec(self) -> Any:
        """The spec of a step."""
        return self.spec()


class DistributedDataset(Generic[T_co]):
    """A dataset whose elements are distributed over the replicas of a strategy.

    Returned by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`. It can be iterated several times but not
    transformed: transform the dataset before distributing it.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = rx.data.Dataset.range(4).batch(4)
        >>> for batch in strategy.experimental_distribute_dataset(dataset):
        ...     print(batch)
        PerReplica:{
          0: Array([0, 1], dtype=int32),
          1: Array([2, 3], dtype=int32)
        }
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> DistributedIterator[T_co]:
        begin_loop()
        return DistributedIterator(self._pipeline)

    @property
    def element_spec(self) -> Any:
        """The spec of an element, in the form that `rx.function` accepts as ``input_signature``."""
        return self._pipeline.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold all elements of one pass into one value.

        Args:
            initial_state: The initial value.
            reduce_func: Takes the current value and an element; returns the next value.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> dataset = rx.data.Dataset.range(6).batch(2)
            >>> numbers = strategy.experimental_distribute_dataset(dataset)
            >>> int(numbers.reduce(0, lambda n, x: n + strategy.reduce("SUM", x, axis=0)))
            15
        """
        return reduce(reduce_func, self, initial_state)

    @property
    def cardinality(self) -> int:
        """The number of steps, or a negative constant of `rx.data`."""
        return self._pipeline.cardinality

    def __len__(self) -> int:
        count = self.cardinality
        if count < 0:
            kind = "is infinite" if count == INFINITE_CARDINALITY else "has an unknown length"
            raise TypeError(
                f"The distributed dataset {kind}: count its steps while you iterate over it."
            )
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        properties = dict(self._properties())
        elements = f", elements {properties['elements']}" if "elements" in properties else ""
        steps = f"{properties['steps']} steps, {properties['replicas']}"
        return f"<DistributedDataset of {steps}{elements}>"

    def _repr_html_(self) -> str:
        return Sheet("DistributedDataset", self._properties()).to_html()

    def _properties(self) -> tuple[tuple[str, str], ...]:
        """Return labelled properties for `repr`, without reading any data."""
        pipeline, topology = self._pipeline, self._pipeline.feed.topology
        count, local = topology.num_replicas, len(topology.local_replicas)
        here = "" if local == count else f", {local} of them in this process"
        unknown = {INFINITE_CARDINALITY: "endless", UNKNOWN_CARDINALITY: "an unknown number of"}
        properties = [
            ("steps", unknown.get(pipeline.cardinality, f"{pipeline.cardinality:,}")),
            ("replicas", f"{count} replica{'s' if count > 1 else ''}{here}"),
            ("devices", shown_devices(topology.primary_devices, kind=topology.kind)),
            ("made ready ahead", f"{pipeline.depth} steps"),
        ]
        known = vars(pipeline).get("element_spec")
        return (*properties, *((("elements", str(known)),) if known is not None else ()))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("_"):
                raise AttributeError(
                    f"A distributed dataset has no {name!r}: it can only be iterated. Transform the"
                    " dataset first, and distribute the result."
                )
            raise AttributeError(name)


def is_scaled(dataset: DistributedDataset[Any]) -> bool:
    """Whether a step takes a batch of the dataset for each replica."""
    return dataset._pipeline.is_scaled  # noqa: SLF001 - its own module


class DistributedIterator(Ahead, Generic[T_co]):
    """One pass over a distributed dataset.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = rx.data.Dataset.range(4).batch(2)
        >>> iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> [x.tolist() for x in strategy.experimental_local_results(next(iterator))]
        [[0], [1]]
    """

    def __init__(self, pipeline: Pipeline) -> None:
        Ahead.__init__(self)
        self._pipeline = pipeline
        self._state: Any = None
        self._is_paused = False
        # The per-replica values of the element taken last: the position behind it, and references.
        self._last: tuple[int, list[tuple[int, weakref.ref[PerReplica]]]] = (0, [])
        # Where this pass began: a position, and the elements of the dataset before it, which steps
        # with other numbers of replicas took. Then, the elements of its first steps, if they have
        # other numbers than those after them.
        self._start, self._start_elements = 0, 0
        self._sizes: Sequence[int] = ()
        self._per_step = pipeline.per_step  # of the present pass
        self._elements: Prefetch = self._open(None)
        if elastic.is_on():
            _iterators.add(self)

    @property
    def element_spec(self) -> Any:
        """The spec of an element."""
        return self._pipeline.element_spec

    @property
    def topology(self) -> Topology:
        """The topology whose devices hold the elements."""
        return self._pipeline.feed.topology

    def __iter__(self) -> DistributedIterator[T_co]:
        begin_loop()
        return self

    @overload
    def __next__(self: DistributedIterator[NamedFields]) -> Any: ...

    @overload
    def __next__(self: DistributedIterator[Numbers]) -> SomeArray: ...

    @overload
    def __next__(
        self: DistributedIterator[tuple[Numbers, Numbers]],
    ) -> tuple[SomeArray, SomeArray]: ...

    @overload
    def __next__(
        self: DistributedIterator[tuple[Numbers, Numbers, Numbers]],
    ) -> tuple[SomeArray, SomeArray, SomeArray]: ...

    @overload
    def __next__(self: DistributedIterator[Mapping[K, Numbers]]) -> dict[K, SomeArray]: ...

    @overload
    def __next__(self: DistributedIterator[PerReplica[V]]) -> PerReplica[V]: ...

    @overload
    def __next__(self: DistributedIterator[Any]) -> Any: ...

    def __next__(self) -> Any:
        self.admit()
        return self.take() if is_plain() else take_in_function(self)

    @property
    def origin(self) -> Pipeline:
        """The pipeline of the dataset: iterators of one dataset share compiled functions."""
        return self._pipeline

    def admit(self) -> None:
        """Check that elements may be taken here.

        Raises:
            ValueError: If called inside a replica function.
            ReplicaxError: If this worker joins a run and does not take part yet.
        """
        elastic.refuse_while_joining("reads a distributed dataset")
        frame = current()
        if frame.replica is not None or frame.body is not None:
            raise ValueError(
                "next(iterator) was called inside a replica function, where every replica would"
                " take a batch of all replicas. Call it outside, and pass the batch to"
                " `strategy.run(fn, args=(next(iterator),))`."
            )

    def save_state(self) -> dict[str, Any]:
        """Return the position of this iterator as a small, JSON-serializable dict.

        Under the DATA policy, it can be restored with a different number of workers or replicas.

        Raises:
            InvalidArgumentError: If an element has failed, and a step takes one for each replica.
        """
        with self.lock:
            state = {
                "version": _STATE_VERSION,
                "steps": self._position,
                "errors": self._errors,
                "parts": list(self._pipeline.parts),
                "source": self._state,
            }
            if self._pipeline.is_scaled:
                self._refuse_errors()
                state["elements"] = self._elements_before(self._position)
            return state

    def _elements_before(self, position: int) -> int:
        """Return the number of elements of the dataset before a position of this pass."""
        count = position - self._start
        others = self._sizes[: max(count, 0)]
        return self._start_elements + sum(others) + (count - len(others)) * self._per_step

    def _size_of(self, position: int) -> int:
        """Return how many elements of the dataset the step after ``position`` takes."""
        count = position - self._start
        return self._sizes[count] if 0 <= count < len(self._sizes) else self._per_step

    def _refuse_errors(self) -> None:
        if self._errors:
            raise InvalidArgumentError(
                f'{self._errors} batch(es) of a dataset with batch="per_replica" failed, and their'
                " place among the others is not known: its position cannot be saved. Leave them"
                ' out with `dataset.ignore_errors()`, or use batch="global".'
            )

    def restore_state(self, state: dict[str, Any]) -> None:
        """Move to the position that `save_state` returned, possibly in another process.

        Raises:
            ValueError: If the state does not belong to an iterator like this one.
        """
        saved = as_state(state)
        is_same_kind = _same_kind(saved.get("source"), self._state)
        if saved.get("version") != _STATE_VERSION or not is_same_kind:
            raise InvalidArgumentError(
                f"This is not a state of such a distributed iterator: {state!r:.200}. Pass"
                f" what its `save_state()` returned, of version {_STATE_VERSION}, or begin a new"
                " pass with `iter(dataset)`."
            )
        here = list(self._pipeline.parts)
        if saved.get("parts") != here:
            raise InvalidArgumentError(
                f"{_parts_text(saved.get('parts'))} where this state was saved, and"
                f" {_parts_text(here)} here: after as many steps other elements are left. Restore"
                " it with as many workers and replicas; batches that all workers read and divide"
                " (AutoShardPolicy.DATA with `experimental_distribute_dataset`) go on with any"
                " number of them."
            )
        steps, errors = counted(state, "steps", "errors")
        with self.lock:
            count = counted(state, "elements")[0] if self._pipeline.is_scaled else steps
            elements = self._open(state.get("source"), count, errors)
            self.close()
            self._position, self._errors, self._elements = steps, errors, elements
            self._start, self._start_elements, self._last = steps, count, (0, [])

    def close(self) -> None:
        """End the pass and its thread; a thread that waits for an element sees the end."""
        self._elements.close()
        self._peeked.clear()

    def take(self) -> Any:
        """Return the next element, outside of traced code; an interrupted call does not lose it."""
        with self.lock:
            if not self._peeked:
                self._look()
            with deferred_signals:
                element = Ahead.take(self)
        if elastic.is_on():
            leaves = enumerate(jax.tree.leaves(element, is_leaf=is_distributed))
            parts = [(i, weakref.ref(x)) for i, x in leaves if isinstance(x, PerReplica)]
            self._last = (self._position, parts)
        return element

    # Resizes of an elastic run.

    def check_resize(self) -> None:
        """Raise if the pass cannot go on with other workers.

        Raises:
            CannotResizeError: If so.
        """
        if not self._elements.is_done and (why := self._pipeline.fixed_to_workers):
            raise elastic.CannotResizeError(why)
        if self._errors and self._pipeline.is_scaled:
            raise elastic.CannotResizeError(
                "The place of a batch that failed is not known, as a step takes one for each"
                " replica."
            )

    def pause(self) -> None:
        """Stop reading; `resume` continues at the same position."""
        self._is_paused = not self._elements.is_done
        self._elements.close()
        self._peeked.clear()

    def resume(self) -> None:
        """Continue for the workers that are left; an element that is in use is read again."""
        position, parts = self._last
        in_use = [(i, x) for i, ref in parts if (x := ref()) is not None]
        is_used = bool(in_use) and position == self._position and not self._errors
        if not self._is_paused and not is_used:
            return
        if is_used:
            self._position -= 1
        count = self._elements_before(self._position)
        # A batch that is in use keeps its rows, also if a step takes other numbers of them now.
        sizes = [self._size_of(self._position)] if is_used else []
        if per_step := self._pipeline.next_per_step(is_used=is_used):
            sizes.append(per_step)
        self._elements = self._open(self._state, count, self._errors, sizes)
        self._start, self._start_elements = self._position, count
        if not is_used:
            return
        leaves = jax.tree.leaves(Ahead.take(self), is_leaf=is_distributed)
        for i, value in in_use:
            new = leaves[i]
            value.stored = (
                new.stored if isinstance(new, PerReplica) else Pieces((new,), self.topology)
            )
        if not self._is_paused:
            self._elements.close()

    def _look(self) -> None:
        with load, jax.profiler.TraceAnnotation(INPUT_MARK), self._pipeline.wait_context():
            if not self._elements.move_to(self._peeked):
                raise EndOfSequenceError(self._end())

    def _end(self) -> str:
        return (
            f"End of sequence: the distributed dataset has given all its {self._position} elements."
            " Start again with `iter(dataset)`."
        )

    def _open(
        self, state: Any, skip: int = 0, errors: int = 0, sizes: Sequence[int] = ()
    ) -> Prefetch:
        stop = threading.Event()
        pipeline = self._pipeline
        first = {"sizes": sizes} if pipeline.is_scaled and sizes else {}
        steps, self._state = pipeline.steps(state, 0 if errors else skip, stop, **first)
        if errors:  # failed steps are not counted in `skip`: produce all steps again to find them
            skip_items(steps, skip + errors)
        self._per_step, self._sizes = pipeline.per_step, sizes if pipeline.is_scaled else ()
        put = partial(_put, pipeline.feed)
        return Prefetch(lambda: map(put, steps), pipeline.depth, stop)


_pipelines: OrderedWeakSet[Pipeline] = OrderedWeakSet()
_iterators: OrderedWeakSet[DistributedIterator[Any]] = OrderedWeakSet()


def _check_resize() -> None:
    for iterator in list(_iterators):
        iterator.check_resize()


def _pause() -> None:
    for iterator in list(_iterators):
        iterator.pause()


def _resume() -> None:
    for pipeline in list(_pipelines):
        if not pipeline.fixed_to_workers:
            pipeline.move()
    for iterator in list(_iterators):
        iterator.resume()


elastic.check.register(elastic.INPUT, _check_resize)
elastic.before.register(elastic.DEVICES, _pause)  # first of all: its threads use the devices
elastic.after.register(elastic.INPUT, _resume)


def _same_kind(left: Any, right: Any) -> bool:
    """Whether two source states have the same type, element by element for lists."""
    if isinstance(right, list):
        is_list = isinstance(left, list) and len(left) == len(right)
        return is_list and all(map(_same_kind, left, right))
    return isinstance(left, type(right))


def _parts_text(parts: Any) -> str:
    match parts:
        case [1, 0]:
            return 'A step took a batch for each replica (batch="per_replica")'
        case [int(pipelines), int(elements)]:
            return f"{pipelines} pipeline(s) gave {elements} element(s) of each for a step"
    return f"an unknown number of pipelines ({parts!r:.50}) gave the elements of a step"


def _put(feed: Feed, step: Step) -> Any:
    return step if isinstance(step, Failed) else feed(step)


def distributed_spec(spec: Any, feed: Feed, *, leading: int | bool | None) -> Any:
    """Return the spec of a distributed element.

    Args:
        spec: The spec of the dataset's elements.
        feed: The transfer of its elements to the devices.
        leading: The size of the first axis of each replica's part; True for the size in `spec`.
    """

    def leaf_spec(s: Any) -> Any:
        if not isinstance(s, TensorSpec):
            return s
        shape = s.shape if leading is True or not s.shape else (leading, *s.shape[1:])
        known = s.dtype.kind in "biufc"
        dtype = jax.dtypes.canonicalize_dtype(s.dtype) if known else s.dtype
        local = TensorSpec(shape, dtype)
        return PerReplicaSpec(*[local] * len(feed.topology.local_replicas)) if feed.wraps else local

    return jax.tree.map(leaf_spec, spec, is_leaf=lambda x: isinstance(x, TensorSpec))
