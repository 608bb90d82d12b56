"""Tasks and their addresses, as resolvers answer for them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replicax.cluster._resolver import ClusterResolver


def task_or_own(
    resolver: "ClusterResolver", task_type: str | None, task_id: int | None
) -> tuple[str | None, int | None]:
    """Complete a task that is named by half, or not at all, with the resolver's own.

    Example:
        >>> from replicax.cluster._resolver import SimpleClusterResolver
        >>> from replicax.cluster._spec import ClusterSpec
        >>> from replicax.cluster._tasks import task_or_own
        >>> resolver = SimpleClusterResolver(ClusterSpec({}), task_type="worker", task_id=1)
        >>> task_or_own(resolver, None, 0)
        ('worker', 0)
    """
    job = resolver.task_type if task_type is None else task_type
    return job, resolver.task_id if task_id is None else task_id


def master_of(
    resolver: "ClusterResolver", task_type: str | None, task_id: int | None, rpc_layer: str | None
) -> str:
    """Give the address of a task, the resolver's own by default; empty if that is not known.

    Example:
        >>> from replicax.cluster._resolver import SimpleClusterResolver
        >>> from replicax.cluster._spec import ClusterSpec
        >>> from replicax.cluster._tasks import master_of
        >>> spec = ClusterSpec({"worker": ["a:1", "b:2"]})
        >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=1)
        >>> master_of(resolver, None, None, None), master_of(resolver, None, 0, "grpc")
        ('b:2', 'grpc://a:1')
    """
    job, index = task_or_own(resolver, task_type, task_id)
    if job is None or index is None:
        return ""
    address = resolver.cluster_spec().task_address(job, index)
    return format_master(address, rpc_layer or resolver.rpc_layer)


def format_master(address: str, rpc_layer: str | None) -> str:
    """Put the protocol, if there is one, before an address.

    Example:
        >>> from replicax.cluster._tasks import format_master
        >>> format_master("a:1", "grpc"), format_master("a:1", None)
        ('grpc://a:1', 'a:1')
    """
    return f"{rpc_layer}://{address}" if rpc_layer else address
