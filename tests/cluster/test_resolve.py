import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicax._src.base.errors import ReplicaxError
from replicax._src.cluster.checks import ClusterError, ClusterTypeError
from replicax._src.cluster.detection import resolve_cluster
from replicax._src.cluster.launchers import detect
from replicax._src.cluster.resolvers import ClusterResolver, SimpleClusterResolver
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.topology.tpu_system import TPUClusterResolver

# The cluster of the page: ps and evaluator are listed, and nobody waits for them.
PAGE = {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]}
FULL = {
    "chief": ["c:1"],
    "worker": ["w:1", "w:2"],
    "ps": ["p:1"],
    "evaluator": ["e:1"],
}


def resolve(cluster, task_type=None, task_id=None):
    spec = ClusterSpec(cluster)
    return resolve_cluster(SimpleClusterResolver(spec, task_type=task_type, task_id=task_id))


def test_without_a_cluster_there_is_one_worker():
    facts = resolve_cluster()

    assert (facts.num_workers, facts.index, facts.is_chief) == (1, 0, True)
    assert (facts.addresses, facts.coordinator) == ((), None)
    assert (facts.task_type, facts.task_id, facts.source) == (None, None, "no cluster")


def test_the_page_example_has_two_workers_and_no_parameter_server(set_tf_config):
    for index in (0, 1):
        set_tf_config({"cluster": PAGE, "task": {"type": "worker", "index": index}})

        facts = resolve_cluster()

        assert (facts.num_workers, facts.index) == (2, index)
        assert facts.addresses == ("localhost:12345", "localhost:23456")
        assert facts.is_chief == (index == 0)
        assert facts.coordinator == "localhost:12345"
        assert facts.source == "TF_CONFIG"
        assert facts.describe(1) == "worker 1 (localhost:23456)"


@pytest.mark.parametrize(
    ("task_type", "task_id", "index"), [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2)]
)
def test_the_chief_is_first_and_the_workers_follow(task_type, task_id, index):
    facts = resolve(FULL, task_type, task_id)

    assert facts.addresses == ("c:1", "w:1", "w:2")
    assert (facts.num_workers, facts.index) == (3, index)
    assert (facts.task_type, facts.task_id) == (task_type, task_id)
    assert facts.is_chief == (task_type == "chief")
    assert facts.coordinator == "c:1"


def test_an_evaluator_is_a_cluster_of_its_own():
    listed = resolve(FULL, "evaluator", 0)
    unlisted = resolve(PAGE, "evaluator", 0)

    assert (listed.num_workers, listed.index, listed.is_chief) == (1, 0, True)
    assert (listed.addresses, listed.coordinator) == (("e:1",), None)
    assert (unlisted.num_workers, unlisted.addresses) == (1, ())


def test_a_chief_alone_is_a_cluster_of_one():
    facts = resolve({"chief": ["c:1"]}, "chief", 0)

    assert (facts.num_workers, facts.coordinator) == (1, "c:1")


def test_a_resolver_wins_over_tf_config(set_tf_config):
    set_tf_config({"cluster": PAGE, "task": {"type": "worker", "index": 1}})

    facts = resolve({"worker": ["x:1"]}, "worker", 0)

    assert (facts.addresses, facts.source) == (("x:1",), "SimpleClusterResolver")


def test_a_malformed_tf_config_is_not_looked_at_when_a_resolver_is_given(set_tf_config):
    set_tf_config("{oops")

    assert resolve({"worker": ["x:1"]}, "worker", 0).num_workers == 1
    with pytest.raises(ClusterError, match="TF_CONFIG is not JSON"):
        resolve_cluster()


def test_tf_config_wins_over_a_scheduler(set_tf_config, monkeypatch):
    monkeypatch.setenv("COORDINATOR_ADDRESS", "h:1")
    monkeypatch.setenv("NUM_PROCESSES", "5")
    monkeypatch.setenv("PROCESS_ID", "4")
    assert (resolve_cluster().num_workers, resolve_cluster().index) == (5, 4)

    set_tf_config({"cluster": PAGE, "task": {"type": "worker", "index": 1}})

    assert (resolve_cluster().num_workers, resolve_cluster().index) == (2, 1)


def test_an_empty_cluster_means_one_worker(set_tf_config):
    set_tf_config({"cluster": {}, "task": {"type": "worker", "index": 0}})

    assert resolve_cluster().num_workers == 1
    assert resolve_cluster(TPUClusterResolver("")).source == "TPUClusterResolver"
    assert resolve_cluster(TPUClusterResolver("")).addresses == ()


