"""Plain values in reductions: one value of each worker -> a per-replica value."""

from typing import Any

import jax.numpy as jnp

from replicax.context._current import current
from replicax.topology._mesh import Topology
from replicax.values._per_replica import DistributedValues, PerReplica, in_body, pieces
from replicax.values._reduce import is_slices
from replicax.variables._held import variable_of
from replicax.variables._levels import level


def is_workers_own(value: Any, topology: Topology | None) -> bool:
    """Whether other workers may hold another value in the place of this one."""
    value = value.values if is_slices(value) else value
    if topology is None or topology.is_whole or isinstance(value, DistributedValues):
        return False
    variable = variable_of(value)
    return variable is None or variable.topology is None


def of_each_worker(value: Any, topology: Topology, verb: str, *, once: bool) -> PerReplica:
    """A plain value as the per-replica value of its worker's replicas.

    Args:
        value: A number, an array, or a variable that belongs to no strategy.
        topology: The replicas of all workers.
        verb: What is done with it.
        once: Whether it matters how many replicas of this worker hold it.

    Raises:
        ValueError: If that matters, and there are several.
    """
    count = len(topology.own)
    if once and count > 1:
        raise ValueError(
            f"{value!r} is one value for the {count} replicas of this worker, so that {verb} could"
            " count it once or for each of them. Give each replica its own, with `strategy.run` or"
            " `strategy.experimental_distribute_values_from_function`."
        )
    array = jnp.asarray(value)
    level().uses(topology, verb)
    if (body := current().body) is not None:
        return in_body(array, topology, body.across)
    return pieces([array] * count, topology)
