"""Starting a TPU system, as TensorFlow's programs do it: connect, initialize, shut down."""

from typing import Any

from replicax._errors import PlacementError
from replicax.cluster._resolver import ClusterResolver
from replicax.cluster._spec import ClusterSpec
from replicax.cluster._tpu import TPUClusterResolver
from replicax.topology._slice import forget_slice, start_slice
from replicax.topology._tpu_topology import Topology


def experimental_connect_to_cluster(  # noqa: PLR0913 - TensorFlow's signature
    cluster_spec_or_resolver: Any,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,  # noqa: FBT001, FBT002 - TensorFlow's signature
    cluster_device_filters: Any = None,
) -> None:
    """Connect to a cluster. Here every process drives its own devices, so that it only checks.

    Args:
        cluster_spec_or_resolver: A cluster, such as ``TPUClusterResolver(tpu="")``.
        job_name: Accepted for TensorFlow's sake, as all that follow.
        task_index: Accepted.
        protocol: Accepted.
        make_master_device_default: Accepted.
        cluster_device_filters: Accepted.

    Raises:
        PlacementError: It is no cluster, or a TPU that this machine does not drive.

    Example:
        >>> resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
        >>> rx.config.experimental_connect_to_cluster(resolver)
    """
    del job_name, task_index, protocol, make_master_device_default, cluster_device_filters
    if not isinstance(cluster_spec_or_resolver, ClusterResolver | ClusterSpec):
        raise PlacementError(
            f"Expected a cluster resolver or a ClusterSpec, but got {cluster_spec_or_resolver!r}."
            " Write rx.distribute.cluster_resolver.TPUClusterResolver(tpu='')."
        )
    if isinstance(cluster_spec_or_resolver, TPUClusterResolver):
        require_local(cluster_spec_or_resolver)


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """Start the TPUs of this program, or what stands in for them.

    On a machine with TPUs these are the devices of its slice. On one without, virtual CPU devices
    simulate a slice, which one line of the log says: the slice that the environment variable
    ``REPLICAX_TPU_TOPOLOGY`` names, such as ``v4:2x2x2``, or one of all virtual devices.

    Args:
        cluster_resolver: The TPU; that of this machine by default.

    Returns:
        The topology of the slice.

    Raises:
        PlacementError: The slice does not exist, or has more devices than there are.

    Example:
        >>> topology = rx.tpu.experimental.initialize_tpu_system()
        >>> topology.mesh_shape.tolist()  # on 8 virtual devices
        [2, 2, 1, 2]
    """
    require_local(cluster_resolver)
    return start_slice().topology


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Forget the slice; strategies that use it go on, as JAX keeps its devices.

    Args:
        cluster_resolver: The TPU; that of this machine by default.

    Example:
        >>> topology = rx.tpu.experimental.initialize_tpu_system()
        >>> rx.tpu.experimental.shutdown_tpu_system()
        >>> rx.config.list_logical_devices("TPU")
        []
    """
    require_local(cluster_resolver)
    forget_slice()


def require_local(resolver: Any) -> None:
    """Refuse a TPU that this machine does not drive.

    Raises:
        PlacementError: It is elsewhere, or no TPU at all.
    """
    if resolver is None or (isinstance(resolver, TPUClusterResolver) and resolver.is_local):
        return
    if isinstance(resolver, TPUClusterResolver):
        raise PlacementError(
            f"The TPU at {resolver.master()} is not attached to this machine, and JAX drives TPUs"
            " from the machine that holds them: run this program there, with"
            " TPUClusterResolver(tpu='local')."
        )
    raise PlacementError(
        f"Expected a TPUClusterResolver, but got {resolver!r}. Write"
        " rx.distribute.cluster_resolver.TPUClusterResolver(tpu='')."
    )
