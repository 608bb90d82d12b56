import jax
import pytest

import replicax as rx
from replicax._src.base.errors import PlacementError
from replicax._src.cluster.checks import ClusterError, ClusterTypeError
from replicax._src.cluster.resolvers import ClusterResolver
from replicax._src.topology.tpu_system import TPUClusterResolver


@pytest.mark.parametrize("tpu", [None, "", "local"])
def test_this_machine_is_a_cluster_without_addresses(tpu):
    resolver = TPUClusterResolver(tpu=tpu)

    assert isinstance(resolver, ClusterResolver)
    assert resolver.is_local
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 0, "")
    assert (resolver.master(), resolver.master("worker", 0, "x")) == ("", "")
    assert (resolver.get_master(), resolver.get_job_name()) == ("", "worker")


def test_tpus_are_those_of_this_process():
    expected = sum(device.platform == "tpu" for device in jax.local_devices())

    assert TPUClusterResolver(tpu="").num_accelerators() == {"TPU": expected}


def test_a_remote_tpu_can_be_described():
    resolver = TPUClusterResolver("grpc://10.0.0.1:8470", job_name="w")

    assert not resolver.is_local
    assert resolver.cluster_spec().as_dict() == {"w": ["10.0.0.1:8470"]}
    assert resolver.master() == "grpc://10.0.0.1:8470"
    assert resolver.master("w", 0) == "grpc://10.0.0.1:8470"
    assert resolver.get_job_name() == "w"


def test_several_endpoints_and_a_coordinator_are_listed():
    resolver = TPUClusterResolver(
        "grpc://a:1,grpc://b:2", coordinator_name="c", coordinator_address="d:3"
    )

    assert resolver.cluster_spec().as_dict() == {"worker": ["a:1", "b:2"], "c": ["d:3"]}
    assert resolver.master("c", 0) == "grpc://d:3"


def test_the_master_of_a_remote_tpu_follows_the_task():
    resolver = TPUClusterResolver("grpc://a:1,grpc://b:2")

    resolver.task_id = 1
    assert resolver.master() == resolver.master("worker", 1) == "grpc://b:2"
    resolver.task_id = None
    assert resolver.master() == "grpc://a:1"
    resolver.task_id = 7
    with pytest.raises(ClusterError, match="no task 7"):
        resolver.master()


def test_an_endpoint_without_a_port_gets_that_of_cloud_tpus():
    spec = TPUClusterResolver("grpc://10.0.0.1, grpc://10.0.0.2:99").cluster_spec()

    assert spec.job_tasks("worker") == ["10.0.0.1:8470", "10.0.0.2:99"]


def test_the_coordination_service_is_led_by_the_first_worker():
    leader = TPUClusterResolver("local", job_name="w").get_coordination_service_leader()

    assert leader == "/job:w/task:0"


@pytest.mark.parametrize("tpu", [None, "", "local"])
def test_connect_gives_a_resolver_of_this_machine(tpu):
    assert TPUClusterResolver.connect(tpu).is_local


@pytest.mark.parametrize("tpu", ["my-tpu", "10.0.0.1:8470", "grpc://", "http://a:1", "Local"])
def test_a_tpu_elsewhere_is_refused_with_the_way_to_use_it(tpu):
    with pytest.raises(ClusterError, match=r"not attached to this machine.*tpu='local'"):
        TPUClusterResolver(tpu)
    with pytest.raises(ClusterError, match=r"in us-west1 in my-project is not attached"):
        TPUClusterResolver.connect(tpu, "us-west1", "my-project")


def test_connecting_to_a_remote_tpu_is_refused():
    with pytest.raises(ClusterError, match="not attached"):
        TPUClusterResolver.connect("grpc://10.0.0.1:8470")


@pytest.mark.parametrize("tpu", [5, True, b"local"], ids=repr)
def test_something_that_is_not_text_is_a_type_error(tpu):
    with pytest.raises(ClusterTypeError, match="tpu is"):
        TPUClusterResolver(tpu)


def test_a_list_of_one_tpu_is_that_tpu_and_several_are_refused_as_in_tensorflow():
    assert TPUClusterResolver(tpu=["local"]).is_local
    assert TPUClusterResolver(["grpc://10.0.0.1:8470"]).master() == "grpc://10.0.0.1:8470"
    with pytest.raises(NotImplementedError, match=r"names 2 TPUs.*every host"):
        TPUClusterResolver(tpu=["grpc://10.0.0.1:8470", "grpc://10.0.0.2:8470"])
    with pytest.raises(ClusterError, match="names 0 TPUs"):
        TPUClusterResolver(tpu=[])


def test_a_slice_tells_of_itself():
    resolver = TPUClusterResolver(tpu="")

    metadata = resolver.get_tpu_system_metadata()

    assert metadata._fields == (
        "num_cores",
        "num_hosts",
        "num_of_cores_per_host",
        "topology",
        "devices",
    )
    assert metadata[:4] == (8, 1, 8, None)
    assert [device.device_type for device in metadata.devices] == ["TPU"] * 8
    assert rx.device_name(metadata.devices[3].name).endswith("TPU:3")


def test_a_tpu_elsewhere_does_not_tell_of_itself():
    with pytest.raises(PlacementError, match="not attached"):
        TPUClusterResolver("grpc://10.0.0.1:8470").get_tpu_system_metadata()


def test_a_resolver_knows_of_hardware_once_there_is_a_topology():
    resolver = TPUClusterResolver(tpu="")
    assert resolver.tpu_hardware_feature is None

    rx.tpu.experimental.initialize_tpu_system(resolver)

    feature = rx.tpu.experimental.HardwareFeature(resolver.tpu_hardware_feature)
    assert feature.embedding_feature is feature.EmbeddingFeature.UNSUPPORTED
    assert feature.num_embedding_devices_per_chip == 0
    with pytest.raises(PlacementError, match=r"serialized"):
        resolver.set_tpu_topology(b"nonsense")
