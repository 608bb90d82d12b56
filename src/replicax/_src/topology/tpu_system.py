"""TensorFlow's API to start a TPU system: find, connect, initialize, shut down."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from replicax._src.base.errors import PlacementError
from replicax._src.cluster.checks import ClusterError, ClusterTypeError, show
from replicax._src.cluster.resolvers import ClusterResolver, local_accelerators
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.topology.config import LogicalDevice
from replicax._src.topology.devices import device_name_as
from replicax._src.topology.tpu_slice import current_slice, forget_slice, start_slice
from replicax._src.topology.tpu_topology import TPUTopology

_PROTOCOL = "grpc://"
_PORT = 8470


class TPUSystemMetadata(NamedTuple):
    """The metadata of a TPU system.

    Attributes:
        num_cores: The number of TPU devices.
        num_hosts: The number of processes that drive them.
        num_of_cores_per_host: The number of devices per process.
        topology: Their topology.
        devices: The devices, by name.

    Example:
        >>> resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
        >>> resolver.get_tpu_system_metadata().num_cores  # on 8 virtual devices
        8
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: TPUTopology | None
    devices: tuple[LogicalDevice, ...]


@dataclass(frozen=True)
class TPUHardwareFeature:
    """The result of `TPUClusterResolver.tpu_hardware_feature`: no embedding hardware is known.

    Attributes:
        embedding_feature: 0, for none.
        num_embedding_devices_per_chip: 0.
    """

    embedding_feature: int = 0
    num_embedding_devices_per_chip: int = 0


class HardwareFeature:
    """The hardware features of a TPU.

    Args:
        tpu_hardware_feature_proto: The value of `TPUClusterResolver.tpu_hardware_feature`.

    Example:
        >>> resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
        >>> _ = rx.tpu.experimental.initialize_tpu_system(resolver)
        >>> feature = rx.tpu.experimental.HardwareFeature(resolver.tpu_hardware_feature)
        >>> feature.embedding_feature
        <EmbeddingFeature.UNSUPPORTED: 'UNSUPPORTED'>
    """

    class EmbeddingFeature(enum.Enum):
        """The kinds of hardware for embedding tables."""

        UNSUPPORTED = "UNSUPPORTED"
        V1 = "V1"
        V2 = "V2"

    def __init__(self, tpu_hardware_feature_proto: TPUHardwareFeature) -> None:
        self.tpu_hardware_feature_proto = tpu_hardware_feature_proto

    @property
    def embedding_feature(self) -> "HardwareFeature.EmbeddingFeature":
        """The kind of hardware for embedding tables."""
        return list(self.EmbeddingFeature)[self.tpu_hardware_feature_proto.embedding_feature]

    @property
    def num_embedding_devices_per_chip(self) -> int:
        """The number of devices for embedding tables per chip."""
        return self.tpu_hardware_feature_proto.num_embedding_devices_per_chip


