"""Joining of a cluster, with this process's share of its machine."""

from replicax.cluster._spec import ClusterFacts
from replicax.topology._devices import name_task
from replicax.topology._virtual import share_cores
from replicax.workers import _start
from replicax.workers._group import Group


def join_workers(facts: ClusterFacts) -> Group | None:
    """Make this process a worker of the cluster, if that has several workers.

    Returns:
        The group of workers, or None for a process that trains alone.

    Raises:
        RollCallError: If not all workers join.
        ScopeError: If JAX is already initialized, or this process belongs to another cluster.
    """
    if facts.num_workers == 1:
        return None
    if not facts.is_connected:
        share_cores(facts.neighbours)
    group = _start.start(facts)
    name_task(facts.task_type or "worker", facts.index if facts.task_id is None else facts.task_id)
    return group
