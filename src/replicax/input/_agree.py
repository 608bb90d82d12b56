"""Agree: this worker's steps -> steps that all workers take together.

Workers that read different files have different numbers of steps, of different sizes. A worker that
has run out still steps, with nothing, until no worker has anything left; and all must know before a
step whether its parts are equal, as that decides how it runs. The workers tell each other through
the hub, ahead of time, in the thread that reads the data: training does not wait for it.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event
from typing import Any

import jax
import numpy as np

from replicax.data._ahead import Failed
from replicax.data._errors import InvalidArgumentError
from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.data._structure import flatten, from_json, to_json
from replicax.input._sources import DatasetSource, Source
from replicax.input._split import HostStep, Share, Step, emptied, evened, without_rows
from replicax.workers._group import Cancelled, Group, required

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
    source: Source
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