def test_a_text_index_counts_as_a_number(set_tf_config):
    set_tf_config({"cluster": PAGE, "task": {"type": "worker", "index": "1"}})

    assert resolve_cluster(TFConfigClusterResolver()).index == 1


class Late(ClusterResolver):
    """Knows its task only once the cluster was asked for, as Slurm's does."""

    def cluster_spec(self):
        self._task_type, self._task_id = "worker", 1
        return {"worker": ["a:1", "b:1"]}

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return ""


def test_the_task_is_read_after_the_cluster_which_may_be_a_dictionary():
    assert resolve_cluster(Late()).index == 1


@pytest.mark.parametrize("answer", [None, 5, "worker", ["a:1"]], ids=repr)
def test_a_resolver_that_answers_something_else_is_refused(answer):
    resolver = Late()
    resolver.cluster_spec = lambda: answer

    with pytest.raises(ClusterTypeError, match=r"cluster_spec\(\) of Late returned"):
        resolve_cluster(resolver)


@pytest.mark.parametrize("resolver", [5, "TF_CONFIG", PAGE, ClusterSpec(PAGE)], ids=repr)
def test_something_that_is_not_a_resolver_is_refused(resolver):
    with pytest.raises(ClusterTypeError, match="it must be a ClusterResolver"):
        resolve_cluster(resolver)


@pytest.mark.parametrize(
    ("task_type", "task_id", "missing"),
    [
        (None, None, "task_type and task_id"),
        ("worker", None, "task_id is missing"),
        (None, 0, "task_type is missing"),
    ],
)
def test_a_cluster_without_a_task_is_refused(task_type, task_id, missing):
    with pytest.raises(ClusterError, match=missing):
        resolve(PAGE, task_type, task_id)


def test_a_parameter_server_is_told_not_to_start():
    with pytest.raises(ClusterError, match=r"parameter server.*Do not start this process"):
        resolve(PAGE, "ps", 0)


BAD = [
    (PAGE, "chief", 0, r"no such job; its jobs are \['ps', 'worker'\]"),
    (PAGE, "worker", 2, r"task 2 of job 'worker', which has 2 tasks"),
    (PAGE, "worker", -1, "task_id of SimpleClusterResolver is -1"),
    (PAGE, "worker", "x", "task_id of SimpleClusterResolver is 'x'"),
    (PAGE, "worker", 1.5, "task_id of SimpleClusterResolver is 1.5"),
    (PAGE, "master", 0, "task_type of SimpleClusterResolver is 'master'"),
    (PAGE, "Worker", 0, "task types that train are"),
    (PAGE, "", 0, "task_type of SimpleClusterResolver is empty"),
    ({"worker": ["a:1"], "gpu": ["b:1"]}, "worker", 0, "a job 'gpu'; the jobs of a training"),
    ({"workers": ["a:1"]}, "workers", 0, "a job 'workers'"),
    ({"chief": ["a:1", "b:1"]}, "chief", 0, "2 tasks in job 'chief'"),
    ({**PAGE, "evaluator": ["a:1", "b:1"]}, "worker", 0, "2 tasks in job 'evaluator'"),
    ({**PAGE, "evaluator": ["a:1"]}, "evaluator", 1, "task 1 of job 'evaluator'"),
    ({"worker": {0: "a:1", 2: "b:1"}}, "worker", 0, "no address for task 1 of job 'worker'"),
    ({"worker": {1: "a:1"}}, "worker", 1, "no address for task 0 of job 'worker'"),
    ({"worker": {1: "a:1"}}, "worker", 0, r"with the indices \[1\]"),
    ({"worker": {0: "a:1", 999_999: "b:1"}}, "worker", 0, "no address for task 1 of"),
    ({"chief": {3: "a:1"}}, "chief", 3, "no address for task 0 of job 'chief'"),
    ({"worker": []}, "worker", 0, "which has 0 tasks"),
    ({"worker": ["a:1", "a:1"]}, "worker", 0, "worker 0 and worker 1 the same address 'a:1'"),
    ({"chief": ["a:1"], "worker": ["a:01"]}, "chief", 0, "chief 0 and worker 0 the same address"),
    ({"worker": ["a:1", "b"]}, "worker", 0, "worker 1 has the address 'b'; it must be host:port"),
    ({"worker": ["a:0"]}, "worker", 0, "with port 0"),
    ({"worker": ["a:70000"]}, "worker", 0, "with port 70000"),
    ({"worker": ["grpc://a:1"]}, "worker", 0, "starts with a protocol"),
    ({"worker": [" a:1"]}, "worker", 0, "must be host:port"),
    ({"chief": ["x"], "worker": ["a:1"]}, "worker", 0, "chief 0 has the address 'x'"),
]


