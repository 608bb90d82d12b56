"""Resolvers that query a cloud API: Google Compute Engine and Kubernetes."""

import enum
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replicax._src.cluster.checks import (
    ClusterError,
    ClusterStateError,
    MissingPackageError,
    natural_key,
    show,
)
from replicax._src.cluster.resolvers import AddressedResolver
from replicax._src.cluster.spec import ClusterSpec


class GCEClusterResolver(AddressedResolver):
    """Lists the running machines of an instance group, sorted by address.

    Args:
        project: The project.
        zone: The zone of the group.
        instance_group: The group.
        port: The port of every task.
        task_type: The job that the machines form.
        task_id: The index of this machine; it must differ between machines.
        rpc_layer: The protocol to prepend to addresses.
        credentials: Google credentials; ``"default"`` for the application default credentials.
        service: A Compute Engine API client to use instead of a new one.

    Raises:
        MissingPackageError: If ``service`` is None and Google's client is not installed.

    Example:
        >>> from replicax._src.cluster.clouds import GCEClusterResolver
        >>> resolver = GCEClusterResolver(
        ...     "my-project", "us-west1-a", "my-group", 8470, task_id=1, service=object()
        ... )
        >>> resolver.task_type, resolver.task_id
        ('worker', 1)
    """

    def __init__(  # noqa: PLR0913 - TensorFlow's signature
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str | None = "worker",
        task_id: int | None = 0,
        rpc_layer: str | None = "grpc",
        credentials: Any = "default",
        service: Any = None,
    ) -> None:
        self._place = {"project": project, "zone": zone}
        self._instance_group = instance_group
        self._port = port
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._service = _make_service(credentials) if service is None else service

    def cluster_spec(self) -> ClusterSpec:
        """Query Compute Engine for the running machines."""
        addresses = sorted((f"{ip}:{self._port}" for ip in self._addresses()), key=natural_key)
        return ClusterSpec({self._task_type or "worker": addresses})

    def _addresses(self) -> Iterator[str]:
        groups, machines = self._service.instanceGroups(), self._service.instances()
        request = groups.listInstances(
            **self._place,
            instanceGroup=self._instance_group,
            body={"instanceState": "RUNNING"},
            orderBy="name",
        )
        while request is not None:
            response = request.execute()
            for item in response.get("items", []):
                name = item["instance"].rsplit("/", 1)[-1]
                details = machines.get(**self._place, instance=name).execute()
                yield details["networkInterfaces"][0]["networkIP"]
            request = groups.listInstances_next(
                previous_request=request, previous_response=response
            )

    @property
    def task_type(self) -> str | None:
        """The job that the machines form; set by the constructor only."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        raise ClusterStateError(
            f"The task type of GCEClusterResolver is the job of its machines ({self._task_type!r})"
            f" and cannot be changed; make a new resolver with task_type={task_type!r}."
        )


def _make_service(credentials: Any) -> Any:
    try:
        discovery = importlib.import_module("googleapiclient.discovery")
        if credentials == "default":
            credentials = importlib.import_module("google.auth").default()[0]
    except ImportError as error:
        raise MissingPackageError(
            "GCEClusterResolver needs Google's API client:"
            " pip install google-api-python-client google-auth."
            " Or pass a client of your own as service."
        ) from error
    return discovery.build("compute", "v1", credentials=credentials)


class KubernetesExecutableLocation(enum.Enum):
    """Whether the program runs inside the Kubernetes cluster, which decides how it finds the API.

    Example:
        >>> locations = rx.distribute.cluster_resolver.KubernetesExecutableLocation
        >>> [location.name for location in locations]
        ['WITHIN_CLUSTER', 'OFF_CLUSTER']
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(AddressedResolver):
    """Lists the pods that match label selectors, sorted by name.

    Kubernetes does not report which of them this process is: set `task_type` and `task_id`.

    Args:
        job_to_label_mapping: The label selectors of each job; by default the workers are the
            pods with ``job-name=tensorflow``.
        tf_server_port: The port of every task.
        rpc_layer: The protocol to prepend to addresses.
        override_client: A Kubernetes API client to use; by default
            ``kubernetes.client.CoreV1Api()``.
        executable_location: Whether the program runs in a pod of the cluster.

    Raises:
        MissingPackageError: If the ``kubernetes`` package is not installed.
        ClusterError: If ``executable_location`` is not a `KubernetesExecutableLocation`.

    Example:
        >>> from types import SimpleNamespace as Record
        >>> from replicax._src.cluster.clouds import KubernetesClusterResolver
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
        """Query Kubernetes for the pods.

        Raises:
            ClusterStateError: If a pod is not running.
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
        return sorted(answer.items, key=lambda pod: natural_key(str(pod.metadata.name)))


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
