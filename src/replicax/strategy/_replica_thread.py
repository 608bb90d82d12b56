"""What surrounds the code of one eager replica in its thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax

from replicax.collectives import _eager
from replicax.context._current import entered
from replicax.context._replica import ReplicaContext
from replicax.strategy._links import ThreadLink
from replicax.topology._virtual import sharing_programs
from replicax.variables._levels import ReplicaStorage, generation

if TYPE_CHECKING:
    from replicax.strategy._base import StrategyBase
    from replicax.topology._mesh import Topology


@contextmanager
def as_replica(
    strategy: StrategyBase, topology: Topology, replica: int, *, has_rows: bool
) -> Iterator[None]:
    """Be replica number ``replica`` of this process until the block ends."""
    seat = _eager.Seat(topology, replica, strategy.cross_device_ops)
    context = ReplicaContext(strategy, ThreadLink(seat, has_rows))
    with (
        jax.default_device(seat.device),
        sharing_programs(),
        # A function that JAX traces here may look at the replica: do not share it with others.
        generation(("replica", topology, replica)),
        entered(
            strategy=strategy,
            replica=context,
            level=ReplicaStorage(topology, replica),
            body=None,
        ),
    ):
        yield
