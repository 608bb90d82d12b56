"""Meets: whether the workers must talk about the steps of a dataset, and how if they must."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Event
from typing import Any

from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.input._agree import Agreement
from replicax.input._sources import DatasetSource, Source
from replicax.input._split import Share, Step, without_rows
from replicax.workers._group import required


@dataclass(frozen=True)
class Meets:
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
