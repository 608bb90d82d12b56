"""DistributedDataset and DistributedIterator: what a strategy makes of a dataset."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, overload

import jax

from replicax._basics import NamedFields, Numbers, T_co
from replicax._show import Sheet
from replicax._threads import held
from replicax._types import TensorSpec
from replicax.context._current import current
from replicax.data._ahead import Ahead, Failed, around, as_state, counted, is_plain
from replicax.data._errors import EndOfSequenceError, InvalidArgumentError
from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.input._feed import Feed, Prefetch
from replicax.input._split import Step, passed_over
from replicax.topology._devices import shown_devices
from replicax.topology._mesh import Topology
from replicax.values._per_replica import PerReplica, SomeArray
from replicax.values._structures import PerReplicaSpec
from replicax.workers._watch import load

_STATE_VERSION = 3
K = TypeVar("K")
V = TypeVar("V")
INPUT_MARK = "replicax.input"  # what a wait for an element is called in traces of JAX's profiler


@dataclass(frozen=True)
class Pipeline:
    """One worker's way from a dataset to the devices.

    Attributes:
        steps: Makes the host steps of a pass: takes the state of an earlier pass, or None, and how
            many steps to pass over, and an event that says when nobody wants them any more;
            returns the steps and the state of this pass.
        feed: Puts a step on the devices.
        spec: Says what each step looks like; asked for only when somebody wants to know, as it may
            have to read the first element.
        cardinality: How many steps there are, or a negative constant of rx.data.
        depth: How many steps are made ready ahead of time.
        parts: How many pipelines the workers read together, and how many elements of each make a
            step: with other numbers the same number of steps ends elsewhere.
        waiting: What surrounds the wait for a step that workers must agree on.
    """

    steps: Callable[[Any, int, threading.Event], tuple[Iterator[Step], Any]]
    feed: Feed
    spec: Callable[[], Any]
    cardinality: int
    depth: int
    parts: tuple[int, int]
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext

    @cached_property
    def element_spec(self) -> Any:
        """What each step looks like."""
        return self.spec()


class DistributedDataset(Generic[T_co]):
    """A dataset whose elements are spread over the replicas of a strategy.

    Made by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`. It can be iterated many times, and has no
    transformations: transform the dataset before it is distributed.

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
        if not is_plain():
            around.loop()
        return DistributedIterator(self._pipeline)

    @property
    def element_spec(self) -> Any:
        """The specs of an element, as `rx.function` takes them for ``input_signature``."""
        return self._pipeline.element_spec

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold all elements of one pass into one value.

        Args:
            initial_state: What to begin with.
            reduce_func: Takes the value so far and an element; returns the next value.

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
        """How many steps there are, or a negative constant of rx.data."""
        return self._pipeline.cardinality

    def __repr__(self) -> str:
        facts = dict(self._facts())
        return f"<DistributedDataset of {facts['steps']} steps, {facts['replicas']}>"

    def _repr_html_(self) -> str:
        return Sheet("DistributedDataset", self._facts()).to_html()

    def _facts(self) -> tuple[tuple[str, str], ...]:
        """What is known of it without reading any data."""
        pipeline, topology = self._pipeline, self._pipeline.feed.topology
        count, own = topology.num_replicas, len(topology.own)
        here = "" if own == count else f", {own} of them in this process"
        unknown = {INFINITE_CARDINALITY: "endless", UNKNOWN_CARDINALITY: "an unknown number of"}
        facts = [
            ("steps", unknown.get(pipeline.cardinality, f"{pipeline.cardinality:,}")),
            ("replicas", f"{count} replica{'s' if count > 1 else ''}{here}"),
            ("devices", shown_devices(topology.leads, kind=topology.kind)),
            ("made ready ahead", f"{pipeline.depth} steps"),
        ]
        known = vars(pipeline).get("element_spec")
        return (*facts, *((("elements", str(known)),) if known is not None else ()))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if not name.startswith("_"):
                raise AttributeError(
                    f"A distributed dataset has no {name!r}: it can only be iterated. Transform the"
                    " dataset first, and distribute the result."
                )
            raise AttributeError(name)


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
        self._elements: Prefetch = self._open(None)

    @property
    def element_spec(self) -> Any:
        """The specs of an element."""
        return self._pipeline.element_spec

    @property
    def topology(self) -> Topology:
        """The devices that hold its elements."""
        return self._pipeline.feed.topology

    def __iter__(self) -> DistributedIterator[T_co]:
        if not is_plain():
            around.loop()
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
        return self.take() if is_plain() else around.take(self)

    @property
    def origin(self) -> Pipeline:
        """The pipeline of the dataset."""
        return self._pipeline

    def admit(self) -> None:
        """Refuse replica functions.

        Raises:
            ValueError: Inside one.
        """
        frame = current()
        if frame.replica is not None or frame.body is not None:
            raise ValueError(
                "next(iterator) was called inside a replica function, where every replica would"
                " take a batch of all replicas. Call it outside, and pass the batch to"
                " `strategy.run(fn, args=(next(iterator),))`."
            )

    def save_state(self) -> dict[str, Any]:
        """Where this iterator stands: a small dict that JSON can hold.

        Under the DATA policy it can be restored with another number of workers or replicas.
        """
        with self.lock:
            return {
                "version": _STATE_VERSION,
                "steps": self._position,
                "errors": self._errors,
                "parts": list(self._pipeline.parts),
                "source": self._state,
            }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go to where `save_state` was called, also in another process.

        Raises:
            ValueError: If the state is of another kind.
        """
        told = as_state(state)
        if told.get("version") != _STATE_VERSION or not _alike(told.get("source"), self._state):
            raise InvalidArgumentError(
                f"This is no state of a distributed iterator like this one: {state!r:.200}. Pass"
                f" what its `save_state()` returned, of version {_STATE_VERSION}, or begin a new"
                " pass with `iter(dataset)`."
            )
        here = list(self._pipeline.parts)
        if told.get("parts") != here:
            raise InvalidArgumentError(
                f"{_parts(told.get('parts'))} where this state was saved, and {_parts(here)} here:"
                " after as many steps other elements are left. Restore it with as many workers and"
                " replicas; batches that all workers read and divide (AutoShardPolicy.DATA with"
                " `experimental_distribute_dataset`) go on with any number of them."
            )
        steps, errors = counted(state, "steps", "errors")
        with self.lock:
            elements = self._open(state.get("source"), steps, errors)
            self.close()
            self._position, self._errors, self._elements = steps, errors, elements

    def close(self) -> None:
        """End the pass and its thread; a thread that waits for an element finds the end."""
        self._elements.close()
        self._peeked.clear()

    def take(self) -> Any:
        """The next element, in plain code; one that a signal keeps from being taken stays next."""
        with self.lock:
            if not self._peeked:
                self._look()
            with held:
                return Ahead.take(self)

    def _look(self) -> None:
        with load, jax.profiler.TraceAnnotation(INPUT_MARK), self._pipeline.waiting():
            if not self._elements.move_to(self._peeked):
                raise EndOfSequenceError(self._end())

    def _end(self) -> str:
        return (
            f"End of sequence: the distributed dataset has given all its {self._position} elements."
            " Start again with `iter(dataset)`."
        )

    def _open(self, state: Any, skip: int = 0, errors: int = 0) -> Prefetch:
        stop = threading.Event()
        steps, self._state = self._pipeline.steps(state, 0 if errors else skip, stop)
        if errors:  # which steps failed shows only when they are made again
            passed_over(steps, skip + errors)
        put = partial(_put, self._pipeline.feed)
        return Prefetch(lambda: map(put, steps), self._pipeline.depth, stop)


def _alike(left: Any, right: Any) -> bool:
    """Whether the states of two sources are of the same kind."""
    if isinstance(right, list):
        is_list = isinstance(left, list) and len(left) == len(right)
        return is_list and all(map(_alike, left, right))
    return isinstance(left, type(right))


def _parts(parts: Any) -> str:
    match parts:
        case [int(pipelines), int(elements)]:
            return f"{pipelines} pipeline(s) gave {elements} element(s) of each for a step"
    return f"an unknown number of pipelines ({parts!r:.50}) gave the elements of a step"


def _put(feed: Feed, step: Step) -> Any:
    return step if isinstance(step, Failed) else feed(step)


def distributed_spec(spec: Any, feed: Feed, *, leading: int | bool | None) -> Any:
    """The spec of a distributed element.

    Args:
        spec: The dataset's own.
        feed: Where its elements go.
        leading: What the first axis of each component is; True to leave it as it is.
    """

    def one(s: Any) -> Any:
        if not isinstance(s, TensorSpec):
            return s
        shape = s.shape if leading is True or not s.shape else (leading, *s.shape[1:])
        known = s.dtype.kind in "biufc"
        dtype = jax.dtypes.canonicalize_dtype(s.dtype) if known else s.dtype
        local = TensorSpec(shape, dtype)
        return PerReplicaSpec(*[local] * len(feed.topology.own)) if feed.wraps else local

    return jax.tree.map(one, spec, is_leaf=lambda x: isinstance(x, TensorSpec))
