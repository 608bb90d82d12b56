"""Joining of a cluster, with this process's share of its machine."""

from replicax._src.cluster.spec import ClusterFacts
from replicax._src.topology.devices import name_task
from replicax._src.workers import leases, start
from replicax._src.workers.group import Group


def join_workers(facts: ClusterFacts) -> Group | None:
    """Make this process a worker of the cluster, if that has several workers.

    Returns:
        The group of workers, or None for a process that trains alone.

    Raises:
        RollCallError: If not all workers join.
        ScopeError: If JAX is already initialized, or this process belongs to another cluster.
    """
    leases.note_cluster()
    if facts.num_workers == 1:
        return None
    group = start.start(facts)
    name_task(facts.task_type or "worker", facts.index if facts.task_id is None else facts.task_id)
    return group
