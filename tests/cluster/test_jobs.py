import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicax.cluster._checks import ClusterError, ClusterTypeError
from replicax.cluster._resolve import detect_job

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
    assert detect_job() is None


def test_a_jaxjob_is_read_with_the_names_of_its_pods(set_all):
    set_all(JAXJOB)

    facts = detect_job()

    assert facts.addresses == tuple(f"mnist-worker-{i}:6666" for i in range(3))
    assert (facts.num_workers, facts.index, facts.is_chief) == (3, 2, False)
    assert (facts.task_type, facts.task_id) == ("worker", 2)
    assert facts.coordinator == "mnist-worker-0:6666"
    assert facts.source == "Kubeflow JAXJob"


def test_pods_with_a_domain_keep_it(set_all):
    set_all(JAXJOB, COORDINATOR_ADDRESS="mnist-worker-0.team.svc", PROCESS_ID="0")

    assert detect_job().addresses[1] == "mnist-worker-1.team.svc:6666"
    assert detect_job().is_chief


def test_addresses_that_cannot_be_known_are_none(set_all):
    set_all(JAXJOB, COORDINATOR_ADDRESS="10.0.0.7")

    facts = detect_job()

    assert facts.addresses == ("10.0.0.7:6666", None, None)
    assert facts.describe(1) == "worker 1"


@pytest.mark.parametrize("address", ["10.0.0.7:6666", "[::1]:6666"])
def test_the_port_may_stand_in_the_address(set_all, address):
    set_all(JAXJOB, COORDINATOR_ADDRESS=address, COORDINATOR_PORT=None)

    assert detect_job().coordinator == address


def test_jax_own_variables_are_read_too(set_all):
    set_all(
        {
            "JAX_COORDINATOR_ADDRESS": "h:1234",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "1",
        }
    )

    assert (detect_job().coordinator, detect_job().index) == ("h:1234", 1)


def test_a_trainjob_is_read_with_the_names_of_its_pods(set_all):
    set_all(
        {
            "JAX_COORDINATOR_ADDRESS": "mnist-node-0-0.mnist:29500",
            "JAX_COORDINATOR_PORT": "29500",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "1",
        }
    )

    assert detect_job().addresses == ("mnist-node-0-0.mnist:29500", "mnist-node-0-1.mnist:29500")


def test_the_address_alone_moves_the_place_where_a_schedulers_processes_meet(set_all):
    set_all(SLURM, JAX_COORDINATOR_ADDRESS="n2:1234")

    facts = detect_job()

    assert (facts.coordinator, facts.addresses[0], facts.source) == ("n2:1234", "n2:1234", "Slurm")
    assert (facts.index, facts.num_workers) == (2, 3)


def test_the_address_alone_without_a_scheduler_is_refused(set_all):
    set_all({"JAX_COORDINATOR_ADDRESS": "h:1234"})

    with pytest.raises(ClusterError, match="JAX_NUM_PROCESSES and JAX_PROCESS_ID not set"):
        detect_job()


@pytest.mark.parametrize("scheduler", [SLURM, OPEN_MPI, TPU], ids=["Slurm", "Open MPI", "TPU"])
def test_the_port_where_a_schedulers_processes_meet_can_be_chosen(set_all, scheduler):
    set_all(scheduler, JAX_COORDINATOR_PORT="1234")

    assert detect_job().coordinator.endswith(":1234")
    for port in ("x", "0", "70000", "-1"):
        set_all(scheduler, JAX_COORDINATOR_PORT=port)
        with pytest.raises(ClusterError, match="JAX_COORDINATOR_PORT"):
            detect_job()


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
        detect_job()


def test_slurm_is_read_in_its_own_order_of_hosts(set_all):
    set_all(SLURM)

    facts = detect_job()

    hosts = [address.rsplit(":", 1)[0] for address in facts.addresses]
    ports = [int(address.rsplit(":", 1)[1]) for address in facts.addresses]
    assert hosts == ["n2", "n2", "n10"]  # by name, n10 would come first
    assert ports[1] == ports[0] + 1
    assert ports[2] == ports[0]
    assert (facts.index, facts.coordinator, facts.source) == (2, facts.addresses[0], "Slurm")


def test_two_slurm_jobs_do_not_share_a_port(set_all):
    set_all(SLURM)
    one = detect_job().coordinator
    set_all(SLURM, SLURM_JOB_ID="78")

    assert detect_job().coordinator != one


@pytest.mark.parametrize(
    "changes", [{"SLURM_PROCID": None}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}], ids=str
)
def test_a_slurm_shell_or_a_single_task_is_no_cluster(set_all, changes):
    set_all(SLURM, **changes)

    assert detect_job() is None


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
        detect_job()


def test_open_mpi_meets_at_the_host_of_its_launcher(set_all):
    set_all(OPEN_MPI)

    facts = detect_job()

    assert facts.coordinator.startswith("10.96.0.1:")
    assert facts.addresses == (facts.coordinator, None, None, None)
    assert (facts.index, facts.source) == (3, "Open MPI")


def test_open_mpi_over_ipv6_gets_brackets(set_all):
    uri = "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"
    set_all(OPEN_MPI, OMPI_MCA_orte_hnp_uri=uri)

    assert detect_job().coordinator.startswith("[fe80::b9b:ac5d]:")


def test_open_mpi_on_one_machine_needs_no_launcher(set_all):
    set_all(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="4", OMPI_MCA_orte_hnp_uri=None)

    assert detect_job().coordinator.startswith("127.0.0.1:")


def test_open_mpi_that_does_not_say_where_is_refused(set_all):
    set_all(OPEN_MPI, OMPI_MCA_orte_hnp_uri=None)

    with pytest.raises(ClusterError, match="JAX_COORDINATOR_ADDRESS"):
        detect_job()


def test_one_open_mpi_process_is_no_cluster(set_all):
    set_all(OPEN_MPI, OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0")

    assert detect_job() is None


def test_a_tpu_slice_meets_at_its_first_host(set_all):
    set_all(TPU)

    facts = detect_job()

    assert facts.addresses == ("t0:8476", "t1:8476", "t2:8476")
    assert (facts.index, facts.source) == (1, "Cloud TPU")


def test_tpu_processes_on_one_host_meet_beside_the_ports_of_libtpu(set_all):
    set_all(TPU, TPU_PROCESS_ADDRESSES="t0:8476,t0:8477,t1:8476")

    assert detect_job().addresses == ("t0:8482", "t0:8483", "t1:8482")


def test_one_tpu_host_is_no_cluster(set_all):
    set_all(TPU, TPU_WORKER_HOSTNAMES="localhost")

    assert detect_job() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TPU_WORKER_ID": None}, "TPU_WORKER_ID is not"),
        ({"TPU_WORKER_ID": "3"}, "lists 3 hosts"),
        ({"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID is 'x'"),
        ({"TPU_WORKER_HOSTNAMES": "a,,b"}, r"TPU_WORKER_HOSTNAMES\[1\]"),
        ({"MEGASCALE_NUM_SLICES": "2"}, "one of 2 TPU slices"),
    ],
    ids=str,
)
def test_a_tpu_slice_that_contradicts_itself_is_refused(set_all, changes, message):
    set_all(TPU, **changes)

    with pytest.raises(ClusterError, match=message):
        detect_job()


def test_a_jaxjob_comes_before_slurm(set_all):
    set_all({**SLURM, **JAXJOB})

    assert detect_job().source == "Kubeflow JAXJob"


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
            facts = detect_job()
        except (ClusterError, ClusterTypeError):
            return
    assert facts is None or 0 <= facts.index < facts.num_workers == len(facts.addresses)
