"""Every launcher is read, or refused with the names of its variables."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from replicax._src.cluster import launchers
from replicax._src.cluster.checks import ClusterError
from replicax._src.cluster.detection import others, resolve_cluster
from replicax._src.cluster.launchers import detect
from replicax._src.cluster.resolvers import SimpleClusterResolver
from replicax._src.cluster.signs import multi_process_signs
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.strategy import strategies
from replicax._src.workers.settings import Settings

VERTEX = {"cluster": {"workerpool0": ["a:2222"], "workerpool1": ["b:2222"]}}

# For each launcher: what it sets in the second of two processes, and where they meet. A port of
# None is one that replicax derives from the job.
LAUNCHERS = {
    "JAX": (
        {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
        ("a", 1),
    ),
    "Kubeflow JAXJob": (
        {"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "2", "PROCESS_ID": "1"},
        ("a", 1),
    ),
    "PyTorchJob": (
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "23456"},
        ("a", 23456),
    ),
    "torchrun": (
        {
            "WORLD_SIZE": "2",
            "RANK": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "run",
        },
        ("a", None),
    ),
    "Open MPI": (
        {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            "OMPI_MCA_orte_hnp_uri": "531.0;tcp://10.0.0.1,10.0.0.9:349",
        },
        ("10.0.0.1", None),
    ),
    "MVAPICH": (
        {
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
        ("127.0.0.1", None),
    ),
    "MVAPICH 4": (
        {
            "MVP_COMM_WORLD_SIZE": "2",
            "MVP_COMM_WORLD_RANK": "1",
            "MVP_COMM_WORLD_LOCAL_SIZE": "2",
        },
        ("127.0.0.1", None),
    ),
    "MPICH": ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}, ("127.0.0.1", None)),
    "Slurm": (
        {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "n[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        ("n1", None),
    ),
    "SkyPilot": (
        {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
            "SKYPILOT_TASK_ID": "sky-1",
        },
        ("10.0.0.1", None),
    ),
    "a program on each node": (
        {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
        ("a", 29500),
    ),
    "RunPod": (
        {
            "NODE_RANK": "1",
            "NUM_NODES": "2",
            "NUM_TRAINERS": "8",
            "WORLD_SIZE": "16",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29400",
        },
        ("10.0.0.1", 29400),
    ),
    "Kubeflow TrainJob of PyTorch": (
        {
            "PET_NODE_RANK": "1",
            "PET_NNODES": "2",
            "PET_MASTER_ADDR": "a",
            "PET_MASTER_PORT": "29400",
            "JOB_COMPLETION_INDEX": "1",
        },
        ("a", 29400),
    ),
    "dstack": (
        {
            "DSTACK_NODES_NUM": "2",
            "DSTACK_NODE_RANK": "1",
            "DSTACK_MASTER_NODE_IP": "10.0.0.1",
            "DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2",
        },
        ("10.0.0.1", None),
    ),
    "LeaderWorkerSet": (
        {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "set-0.set.default"},
        ("set-0.set.default", None),
    ),
    "SageMaker, one variable": (
        {"SM_RESOURCE_CONFIG": '{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}'},
        ("algo-1", None),
    ),
    "SageMaker": (
        {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"},
        ("algo-1", None),
    ),
    "Vertex AI": (
        {"CLUSTER_SPEC": json.dumps({**VERTEX, "task": {"type": "workerpool1", "index": 0}})},
        ("a", 2222),
    ),
    "AWS Batch": (
        {
            "AWS_BATCH_JOB_ID": "job#1",
            "AWS_BATCH_JOB_NUM_NODES": "2",
            "AWS_BATCH_JOB_NODE_INDEX": "1",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1",
        },
        ("10.0.0.1", None),
    ),
    "Cloud TPU": ({"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}, ("t0", 8476)),
    "Cloud TPU slices": (
        {
            "TPU_WORKER_HOSTNAMES": "t0",
            "TPU_WORKER_ID": "0",
            "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": "1",
            "MEGASCALE_COORDINATOR_ADDRESS": "first:8080",
        },
        ("first", 8476),
    ),
}
RANKS = {
    "JAX_PROCESS_ID",
    "PROCESS_ID",
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "MVP_COMM_WORLD_RANK",
    "NODE_RANK",
    "PET_NODE_RANK",
    "DSTACK_NODE_RANK",
    "LWS_WORKER_INDEX",
    "PMI_RANK",
    "SKYPILOT_NODE_RANK",
    "SM_CURRENT_HOST",
    "AWS_BATCH_JOB_NODE_INDEX",
    "TPU_WORKER_ID",
    "MEGASCALE_SLICE_ID",
}

SIGNS = {
    "an Indexed Job": {"JOB_COMPLETION_INDEX": "0"},
    "PMIx": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prte-1"},
    "PMIx in a Slurm step": {
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "prte-1",
        "SLURM_STEP_NUM_TASKS": "1",
    },
    "PMI without a launcher": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "1"},
    "LSF": {"LSB_MCPU_HOSTS": "h1 8 h2 8"},
    "Flux": {"FLUX_JOB_SIZE": "2"},
    "an sbatch script": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    "an sbatch script on two nodes": {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"},
    "slices without hosts": {"MEGASCALE_NUM_SLICES": "2"},
    "JAX without an address": {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
    "JAX without a number": {"JAX_PROCESS_ID": "0"},
    "a JAXJob without an address": {"NUM_PROCESSES": "2", "PROCESS_ID": "0"},
    "PyTorch without a number": {"RANK": "0", "MASTER_ADDR": "localhost"},
    "PyTorch without ranks": {"MASTER_ADDR": "10.0.0.1"},
    "a rank on this machine": {"LOCAL_RANK": "1"},
    "PyTorch with local variables only": {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    "MPI with local variables only": {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"},
    "the rank of a node": {"NODE_RANK": "1"},
    "MaxText": {"JAX_COORDINATOR_IP": "a", "NNODES": "2", "NODE_RANK": "0"},
    "the rank of MPI": {"OMPI_COMM_WORLD_RANK": "0"},
    "Slurm in a container": {"SLURM_PROCID": "1"},
    "Slurm's older variables": {"SLURM_PROCID": "0", "SLURM_NPROCS": "2"},
    "a step without its count": {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a,b"},
    "a TPU host without the others": {"TPU_WORKER_ID": "1"},
    "processes of one TPU host": {"TPU_PROCESS_BOUNDS": "2,1,1"},
    "AWS Neuron": {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "1,1"},
    "Azure Batch": {"AZ_BATCH_HOST_LIST": "10.0.0.4,10.0.0.5"},
    "Volcano": {"VC_WORKER_HOSTS": "a,b", "VC_TASK_INDEX": "0"},
    "Paddle": {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ID": "0"},
    "HTCondor": {"_CONDOR_NPROCS": "2", "_CONDOR_PROCNO": "0"},
    "LSF without slots": {"LSB_HOSTS": "h1 h2"},
    "a task of TF_CONFIG": {"TF_CONFIG": '{"task": {"type": "worker", "index": 1}}'},
    "TF_CONFIG with an empty cluster": {
        "TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 1}}'
    },
    "an unknown launcher": {"ACME_NUM_NODES": "2", "ACME_NODE_RANK": "0"},
    "numbered workers": {"WORKER_ID": "1", "NUM_WORKERS": "2"},
}


@pytest.fixture
def launched(monkeypatch):
    """Set variables, with no others of launchers around."""

    def set_to(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


OURS = {
    "REPLICAX_HUB": "127.0.0.1:7000",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}


@pytest.mark.parametrize("outer", [{}, *(variables for variables, _ in LAUNCHERS.values())])
def test_ranks_of_our_launcher_are_not_those_of_torchrun(launched, outer):
    launched({**outer, **OURS})  # also where a program has removed TF_CONFIG

    found = resolve_cluster()

    assert found.source == "replicax launch"
    assert (found.index, found.num_workers, found.coordinator) == (1, 2, "127.0.0.1:7000")


def test_one_worker_of_our_launcher_is_alone(launched):
    launched({**OURS, "RANK": "0", "WORLD_SIZE": "1"})

    assert resolve_cluster().num_workers == 1


@pytest.mark.parametrize("name", LAUNCHERS)
def test_second_of_two_processes_finds_the_first(launched, name):
    variables, (host, port) = LAUNCHERS[name]
    launched(variables)

    facts = resolve_cluster()

    assert (facts.num_workers, facts.index, facts.is_chief) == (2, 1, False)
    found_host, found_port = facts.coordinator.rsplit(":", 1)
    assert found_host == host
    assert int(found_port) == port if port else 61_000 <= int(found_port) < 65_000
    assert len(facts.addresses) == 2
    assert "worker 1 of 2" in others()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_port_of_the_first_process_can_be_set(launched, name):
    if name == "JAX":
        pytest.skip("its address has the port")
    launched({**LAUNCHERS[name][0], "JAX_COORDINATOR_PORT": "7123"})

    facts = resolve_cluster()

    assert facts.coordinator == facts.addresses[0] == f"{LAUNCHERS[name][1][0]}:7123"


@pytest.mark.parametrize("name", LAUNCHERS)
def test_process_without_its_rank_is_refused(launched, name):
    variables, _ = LAUNCHERS[name]
    if not variables.keys() & RANKS:
        pytest.skip("its rank is part of another variable")
    launched({n: v for n, v in variables.items() if n not in RANKS})

    with pytest.raises(ClusterError, match=r"not set|JAX_PROCESS_ID"):
        resolve_cluster()


@pytest.mark.parametrize("name", SIGNS)
def test_sign_of_several_processes_without_a_cluster_is_refused(launched, name):
    launched(SIGNS[name])

    with pytest.raises(ClusterError, match="one of several") as raised:
        resolve_cluster()

    assert "JAX_COORDINATOR_ADDRESS" in str(raised.value)
    assert resolve_cluster(alone=True).num_workers == 1
    assert "one of several" in others()


@given(
    prefix=st.from_regex(r"[A-Z][A-Z0-9]{0,5}_", fullmatch=True).filter(
        lambda text: not re.match(r".*ARRAY|SLURM_|LOCAL_", text)
    ),
    names=st.sampled_from(
        [
            ("NUM_NODES", "NODE_RANK"),
            ("NNODES", "RANK"),
            ("NODE_COUNT", "NODE_INDEX"),
            ("NUM_PROCESSES", "PROCESS_ID"),
            ("NPROCS", "PROC_ID"),
            ("WORLD_SIZE", "RANK"),
            ("TOTAL_WORKERS", "WORKER_INDEX"),
            ("HOSTS_NUM", "HOST_ID"),
            ("GROUP_SIZE", "INDEX"),
        ]
    ),
    count=st.integers(1, 10**4),
    data=st.data(),
)
def test_count_and_rank_of_an_unknown_launcher_are_a_sign(prefix, names, count, data):
    rank = data.draw(st.integers(0, count - 1))
    count_name, rank_name = (prefix + name for name in names)

    signs = list(multi_process_signs({rank_name: str(rank), count_name: str(count)}))

    assert (f"{count_name}={count}, {rank_name}={rank}" in signs) == (count > 1)
    assert list(multi_process_signs({count_name: str(count)})) == []


@pytest.mark.parametrize(
    "name", ["PBS_NODEFILE", "PE_HOSTFILE", "LSB_DJOB_HOSTFILE", "OAR_NODEFILE", "BATCH_HOSTS_FILE"]
)
def test_job_on_two_hosts_is_refused(launched, tmp_path, name):
    nodes = tmp_path / "nodes"
    nodes.write_text("h1 1\nh1 1\n\n")
    launched({name: str(nodes)})
    assert resolve_cluster().num_workers == 1

    nodes.write_text("h1 1\nh2 1\n")

    with pytest.raises(ClusterError, match=f"{name} lists 2 hosts"):
        resolve_cluster()


def test_step_whose_nodes_a_container_hides_is_refused(launched):
    launched({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"})

    with pytest.raises(ClusterError, match="SLURM_STEP_NODELIST is not set"):
        resolve_cluster()


def test_heterogeneous_slurm_job_is_refused(launched):
    # Slurm counts the tasks of all components, but sorts their hosts: task 0 may be on the last.
    launched(LAUNCHERS["Slurm"][0] | {"SLURM_HET_SIZE": "2"})

    with pytest.raises(ClusterError, match=r"SLURM_HET_SIZE=2.*JAX_COORDINATOR_ADDRESS"):
        resolve_cluster()


def test_replicax_alone_wins_over_every_launcher(launched):
    for variables, _ in LAUNCHERS.values():
        launched(variables)
    launched({"REPLICAX_ALONE": "1"})

    assert resolve_cluster().num_workers == 1
    assert others() == ""


@pytest.mark.parametrize("text", ["0", "", "false", "False", "no", "off"])
def test_replicax_alone_set_to_0_has_no_effect(launched, text):
    launched({"WORLD_SIZE": "2", "REPLICAX_ALONE": text})

    with pytest.raises(ClusterError, match=r"RANK not set|REPLICAX_ALONE is"):
        resolve_cluster()


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "PMIX_RANK": "0",
            "PMIX_NAMESPACE": "slurm.pmix.7.0",
        },
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        {"SKYPILOT_NUM_NODES": "1"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"AWS_BATCH_JOB_NUM_NODES": "1"},
        {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"},
        {"NNODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0"},
        {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NNODES": "1"},  # a batch script
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "MASTER_ADDR": "node7"},
        # Runs that do not belong together, and variables of other programs.
        {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2"},
        {"AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ARRAY_SIZE": "2"},
        {"PBS_ARRAY_INDEX": "1", "PBS_NODENUM": "0", "PBS_TASKNUM": "1"},
        {"NUM_WORKERS": "4", "GROUP_SIZE": "3", "NPROC": "2", "TASK_ID": "1", "BATCH_SIZE": "32"},
        {"CI_NODE_INDEX": "1", "CI_NODE_TOTAL": "2", "PYTEST_XDIST_WORKER_COUNT": "2"},
    ],
    ids=str,
)
def test_one_process_of_a_launcher_is_alone(launched, variables):
    launched(variables)

    assert resolve_cluster().num_workers == 1
    assert others() == ""


@pytest.mark.parametrize(
    "variables", [*(found for found, _ in LAUNCHERS.values()), *SIGNS.values()]
)
def test_resolver_of_tf_config_alone_does_not_hide_other_processes(launched, variables):
    launched(variables)
    resolver = TFConfigClusterResolver()

    with pytest.raises(ClusterError, match=r"finds no cluster in TF_CONFIG.*(worker 1 of|one of)"):
        resolve_cluster(resolver)

    assert resolve_cluster(resolver, alone=True).num_workers == 1
    assert resolve_cluster(SimpleClusterResolver(ClusterSpec({}))).num_workers == 1
    launched({"REPLICAX_ALONE": "1"})
    assert resolve_cluster(resolver).num_workers == 1


# A launcher in these is one of several; in the others, it is the batch script of a job.
RANKED_SIGNS = [
    *(name for name in SIGNS if name.startswith(("PyTorch without a", "PMI", "JAX", "the rank"))),
    "an Indexed Job",
    "jsrun",
    "a rank on this machine",
    "an unknown launcher",
    "Paddle",
    "HTCondor",
    "a task of TF_CONFIG",
]
ALLOCATIONS = [
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"},
    {"LSB_MCPU_HOSTS": "h1 8 h2 8"},
    {"PBS_NUM_NODES": "2"},
    {"SM_HOST_COUNT": "2"},
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
]


@pytest.mark.parametrize("name", [*LAUNCHERS, *RANKED_SIGNS])
def test_launcher_that_another_one_starts_several_times_is_reported(launched, name):
    launched(LAUNCHERS[name][0] if name in LAUNCHERS else SIGNS[name])

    assert re.search("worker 1 of 2|one of several", others(is_launcher=True))


@pytest.mark.parametrize("variables", ALLOCATIONS, ids=str)
def test_launcher_in_a_batch_script_is_the_only_one(launched, variables):
    launched(variables)

    assert others(is_launcher=True) == ""


class FakeSpark:
    class TaskContext:
        context = None

        @classmethod
        def get(cls):
            return cls.context


def test_task_of_spark_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", FakeSpark)
    assert resolve_cluster().num_workers == 1  # the driver

    monkeypatch.setattr(FakeSpark.TaskContext, "context", object())

    with pytest.raises(ClusterError, match=r"a Spark executor.*JAX_COORDINATOR_ADDRESS"):
        resolve_cluster()


@pytest.mark.parametrize("is_engine", [True, False])
def test_engine_of_ipyparallel_is_refused(monkeypatch, is_engine):
    app = SimpleNamespace(IPEngine=SimpleNamespace(initialized=lambda: is_engine))
    monkeypatch.setitem(sys.modules, "ipyparallel.engine.app", app)
    if not is_engine:  # a client that has imported it
        assert resolve_cluster().num_workers == 1
        return
    with pytest.raises(ClusterError, match=r"an engine of ipyparallel.*JAX_COORDINATOR_ADDRESS"):
        resolve_cluster()


@pytest.mark.parametrize(("count", "initialized"), [(2, True), (1, True), (2, False)])
def test_process_group_of_torch_is_a_sign(monkeypatch, count, initialized):
    torch = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialized,
        get_world_size=lambda: count,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)
    if count == 1 or not initialized:
        assert resolve_cluster().num_workers == 1
        return
    with pytest.raises(ClusterError, match=r"torch\.distributed connects 2 processes"):
        resolve_cluster()


def test_mpirun_inside_a_slurm_step_wins(launched):
    launched(LAUNCHERS["Slurm"][0] | {"SLURM_PROCID": "0"})
    launched(LAUNCHERS["Open MPI"][0])

    assert (detect().source, detect().index) == ("Open MPI", 1)


@given(
    first=st.integers(0, 10**6),
    second=st.integers(0, 10**6),
    variable=st.sampled_from(
        [
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "SLURM_CLUSTER_NAME",
            "SLURM_RESTART_COUNT",
            "SLURM_STEP_LAUNCHER_PORT",  # of srun: two clusters may have the same name and ids
        ]
    ),
)
def test_tokens_of_different_slurm_jobs_differ(first, second, variable):
    tokens = []
    for number in (first, second):
        facts = launchers._slurm({**LAUNCHERS["Slurm"][0], variable: str(number)})
        tokens.append(Settings.read(facts, {}).token)

    assert (tokens[0] == tokens[1]) == (first == second)


@given(distribution=st.sampled_from(["cyclic", "plane=2", "cyclic:block"]))
def test_slurm_names_only_the_address_that_a_distribution_lets_it_know(distribution):
    variables = LAUNCHERS["Slurm"][0] | {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_DISTRIBUTION": distribution,
        "SLURM_NODEID": "1",
    }

    facts = launchers._slurm(variables)

    assert facts.addresses == (facts.coordinator, None, None, None)


def test_rank_0_of_an_arbitrary_distribution_is_on_the_first_host_of_the_file(launched, tmp_path):
    file = tmp_path / "hosts"
    file.write_text("n2\nn1\n")  # Slurm's own list stays sorted: n[1-2]
    launched(LAUNCHERS["Slurm"][0] | {"SLURM_DISTRIBUTION": "arbitrary"})
    launched({"SLURM_HOSTFILE": str(file)})

    assert [address and address.split(":")[0] for address in detect().addresses] == ["n2", None]

    file.unlink()
    with pytest.raises(ClusterError, match=r"SLURM_HOSTFILE, *cannot be read.*JAX_COORDINATOR"):
        detect()


def test_sage_maker_image_without_variables_reads_the_file(tmp_path, monkeypatch):
    file = tmp_path / "resourceconfig.json"
    file.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}')
    monkeypatch.setattr(launchers, "_SAGE_MAKER_FILE", file)

    facts = resolve_cluster()

    assert (facts.num_workers, facts.index, facts.source) == (2, 1, "SageMaker")
    assert facts.coordinator.startswith("algo-1:")

    file.write_text('{"current_host": "algo-1", "hosts": ["algo-1"]}')
    assert resolve_cluster().num_workers == 1

    file.write_text('{"hosts": ["algo-1", "algo-2"]}')
    with pytest.raises(ClusterError, match=r"'current_host' in .* is not set"):
        resolve_cluster()


@pytest.mark.parametrize(
    "variables", [*(found for found, _ in LAUNCHERS.values()), *SIGNS.values()], ids=str
)
def test_mirrored_strategy_warns_of_other_processes(launched, variables, caplog):
    launched(variables)
    strategies.warn_of_others.cache_clear()

    rx.distribute.MirroredStrategy(["CPU:0"])

    [record] = caplog.records
    assert "every process that makes one trains a separate model" in record.getMessage()
    assert "MultiWorkerMirroredStrategy" in record.getMessage()


@pytest.mark.parametrize("namespace", [rx.distribute, rx.compat.v1.distribute])
@pytest.mark.parametrize(
    ("name", "devices"), [("MirroredStrategy", ["CPU:0"]), ("OneDeviceStrategy", "CPU:0")]
)
def test_every_strategy_of_one_process_warns(launched, caplog, namespace, name, devices):
    launched({"WORLD_SIZE": "2"})
    strategies.warn_of_others.cache_clear()

    getattr(namespace, name)(devices)

    [record] = caplog.records
    assert record.getMessage().startswith(f"{name} trains on the devices of this process only")


def test_mirrored_strategy_alone_does_not_warn(launched, caplog):
    launched({"WORLD_SIZE": "1", "RANK": "0"})
    strategies.warn_of_others.cache_clear()

    rx.distribute.MirroredStrategy(["CPU:0"])

    assert caplog.records == []


def test_vertex_pools_in_the_order_of_their_ranks(launched):
    spec = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]}}
    spec["task"] = {"type": "workerpool1", "index": 1}
    launched({"CLUSTER_SPEC": json.dumps(spec)})

    assert (detect().index, detect().addresses) == (2, ("a:1", "b:1", "c:1"))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"cluster": {}, "task": {"type": "workerpool2", "index": 0}}']
)
def test_invalid_vertex_cluster_is_refused(launched, text):
    launched({"CLUSTER_SPEC": text})

    with pytest.raises(ClusterError, match="CLUSTER_SPEC"):
        detect()


def test_pod_is_a_worker_only_in_an_indexed_job(launched):
    launched({"KUBERNETES_SERVICE_HOST": "192.0.2.1", "HOSTNAME": "notebook-0"})
    assert resolve_cluster().num_workers == 1

    launched({"JOB_COMPLETION_INDEX": "0"})

    with pytest.raises(ClusterError, match="JAX_COORDINATOR_ADDRESS"):
        resolve_cluster()
