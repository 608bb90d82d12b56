"""Together: what the processes of a topology do at the same time."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

from replicax.topology._mesh import Topology
from replicax.workers import _group
from replicax.workers._sockets import GLOO_GREETING, unheard

_Finish = Callable[[Any], Any]
# Where workers have met: they connect, and say so, when they first do.
_connected: set[Topology] = set()


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
    if topology.devices[0].platform != "cpu":
        with _group.required().collective(what):
            yield _as_it_is  # accelerators compute ahead, and are left to
        return
    is_first = topology not in _connected
    quiet = unheard(1, GLOO_GREETING) if is_first else nullcontext()
    with _group.required().collective(what), quiet:
        yield jax.block_until_ready
    _connected.add(topology)


def _as_it_is(results: Any) -> Any:
    return results