class TPUClusterResolver(ClusterResolver):
    """Finds the TPUs, which JAX drives from the machine that they are attached to.

    Args:
        tpu: ``None``, ``""`` or ``"local"`` for the TPUs of this machine, or of the slice that
            it is part of; without TPUs the strategy simulates a slice on CPU devices.
            ``"grpc://host:port"`` describes a remote TPU, which can be described but not driven.
            A list of one of these is equivalent to it.
        zone: Accepted for compatibility; this machine is in no other zone.
        project: Accepted for compatibility.
        job_name: The task type.
        coordinator_name: A job to list in addition to a remote TPU.
        coordinator_address: The address of that job's only task.
        credentials: Accepted for compatibility.
        service: Accepted for compatibility.
        discovery_url: Accepted for compatibility.

    Raises:
        ClusterTypeError: If ``tpu`` is not text.
        ClusterError: If ``tpu`` is the name of a TPU elsewhere.

    Example:
        >>> from replicax._src.topology.tpu_system import TPUClusterResolver
        >>> resolver = TPUClusterResolver(tpu="")
        >>> resolver.is_local, resolver.task_type, resolver.task_id, resolver.master()
        (True, 'worker', 0, '')
    """

    def __init__(  # noqa: PLR0913 - TensorFlow's signature
        self,
        tpu: str | Sequence[str] | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
    ) -> None:
        del credentials, service, discovery_url
        self._endpoints = _remote_endpoints(tpu, zone, project)
        self._coordinator = (coordinator_name, coordinator_address)
        self._task_type = job_name
        self._task_id = 0
        self._tpu_topology: TPUTopology | None = None

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> "TPUClusterResolver":
        """Return a resolver for TPUs that this process can drive.

        Args:
            tpu: As in the constructor.
            zone: As in the constructor.
            project: As in the constructor.

        Returns:
            The resolver. JAX initializes the devices when they are first used.

        Raises:
            ClusterError: If the TPU is not attached to this machine.

        Example:
            >>> from replicax._src.topology.tpu_system import TPUClusterResolver
            >>> TPUClusterResolver.connect(tpu="local").is_local
            True
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        if not resolver.is_local:
            raise _not_attached(tpu, zone, project)
        return resolver

    @property
    def is_local(self) -> bool:
        """Whether the TPUs belong to this machine, simulated or not.

        Example:
            >>> from replicax._src.topology.tpu_system import TPUClusterResolver
            >>> TPUClusterResolver("grpc://10.0.0.1:8470").is_local
            False
        """
        return not self._endpoints

    def cluster_spec(self) -> ClusterSpec:
        """Return the endpoints of a remote TPU; an empty spec for local TPUs.

        Example:
            >>> from replicax._src.topology.tpu_system import TPUClusterResolver
            >>> TPUClusterResolver("grpc://10.0.0.1:8470").cluster_spec().as_dict()
            {'worker': ['10.0.0.1:8470']}
        """
        if self.is_local:
            return ClusterSpec({})
        cluster = {self._task_type or "worker": self._endpoints}
        name, address = self._coordinator
        if name and address:
            cluster[name] = [address]
        return ClusterSpec(cluster)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the gRPC address of a remote TPU; empty for local TPUs."""
        del rpc_layer
        if self.is_local:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self.task_type or "worker", self.task_id or 0
        return _PROTOCOL + self.cluster_spec().task_address(task_type, task_id)

    def get_master(self) -> str:
        """Return `master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Return `task_type`."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Return the name of the slice's first worker, as in device names.

        Example:
            >>> from replicax._src.topology.tpu_system import TPUClusterResolver
            >>> TPUClusterResolver(tpu="local").get_coordination_service_leader()
            '/job:worker/task:0'
        """
        return f"/job:{self.task_type}/task:0"

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Count the TPU devices of this process; 0 if the slice is simulated."""
        del task_type, task_id, config_proto
        return {"TPU": local_accelerators()["TPU"]}

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Return the number of TPU devices and of hosts, and the names of the devices.

        Raises:
            PlacementError: If the TPU is not attached to this machine.

        Example:
            >>> resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
            >>> metadata = resolver.get_tpu_system_metadata()
            >>> metadata.num_hosts, metadata.num_of_cores_per_host, metadata.devices[0].name
            (1, 8, '/job:localhost/replica:0/task:0/device:TPU:0')
        """
        require_local(self)
        found = current_slice()
        hosts = len({device.process_index for device in found.devices})
        devices = (LogicalDevice(device_name_as(d, "TPU"), "TPU") for d in found.devices)
        count = len(found.devices)
        return TPUSystemMetadata(count, hosts, count // hosts, None, tuple(devices))

    def set_tpu_topology(self, serialized_tpu_topology: bytes | str) -> None:
        """Set the topology from `Topology.serialized`; `initialize_tpu_system` calls this."""
        self._tpu_topology = TPUTopology(serialized_tpu_topology)

    @property
    def tpu_hardware_feature(self) -> TPUHardwareFeature | None:
        """The features of the hardware; None before a topology is set."""
        return None if self._tpu_topology is None else TPUHardwareFeature()


def experimental_connect_to_cluster(  # noqa: PLR0913 - TensorFlow's signature
    cluster_spec_or_resolver: Any,
    job_name: str = "localhost",
    task_index: int = 0,
    protocol: str | None = None,
    make_master_device_default: bool = True,  # noqa: FBT001, FBT002 - TensorFlow's signature
    cluster_device_filters: Any = None,
) -> None:
    """Validate a cluster. Every process drives its own devices, so nothing needs connecting.

    Args:
        cluster_spec_or_resolver: A cluster, such as ``TPUClusterResolver(tpu="")``.
        job_name: Accepted for compatibility, like all that follow.
        task_index: Accepted.
        protocol: Accepted.
        make_master_device_default: Accepted.
        cluster_device_filters: Accepted.

    Raises:
        PlacementError: If it is not a cluster, or is a TPU that this machine does not drive.

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


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> TPUTopology:
    """Start the TPUs of this program, or a simulation of them.

    On a machine with TPUs these are the devices of its slice. On other machines, virtual CPU
    devices simulate a slice, which is logged: the slice in the environment variable
    ``REPLICAX_TPU_TOPOLOGY``, such as ``v4:2x2x2``, or one of all virtual devices.

    Args:
        cluster_resolver: The TPU; by default this machine's.

    Returns:
        The topology of the slice.

    Raises:
        PlacementError: If the slice does not exist, or has more devices than there are.

    Example:
        >>> topology = rx.tpu.experimental.initialize_tpu_system()
        >>> topology.mesh_shape.tolist()  # on 8 virtual devices
        [2, 2, 1, 2]
    """
    require_local(cluster_resolver)
    topology = start_slice().topology
    if cluster_resolver is not None:
        cluster_resolver.set_tpu_topology(topology.serialized())
    return topology


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Forget the slice; existing strategies continue to work, as JAX keeps its devices.

    Args:
        cluster_resolver: The TPU; by default this machine's.

    Example:
        >>> topology = rx.tpu.experimental.initialize_tpu_system()
        >>> rx.tpu.experimental.shutdown_tpu_system()
        >>> rx.config.list_logical_devices("TPU")
        []
    """
    require_local(cluster_resolver)
    forget_slice()


def require_local(resolver: Any) -> None:
    """Raise for a TPU that this machine does not drive.

    Raises:
        PlacementError: If it is a remote TPU, or not a TPU resolver.
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


def _remote_endpoints(tpu: object, zone: str | None, project: str | None) -> list[str]:
    """Return the addresses of a remote TPU; [] for local ones."""
    if tpu is None or tpu in ("", "local"):
        return []
    if isinstance(tpu, list | tuple):
        return _remote_endpoints(_single(tpu), zone, project)
    if not isinstance(tpu, str):
        raise ClusterTypeError(
            f"tpu is {show(tpu)}, a {type(tpu).__name__}; it must be text:"
            " '' or 'local' for the TPUs of this machine."
        )
    if not tpu.startswith(_PROTOCOL) or not tpu.removeprefix(_PROTOCOL):
        raise _not_attached(tpu, zone, project)
    hosts = [part.strip().removeprefix(_PROTOCOL) for part in tpu.split(",")]
    return [host if ":" in host else f"{host}:{_PORT}" for host in hosts]


def _single(tpus: Sequence[object]) -> object:
    if len(tpus) == 1:
        return tpus[0]
    kind = NotImplementedError if tpus else ClusterError
    raise kind(
        f"tpu={show(list(tpus))} names {len(tpus)} TPUs, and a program trains on one. Write"
        " TPUClusterResolver(tpu='local') and start the program on every host of the slice."
    )


def _not_attached(tpu: str | None, zone: str | None, project: str | None) -> ClusterError:
    place = "".join(f" in {word}" for word in (zone, project) if word)
    return ClusterError(
        f"The TPU {tpu!r}{place} is not attached to this machine. JAX drives TPUs from the machine"
        " that holds them: run this program there (on every host of a slice) and write"
        " TPUClusterResolver(tpu='local')."
    )
