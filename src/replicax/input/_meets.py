"""Meets: whether the workers must talk about the steps of a dataset, and how if they must."""

from collections.abc import Iterator
from dataclasses import dataclass
from threading import Event
from typing import Any

from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from replicax.input._agree import Agreement
from replicax.input._sources import DatasetSource, Source
from replicax.input._split import HostStep, Share, without_rows
from replicax.workers._group import required


@dataclass(frozen=True)
class Meets:
    """What the workers that read one dataset have to tell each other.

    Attributes:
        share: Which replicas are whose.
        source: What this worker reads.
        needs_none: Whether every worker can tell by itself what the others have, because all read
            the same batches and know how many there are.
        drop: Whether the pass ends for all when one worker cannot serve all of its replicas.
    """

    share: Share
    source: Source
    needs_none: bool
    drop: bool = False

    @property
    def cardinality(self) -> int:
        """How many steps the workers take together, as far as it is known without asking."""
        endless = self.source.cardinality == INFINITE_CARDINALITY
        return INFINITE_CARDINALITY if endless else UNKNOWN_CARDINALITY

    def together(self, own: Iterator[HostStep], stop: Event) -> Iterator[HostStep]:
        """This worker's steps, made to fit those of the others."""
        if self.share.workers == 1 or self.needs_none:
            return own
        agreement = Agreement(
            required(), self.share, lambda: without_rows(self.source.element_spec), self.drop
        )
        return agreement.steps(own, stop)

    def one_order(self, state: Any) -> Any:
        """The state of a new pass in which all workers read in the same random order."""
        if (
            state is not None
            or self.share.workers == 1
            or not isinstance(self.source, DatasetSource)
        ):
            return state
        mine = self.source.dataset.__iter__().save_state()
        told: Any = required().agree("the order of a dataset", mine)[0]
        return told
