"""Together: what the processes of a topology do at the same time."""

from contextlib import AbstractContextManager, nullcontext

from replicax.topology._mesh import Topology
from replicax.workers import _group


def together(topology: Topology, what: str) -> AbstractContextManager[None]:
    """The gate for a computation on all replicas of ``topology``; nothing if all are ours.

    Args:
        topology: Whose replicas compute.
        what: What they compute, in words; the same on all workers.
    """
    return nullcontext() if topology.is_whole else _group.required().collective(what)
