"""KubernetesClusterResolver: the cluster of the pods that carry a label."""

import enum
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.cluster._errors import ClusterError, ClusterStateError, MissingPackageError
from replicax.cluster._resolver import ClusterResolver
from replicax.cluster._spec import ClusterSpec
from replicax.cluster._tasks import master_of
from replicax.cluster._values import show


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which decides how it finds the Kubernetes API.

    Example:
        >>> locations = rx.distribute.cluster_resolver.KubernetesExecutableLocation
        >>> [location.name for location in locations]
        ['WITHIN_CLUSTER', 'OFF_CLUSTER']
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Lists the pods that carry a label, in the order of their names.

    Kubernetes does not say which of them this process is: set `task_type` and `task_id`.

    Args:
        job_to_label_mapping: The label selectors of each job; by default the workers are the
            pods with ``job-name=tensorflow``.
        tf_server_port: The port of every task.
        rpc_layer: The protocol to put before addresses.
        override_client: A client of the Kubernetes API, ready for use; by default
            ``kubernetes.client.CoreV1Api()``.
        executable_location: Whether the program runs in a pod of the cluster.

    Raises:
        MissingPackageError: The ``kubernetes`` package is not installed.
        ClusterError: ``executable_location`` is no `KubernetesExecutableLocation`.

    Example:
        >>> from types import SimpleNamespace as Record
        >>> from replicax.cluster._kubernetes import KubernetesClusterResolver
        >>> pod = Record(
        ...     metadata=Record(name="pod-0"), status=Record(phase="Running", host_ip="10.0.0.1")
        ... )
        >>> client = Record(list_pod_for_all_namespaces=lambda label_selector: Record(items=[pod]))
        >>> resolver = KubernetesClusterResolver({"worker": ["app=mnist"]}, override_client=client)
        >>> resolver.task_type, resolver.task_id = "worker", 0
        >>> resolver.master()
        'grpc://10.0.0.1:8470'
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        self._selectors = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port = tf_server_port
        self._client = override_client or _make_client(executable_location)
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Ask Kubernetes for the pods.

        Raises:
            ClusterStateError: A pod is not running.
        """
        return ClusterSpec(
            {
                job: [
                    f"{_running_pod(pod).status.host_ip}:{self._port}"
                    for selector in selectors
                    for pod in self._pods(selector)
                ]
                for job, selectors in self._selectors.items()
            }
        )

    def _pods(self, selector: str) -> list[Any]:
        answer = self._client.list_pod_for_all_namespaces(label_selector=selector)
        return sorted(answer.items, key=lambda pod: str(pod.metadata.name))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Give the address of a task; empty if none is named and this one is not known."""
        return master_of(self, task_type, task_id, rpc_layer)


def _make_client(location: KubernetesExecutableLocation) -> Any:
    if not isinstance(location, KubernetesExecutableLocation):
        raise ClusterError(
            f"executable_location is {show(location)}; it must be"
            " KubernetesExecutableLocation.WITHIN_CLUSTER or OFF_CLUSTER."
        )
    try:
        config = importlib.import_module("kubernetes.config")
        client = importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise MissingPackageError(
            "KubernetesClusterResolver needs the Kubernetes client: pip install kubernetes."
            " Or pass a client of your own as override_client."
        ) from error
    if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    return client.CoreV1Api()


def _running_pod(pod: Any) -> Any:
    if pod.status.phase != "Running":
        raise ClusterStateError(
            f"Pod {pod.metadata.name!r} is not running, its phase is {pod.status.phase!r};"
            " wait until every pod of the job runs, then ask again."
        )
    return pod