@pytest.mark.parametrize(("cluster", "task_type", "task_id", "message"), BAD)
def test_an_invalid_cluster_or_task_is_refused(cluster, task_type, task_id, message):
    with pytest.raises(ClusterError, match=message):
        resolve(cluster, task_type, task_id)


def test_a_parameter_server_needs_no_address_that_could_be_reached():
    assert resolve({"worker": ["a:1"], "ps": ["later"]}, "worker", 0).num_workers == 1


@given(chief=st.booleans(), workers=st.integers(0, 5), ps=st.integers(0, 2))
def test_every_training_task_has_an_index_of_its_own(chief, workers, ps):
    cluster = {
        "ps": [f"p:{i + 1}" for i in range(ps)],
        "worker": [f"w:{i + 1}" for i in range(workers)],
        **({"chief": ["c:1"]} if chief else {}),
    }
    tasks = [("chief", 0)] * chief + [("worker", i) for i in range(workers)]

    facts = [resolve(cluster, *task) for task in tasks]

    assert [fact.index for fact in facts] == list(range(len(tasks)))
    assert [fact.is_chief for fact in facts] == [i == 0 for i in range(len(tasks))]
    assert len({(fact.num_workers, fact.addresses, fact.coordinator) for fact in facts}) <= 1
    for task, fact in zip(tasks, facts, strict=True):
        assert ClusterSpec(cluster).task_address(*task) == fact.addresses[fact.index]


addresses = st.lists(st.sampled_from(["a:1", "b:2", "c", "d:0", "[::1]:5"]), max_size=3)
jobs = st.sampled_from(["chief", "worker", "ps", "evaluator", "other"])


@given(
    cluster=st.dictionaries(jobs, addresses, max_size=4),
    task_type=st.one_of(st.none(), jobs, st.integers(), st.text()),
    task_id=st.one_of(st.none(), st.integers(-1, 4), st.text(), st.floats()),
)
def test_any_cluster_and_task_is_answered_or_refused(cluster, task_type, task_id):
    try:
        facts = resolve(cluster, task_type, task_id)
    except ReplicaxError as error:
        kind = type(error)
    else:
        assert 0 <= facts.index < facts.num_workers
        return
    assert kind in (ClusterError, ClusterTypeError)


def test_facts_cannot_be_changed():
    with pytest.raises(AttributeError):
        resolve_cluster().index = 3
    assert len(set(itertools.repeat(resolve_cluster(), 2))) == 1


