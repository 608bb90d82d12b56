"""GCEClusterResolver: the cluster of a Google Compute Engine instance group."""

import importlib
from collections.abc import Iterator
from typing import Any

from replicax.cluster._errors import ClusterStateError, MissingPackageError
from replicax.cluster._resolver import ClusterResolver
from replicax.cluster._spec import ClusterSpec
from replicax.cluster._tasks import master_of


class GCEClusterResolver(ClusterResolver):
    """Lists the running machines of an instance group, in the order of their addresses.

    Args:
        project: The project.
        zone: The zone of the group.
        instance_group: The group.
        port: The port of every task.
        task_type: The job that the machines form.
        task_id: The index of this machine; give each machine its own.
        rpc_layer: The protocol to put before addresses.
        credentials: Credentials of Google's; ``"default"`` for the machine's own.
        service: A client of the Compute Engine API, ready for use.

    Raises:
        MissingPackageError: There is no ``service``, and Google's client is not installed.

    Example:
        >>> from replicax.cluster._gce import GCEClusterResolver
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
        """Ask Compute Engine for the machines that run."""
        addresses = sorted(f"{ip}:{self._port}" for ip in self._addresses())
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

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Give the address of a task, this one's by default."""
        return master_of(self, task_type, task_id, rpc_layer)

    @property
    def task_type(self) -> str | None:
        """The job that the machines form; fixed by the constructor."""
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
