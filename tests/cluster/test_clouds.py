import importlib.util
from types import SimpleNamespace as Record

import pytest

from replicax._src.base.errors import ReplicaxError
from replicax._src.cluster.checks import ClusterStateError, MissingPackageError
from replicax._src.cluster.clouds import (
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)


class Answer:
    def __init__(self, value):
        self.value = value

    def execute(self):
        return self.value


class Service:
    """Stands for Google's client: pages of instance names, and their addresses."""

    def __init__(self, pages, addresses):
        self.pages, self.addresses, self.asked = pages, addresses, []

    def _page(self, number):
        if number >= len(self.pages):
            return None
        names = self.pages[number]
        items = {"items": [{"instance": f"https://x/zones/z/{name}"} for name in names]}
        request = Answer(items if names else {})
        request.number = number
        return request

    def instanceGroups(self):  # noqa: N802 - Google's name
        def list_instances(**arguments):
            self.asked.append(arguments)
            return self._page(0)

        def list_next(previous_request, previous_response):
            return self._page(previous_request.number + 1)

        return Record(listInstances=list_instances, listInstances_next=list_next)

    def instances(self):
        def get(project, zone, instance):
            ip = self.addresses[instance]
            return Answer({"networkInterfaces": [{"networkIP": ip}]})

        return Record(get=get)


def make(pages, addresses, **arguments):
    service = Service(pages, addresses)
    return GCEClusterResolver("p", "z", "g", 8470, service=service, **arguments), service


def test_running_machines_of_every_page_are_tasks_in_the_order_of_their_addresses():
    resolver, service = make(
        [["b", "a"], [], ["c"]], {"a": "10.0.0.10", "b": "10.0.0.1", "c": "10.0.0.9"}
    )

    spec = resolver.cluster_spec()

    assert spec.as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.9:8470", "10.0.0.10:8470"]}
    [asked] = service.asked
    assert (asked["project"], asked["zone"], asked["instanceGroup"]) == ("p", "z", "g")
    assert asked["body"] == {"instanceState": "RUNNING"}


def test_the_task_is_what_the_constructor_says():
    resolver, _ = make([["a"]], {"a": "10.0.0.1"}, task_type="ps", task_id=0)

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "grpc")
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master(rpc_layer="x") == "x://10.0.0.1:8470"
    resolver.rpc_layer = None
    assert resolver.master() == "10.0.0.1:8470"
    resolver.task_id = None
    assert resolver.master() == ""


def test_the_task_type_cannot_be_changed():
    resolver, _ = make([[]], {})

    with pytest.raises(RuntimeError, match="make a new resolver") as caught:
        resolver.task_type = "ps"
    assert isinstance(caught.value, ClusterStateError)


@pytest.mark.skipif(
    importlib.util.find_spec("googleapiclient") is not None, reason="Google's client is installed"
)
def test_without_its_package_it_says_what_to_install():
    with pytest.raises(ImportError, match="pip install google-api-python-client") as caught:
        GCEClusterResolver("p", "z", "g", 8470)
    assert isinstance(caught.value, MissingPackageError)


class Client:
    """Stands for the client of the Kubernetes API."""

    def __init__(self, pods):
        self.pods = pods

    def list_pod_for_all_namespaces(self, label_selector=None):
        return Record(
            items=[
                Record(metadata=Record(name=name), status=Record(phase=phase, host_ip=ip))
                for name, phase, ip in self.pods.get(label_selector, [])
            ]
        )


def test_pods_are_tasks_in_the_order_of_their_names():
    client = Client(
        {
            "job-name=tensorflow": [
                ("pod-10", "Running", "10.0.0.2"),
                ("pod-2", "Running", "10.0.0.1"),
            ]
        }
    )

    resolver = KubernetesClusterResolver(override_client=client)

    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master(rpc_layer="x") == "x://10.0.0.1:8470"


def test_each_job_has_its_own_labels_in_their_order():
    client = Client(
        {
            "a=1": [("z", "Running", "1.1.1.1")],
            "a=2": [("a", "Running", "2.2.2.2")],
            "p=1": [("p", "Running", "3.3.3.3")],
        }
    )

    resolver = KubernetesClusterResolver(
        {"worker": ["a=1", "a=2"], "ps": ["p=1"]}, tf_server_port=9, override_client=client
    )

    assert resolver.cluster_spec().as_dict() == {
        "worker": ["1.1.1.1:9", "2.2.2.2:9"],
        "ps": ["3.3.3.3:9"],
    }


def test_pods_are_asked_for_each_time():
    client = Client({"x": [("a", "Running", "1.1.1.1")]})
    resolver = KubernetesClusterResolver({"worker": ["x"]}, override_client=client)
    before = resolver.cluster_spec().num_tasks("worker")

    client.pods["x"].append(("b", "Running", "2.2.2.2"))

    assert (before, resolver.cluster_spec().num_tasks("worker")) == (1, 2)


def test_a_pod_that_does_not_run_is_named():
    client = Client({"x": [("a", "Running", "1.1.1.1"), ("b", "Pending", None)]})
    resolver = KubernetesClusterResolver({"worker": ["x"]}, override_client=client)

    with pytest.raises(RuntimeError, match="'b' is not running, its phase is 'Pending'") as caught:
        resolver.cluster_spec()
    assert isinstance(caught.value, ClusterStateError)


@pytest.mark.skipif(
    importlib.util.find_spec("kubernetes") is not None, reason="the kubernetes package is installed"
)
@pytest.mark.parametrize("location", KubernetesExecutableLocation)
def test_without_its_package_kubernetes_says_what_to_install(location):
    with pytest.raises(ImportError, match="pip install kubernetes") as caught:
        KubernetesClusterResolver(executable_location=location)
    assert isinstance(caught.value, MissingPackageError)


@pytest.mark.parametrize("location", [None, 0, "WITHIN_CLUSTER"])
def test_a_location_that_is_none_is_a_value_error(location):
    with pytest.raises(ValueError, match="executable_location is") as caught:
        KubernetesClusterResolver(executable_location=location)
    assert isinstance(caught.value, ReplicaxError)
