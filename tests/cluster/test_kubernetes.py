import importlib.util
from types import SimpleNamespace as Record

import pytest

from replicax._errors import ReplicaxError
from replicax.cluster._checks import ClusterStateError, MissingPackageError
from replicax.cluster._clouds import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)


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
                ("pod-2", "Running", "10.0.0.2"),
                ("pod-1", "Running", "10.0.0.1"),
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
def test_without_its_package_it_says_what_to_install(location):
    with pytest.raises(ImportError, match="pip install kubernetes") as caught:
        KubernetesClusterResolver(executable_location=location)
    assert isinstance(caught.value, MissingPackageError)


@pytest.mark.parametrize("location", [None, 0, "WITHIN_CLUSTER"])
def test_a_location_that_is_none_is_a_value_error(location):
    with pytest.raises(ValueError, match="executable_location is") as caught:
        KubernetesClusterResolver(executable_location=location)
    assert isinstance(caught.value, ReplicaxError)