JAXJOB = {
    "COORDINATOR_ADDRESS": "mnist-worker-0",
    "COORDINATOR_PORT": "6666",
    "NUM_PROCESSES": "3",
    "PROCESS_ID": "2",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[2,10]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2", "TPU_WORKER_ID": "1"}


@pytest.fixture
def set_all(monkeypatch):
    def set_to(variables, **changes):
        for name, value in {**variables, **changes}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return set_to


def test_without_a_scheduler_nothing_is_found():
    assert detect() is None


def test_a_jaxjob_is_read_with_the_names_of_its_pods(set_all):
    set_all(JAXJOB)

    facts = detect()

    assert facts.addresses == tuple(f"mnist-worker-{i}:6666" for i in range(3))
    assert (facts.num_workers, facts.index, facts.is_chief) == (3, 2, False)
    assert (facts.task_type, facts.task_id) == ("worker", 2)
    assert facts.coordinator == "mnist-worker-0:6666"
    assert facts.source == "Kubeflow JAXJob"


def test_pods_with_a_domain_keep_it(set_all):
    set_all(JAXJOB, COORDINATOR_ADDRESS="mnist-worker-0.team.svc", PROCESS_ID="0")

    assert detect().addresses[1] == "mnist-worker-1.team.svc:6666"
    assert detect().is_chief


def test_addresses_that_cannot_be_known_are_none(set_all):
    set_all(JAXJOB, COORDINATOR_ADDRESS="10.0.0.7")

    facts = detect()

    assert facts.addresses == ("10.0.0.7:6666", None, None)
    assert facts.describe(1) == "worker 1"


@pytest.mark.parametrize("address", ["10.0.0.7:6666", "[::1]:6666"])
def test_the_port_may_stand_in_the_address(set_all, address):
    set_all(JAXJOB, COORDINATOR_ADDRESS=address, COORDINATOR_PORT=None)

    assert detect().coordinator == address


def test_jax_own_variables_are_read_too(set_all):
    set_all(
        {
            "JAX_COORDINATOR_ADDRESS": "h:1234",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "1",
        }
    )

    assert (detect().coordinator, detect().index) == ("h:1234", 1)


def test_a_trainjob_is_read_with_the_names_of_its_pods(set_all):
    set_all(
        {
            "JAX_COORDINATOR_ADDRESS": "mnist-node-0-0.mnist:29500",
            "JAX_COORDINATOR_PORT": "29500",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "1",
        }
    )

    assert detect().addresses == ("mnist-node-0-0.mnist:29500", "mnist-node-0-1.mnist:29500")


def test_the_address_alone_moves_the_place_where_a_schedulers_processes_meet(set_all):
    set_all(SLURM, JAX_COORDINATOR_ADDRESS="n2:1234")

    facts = detect()

    assert (facts.coordinator, facts.addresses[0], facts.source) == ("n2:1234", "n2:1234", "Slurm")
    assert (facts.index, facts.num_workers) == (2, 3)


def test_the_address_alone_without_a_scheduler_is_refused(set_all):
    set_all({"JAX_COORDINATOR_ADDRESS": "h:1234"})

    with pytest.raises(ClusterError, match="JAX_NUM_PROCESSES and JAX_PROCESS_ID not set"):
        detect()


@pytest.mark.parametrize("scheduler", [SLURM, OPEN_MPI, TPU], ids=["Slurm", "Open MPI", "TPU"])
def test_the_port_where_a_schedulers_processes_meet_can_be_chosen(set_all, scheduler):
    set_all(scheduler, JAX_COORDINATOR_PORT="1234")

    assert detect().coordinator.endswith(":1234")
    for port in ("x", "0", "70000", "-1"):
        set_all(scheduler, JAX_COORDINATOR_PORT=port)
        with pytest.raises(ClusterError, match="JAX_COORDINATOR_PORT"):
            detect()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"NUM_PROCESSES": None}, "NUM_PROCESSES not set"),
        ({"PROCESS_ID": None}, "PROCESS_ID not set"),
        ({"NUM_PROCESSES": None, "PROCESS_ID": None}, "NUM_PROCESSES and PROCESS_ID"),
        ({"COORDINATOR_PORT": None}, "without a port"),
        ({"COORDINATOR_PORT": "x"}, "must be host:port"),
        ({"COORDINATOR_PORT": "0"}, "with port 0"),
        ({"COORDINATOR_ADDRESS": ""}, "must be host:port"),
        ({"COORDINATOR_ADDRESS": "a:1"}, "write the port in one of them"),
        ({"COORDINATOR_ADDRESS": "http://a"}, "protocol"),
        ({"PROCESS_ID": "3"}, "indices go from 0 to 2"),
        ({"PROCESS_ID": "-1"}, "PROCESS_ID is '-1'"),
        ({"PROCESS_ID": "x"}, "PROCESS_ID is 'x'"),
        ({"NUM_PROCESSES": "0", "PROCESS_ID": "0"}, "NUM_PROCESSES is 0"),
        ({"NUM_PROCESSES": "2147483647"}, "NUM_PROCESSES is '2147483647'"),
        ({"NUM_PROCESSES": "many"}, "NUM_PROCESSES is 'many'"),
    ],
    ids=str,
)
def test_a_jaxjob_that_contradicts_itself_is_refused(set_all, changes, message):
    set_all(JAXJOB, **changes)

    with pytest.raises(ClusterError, match=message):
        detect()


def test_slurm_is_read_in_its_own_order_of_hosts(set_all):
    set_all(SLURM)

    facts = detect()

    hosts = [address.rsplit(":", 1)[0] for address in facts.addresses]
    ports = [int(address.rsplit(":", 1)[1]) for address in facts.addresses]
    assert hosts == ["n2", "n2", "n10"]  # by name, n10 would come first
    assert ports[1] == ports[0] + 1
    assert ports[2] == ports[0]
    assert (facts.index, facts.coordinator, facts.source) == (2, facts.addresses[0], "Slurm")


