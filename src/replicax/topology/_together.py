"""Together: what the processes of a topology do at the same time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

from replicax.topology._mesh import Topology
from replicax.workers import _group

_Finish = Callable[[Any], Any]


def together(topology: Topology, what: str) -> AbstractContextManager[_Finish]:
    """The gate for a computation on all replicas of ``topology``; nothing if all are ours.

    Args:
        topology: Whose replicas compute.
        what: What they compute, in words; the same on all workers.

    Returns:
        A context that gives a function, to be called with the results before the context ends: a
        connection that broke shows only in them.
    """
    return nullcontext(_as_it_is) if topology.is_whole else _gate(topology, what)


@contextmanager
def _gate(topology: Topology, what: str) -> Iterator[_Finish]:
    with _group.required().collective(what):
        # Accelerators compute ahead, and are left to.
        yield jax.block_until_ready if topology.devices[0].platform == "cpu" else _as_it_is


def _as_it_is(results: Any) -> Any:
    return results
