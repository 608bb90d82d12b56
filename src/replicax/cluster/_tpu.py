"""TPUClusterResolver: the TPUs of this machine."""

from collections.abc import Sequence
from typing import Any

from replicax.cluster._errors import ClusterError, ClusterTypeError
from replicax.cluster._resolver import ClusterResolver, local_accelerators
from replicax.cluster._spec import ClusterSpec
from replicax.cluster._values import show

_PROTOCOL = "grpc://"
_PORT = 8470


class TPUClusterResolver(ClusterResolver):
    """Finds the TPUs, which JAX drives from the machine that they are attached to.

    Args:
        tpu: ``None``, ``""`` or ``"local"`` for the TPUs of this machine, or of the slice that
            it is part of; without TPUs the strategy simulates a slice on CPU devices.
            ``"grpc://host:port"`` describes a remote TPU, which can be looked at but not driven.
            A list of one of these is that one.
        zone: Accepted for TensorFlow's sake; this machine is in no other zone.
        project: Accepted for TensorFlow's sake.
        job_name: The task type.
        coordinator_name: A job to list beside a remote TPU.
        coordinator_address: The address of that job's only task.
        credentials: Accepted for TensorFlow's sake.
        service: Accepted for TensorFlow's sake.
        discovery_url: Accepted for TensorFlow's sake.

    Raises:
        ClusterTypeError: ``tpu`` is no text.
        ClusterError: ``tpu`` is the name of a TPU elsewhere.

    Example:
        >>> from replicax.cluster._tpu import TPUClusterResolver
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

    @staticmethod
    def connect(
        tpu: str | None = None, zone: str | None = None, project: str | None = None
    ) -> "TPUClusterResolver":
        """Make a resolver for TPUs that this process can drive.

        Args:
            tpu: As in the constructor.
            zone: As in the constructor.
            project: As in the constructor.

        Returns:
            The resolver. JAX starts the devices when they are first used.

        Raises:
            ClusterError: The TPU is not attached to this machine.

        Example:
            >>> from replicax.cluster._tpu import TPUClusterResolver
            >>> TPUClusterResolver.connect(tpu="local").is_local
            True
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        if not resolver.is_local:
            raise _not_here(tpu, zone, project)
        return resolver

    @property
    def is_local(self) -> bool:
        """Whether the TPUs are those of this machine, simulated or not.

        Example:
            >>> from replicax.cluster._tpu import TPUClusterResolver
            >>> TPUClusterResolver("grpc://10.0.0.1:8470").is_local
            False
        """
        return not self._endpoints

    def cluster_spec(self) -> ClusterSpec:
        """List the endpoints of a remote TPU; nothing for this machine's.

        Example:
            >>> from replicax.cluster._tpu import TPUClusterResolver
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
        """Give the address of a remote TPU, always by grpc; empty for this machine's."""
        del rpc_layer
        if self.is_local:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self.task_type or "worker", self.task_id or 0
        return _PROTOCOL + self.cluster_spec().task_address(task_type, task_id)

    def get_master(self) -> str:
        """Give the same as `master`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """Give the same as `task_type`."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """Name the first worker of the slice as TensorFlow names devices.

        Example:
            >>> from replicax.cluster._tpu import TPUClusterResolver
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
        """Count the TPU devices of this process; 0 where a slice is only simulated."""
        del task_type, task_id, config_proto
        return {"TPU": local_accelerators()["TPU"]}


def _remote_endpoints(tpu: object, zone: str | None, project: str | None) -> list[str]:
    if tpu is None or tpu in ("", "local"):
        return []
    if isinstance(tpu, list | tuple):
        return _remote_endpoints(_only(tpu), zone, project)
    if not isinstance(tpu, str):
        raise ClusterTypeError(
            f"tpu is {show(tpu)}, a {type(tpu).__name__}; it must be text:"
            " '' or 'local' for the TPUs of this machine."
        )
    if not tpu.startswith(_PROTOCOL) or not tpu.removeprefix(_PROTOCOL):
        raise _not_here(tpu, zone, project)
    hosts = [part.strip().removeprefix(_PROTOCOL) for part in tpu.split(",")]
    return [host if ":" in host else f"{host}:{_PORT}" for host in hosts]


def _only(tpus: Sequence[object]) -> object:
    if len(tpus) == 1:
        return tpus[0]
    kind = NotImplementedError if tpus else ClusterError
    raise kind(
        f"tpu={show(list(tpus))} names {len(tpus)} TPUs, and a program trains on one. Write"
        " TPUClusterResolver(tpu='local') and start the program on every host of the slice."
    )


def _not_here(tpu: str | None, zone: str | None, project: str | None) -> ClusterError:
    place = "".join(f" in {word}" for word in (zone, project) if word)
    return ClusterError(
        f"The TPU {tpu!r}{place} is not attached to this machine. JAX drives TPUs from the machine"
        " that holds them: run this program there (on every host of a slice) and write"
        " TPUClusterResolver(tpu='local')."
    )