def test_two_slurm_jobs_do_not_share_a_port(set_all):
    set_all(SLURM)
    one = detect().coordinator
    set_all(SLURM, SLURM_JOB_ID="78")

    assert detect().coordinator != one


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_NODELIST": None, "SLURM_PROCID": None},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=str,
)
def test_a_slurm_shell_or_a_single_task_is_not_a_cluster(set_all, changes):
    set_all(SLURM, **changes)

    assert detect() is None


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_PROCID": "3"},
        {"SLURM_STEP_TASKS_PER_NODE": "1,1"},
        {"SLURM_STEP_TASKS_PER_NODE": "3"},
        {"SLURM_STEP_NODELIST": "n[2"},
        {"SLURM_STEP_NUM_TASKS": "x"},
    ],
    ids=str,
)
def test_a_slurm_step_that_contradicts_itself_is_refused(set_all, changes):
    set_all(SLURM, **changes)

    with pytest.raises(ClusterError):
        detect()


def test_open_mpi_meets_at_the_host_of_its_launcher(set_all):
    set_all(OPEN_MPI)

    facts = detect()

    assert facts.coordinator.startswith("10.96.0.1:")
    assert facts.addresses == (facts.coordinator, None, None, None)
    assert (facts.index, facts.source) == (3, "Open MPI")


def test_open_mpi_over_ipv6_gets_brackets(set_all):
    uri = "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"
    set_all(OPEN_MPI, OMPI_MCA_orte_hnp_uri=uri)

    assert detect().coordinator.startswith("[fe80::b9b:ac5d]:")


def test_open_mpi_on_one_machine_needs_no_launcher(set_all):
    set_all(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="4", OMPI_MCA_orte_hnp_uri=None)

    assert detect().coordinator.startswith("127.0.0.1:")


def test_open_mpi_that_does_not_say_where_is_refused(set_all):
    set_all(OPEN_MPI, OMPI_MCA_orte_hnp_uri=None)

    with pytest.raises(ClusterError, match="JAX_COORDINATOR_ADDRESS"):
        detect()


def test_one_open_mpi_process_is_not_a_cluster(set_all):
    set_all(OPEN_MPI, OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0")

    assert detect() is None


def test_a_tpu_slice_meets_at_its_first_host(set_all):
    set_all(TPU)

    facts = detect()

    assert facts.addresses == ("t0:8476", "t1:8476", "t2:8476")
    assert (facts.index, facts.source) == (1, "Cloud TPU")


def test_tpu_processes_on_one_host_meet_beside_the_ports_of_libtpu(set_all):
    set_all(TPU, TPU_PROCESS_ADDRESSES="t0:8476,t0:8477,t1:8476")

    assert detect().addresses == ("t0:8482", "t0:8483", "t1:8482")


def test_one_tpu_host_is_not_a_cluster(set_all):
    set_all(TPU, TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")

    assert detect() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TPU_WORKER_ID": None}, "TPU_WORKER_ID is not"),
        ({"TPU_WORKER_ID": "3"}, "lists 3 hosts"),
        ({"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID is 'x'"),
        ({"TPU_WORKER_HOSTNAMES": "a,,b"}, r"TPU_WORKER_HOSTNAMES\[1\]"),
        ({"MEGASCALE_NUM_SLICES": "2"}, "MEGASCALE_COORDINATOR_ADDRESS is not set"),
    ],
    ids=str,
)
def test_a_tpu_slice_that_contradicts_itself_is_refused(set_all, changes, message):
    set_all(TPU, **changes)

    with pytest.raises(ClusterError, match=message):
        detect()


def test_a_jaxjob_comes_before_slurm(set_all):
    set_all({**SLURM, **JAXJOB})

    assert detect().source == "Kubeflow JAXJob"


words = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "3", "a", "a,b", "a:1", "1(x2)", "n[1-2]", "", "-1", "tcp://h:1"]
    ),
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=6),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_environment_is_answered_or_refused(monkeypatch, data):
    base = data.draw(st.sampled_from([JAXJOB, SLURM, OPEN_MPI, TPU]))
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(base)), words, max_size=3))
    with monkeypatch.context() as patch:
        for name, value in {**base, **changed}.items():
            patch.setenv(name, value)
        try:
            facts = detect()
        except (ClusterError, ClusterTypeError):
            return
    assert facts is None or 0 <= facts.index < facts.num_workers == len(facts.addresses)
