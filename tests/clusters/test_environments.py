"""The table of environments in `docs/workers.md`: two real processes in each.

Every row of the table is what one of these tests saw. ``WRITE_TABLE=1`` writes the page's table
from what the tests of that run saw; without it, a test fails if it sees something else.
"""

import importlib.util
import json
import os
import re
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from replicax._src.workers.wire import free_ports
from tests.clusters.test_clouds import HOSTS, in_pod, needs_kubernetes
from tests.clusters.test_real import PROGRAM, PYTHON, ROOT, SECONDS, environment, need, started
from tests.multi_process.servers import Kubernetes, gce_metadata

pytestmark = [pytest.mark.slow, pytest.mark.clusters]

PAGE = ROOT / "docs" / "workers.md"
TITLE = "| environment | started by | two processes |"
FIRST, SECOND = HOSTS
VARIABLES, LAUNCHER, SERVER = "its variables", "the launcher", "its variables and a local server"


def variables(common, *, rank=None, each=None, how="environment"):
    """A row whose processes get ``common``, and the rank in ``rank`` or the variables ``each``.

    ``{port}`` is a free port, ``{folder}`` an empty folder.
    """

    def start(stack, folder, _):
        port = free_ports(1)[0]
        for index in range(2):
            given = {**common, **(each[index] if each else {rank: str(index)})}
            filled = {
                name: value.replace("{port}", str(port)).replace("{folder}", str(folder))
                for name, value in given.items()
            }
            yield started([*PYTHON, how], environment(**filled))

    return VARIABLES, start


def launched(command, *names, how="environment", **more):
    """A row that one command of a launcher starts."""

    def start(stack, folder, _):
        for name in names:
            need(name)
        yield started([*command, *PYTHON, how], environment(**more))

    return LAUNCHER, start


def with_mpi4py(command, hidden):
    """A row of a launcher that names no address: the processes do not see the variable ``hidden``.

    mpi4py is in a folder of its own, because the programs of other rows must not find it.
    """

    def start(stack, folder, _):
        need(command[0])
        library = Path(sys.prefix) / "mpi4py"
        if not library.exists():
            pytest.skip("make test-clusters installs mpi4py")
        more = {}
        if command is MPICH:  # in Debian its library has a name that mpi4py does not look for
            for found in Path("/usr/lib").glob("*/libmpich.so.12"):
                (folder / "libmpi.so.12").symlink_to(found)
            more = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(folder)}
        env = environment(PYTHONPATH=f"{ROOT / 'src'}{os.pathsep}{library}", **more)
        yield started([*command, "env", "-u", hidden, *PYTHON], env)

    return LAUNCHER, start


def slurm_step(*command):
    def start(stack, folder, request):
        slurm = request.getfixturevalue("slurm")
        env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
        yield started(["srun", *command, *PYTHON], env)

    return LAUNCHER, start


def batch_script():
    def start(stack, folder, request):
        slurm = request.getfixturevalue("slurm")
        script = folder / "job.sh"
        script.write_text(f"#!/bin/sh\nexec {' '.join(PYTHON)} > {folder}/out 2>&1\n")
        env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
        show = f"sbatch -W -n 2 -o /dev/null {script}; cat {folder}/out; exit 1"
        yield started(["sh", "-c", show], env)

    return LAUNCHER, start


def one_launcher():
    def start(stack, folder, _):
        launch = [sys.executable, "-m", "replicax", "launch", "--workers", "2", str(PROGRAM)]
        yield started(launch, environment())

    return LAUNCHER, start


def two_launchers():
    def start(stack, folder, _):
        token = folder / "token"
        token.write_text("secret")
        token.chmod(0o600)
        options = ["--workers", "2", "--hosts", f"{FIRST},{SECOND}", "--token-file", str(token)]
        options += ["--port", str(free_ports(1)[0])]
        for index in range(2):
            launch = [sys.executable, "-m", "replicax", "launch", *options]
            yield started([*launch, "--host-index", str(index), str(PROGRAM)], environment())

    return LAUNCHER, start


def ray(mode):
    def start(stack, folder, _):
        if importlib.util.find_spec("ray") is None:
            pytest.skip("make test-clusters installs Ray")
        program = [sys.executable, str(PROGRAM.with_name("under_ray.py")), mode]
        yield started(program, environment())

    return LAUNCHER, start


def with_torch():
    def start(stack, folder, _):
        if importlib.util.find_spec("torch") is None:
            pytest.skip("make test-clusters installs torch")
        for index in range(2):
            given = {"INDEX": str(index), "ADDRESS": f"file://{folder}/store"}
            yield started([*PYTHON, "torch"], environment(**given))

    return "its variables", start


def tasks_of(library, name):
    """A row whose two processes are tasks of a Python library."""

    def start(stack, folder, _):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"make test-clusters installs {library}")
        program = [sys.executable, "-m", f"tests.multi_process.{name}"]
        paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        yield started(program, environment(PYTHONPATH=paths))

    return LAUNCHER, start


def pods(**how):
    def start(stack, folder, _):
        cluster = Kubernetes(folder, HOSTS, jobset=how["jobset"])
        api = stack.enter_context(cluster.serve())
        common = {"JAX_COORDINATOR_PORT": str(free_ports(1)[0])}
        for index in range(2):
            yield in_pod(index, folder, api, {**common, "JOB_COMPLETION_INDEX": str(index)})

    return SERVER, start


def tpu_pod():
    def start(stack, folder, _):
        port = str(free_ports(1)[0])
        for index in range(2):
            server = stack.enter_context(gce_metadata(index, HOSTS))
            yield started(
                [*PYTHON, "gce"],
                environment(
                    GCE_METADATA_IP=f"127.0.0.1:{server}",
                    JAX_FORCE_TPU_INIT="1",
                    JAX_COORDINATOR_PORT=port,
                ),
            )

    return SERVER, start


def tasks(name, **more):
    """The variable ``name`` of TensorFlow's and Vertex's descriptions, in two processes."""
    return [{name: json.dumps({**more, "task": task})} for task in TASKS[name]]


TASKS = {
    "TF_CONFIG": [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}],
    "CLUSTER_SPEC": [{"type": "workerpool0", "index": 0}, {"type": "workerpool1", "index": 0}],
}
TWO = [f"{FIRST}:{{port}}", f"{SECOND}:{{port}}"]
POOLS = {"workerpool0": TWO[:1], "workerpool1": TWO[1:]}
COORDINATOR = {"COORDINATOR_ADDRESS": f"{FIRST}:{{port}}", "NUM_PROCESSES": "2"}
JAX = {f"JAX_{name}": value for name, value in COORDINATOR.items()}
PORT = {"JAX_COORDINATOR_PORT": "{port}"}
MPICH = ["mpirun.mpich", "-launcher", "fork", "-hosts", "localhost", "-n", "2"]
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
TPU_HOSTS = {"TPU_WORKER_HOSTNAMES": f"{FIRST},{SECOND}"}
SLICES = {
    "TPU_WORKER_HOSTNAMES": FIRST,
    "TPU_WORKER_ID": "0",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": f"{FIRST}:8080",
}
MAIN = {
    "AWS_BATCH_JOB_ID": "job#0",
    "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": FIRST,
}

ENVIRONMENTS = {
    "`jax.distributed.initialize()` called first": variables(
        {"ADDRESS": "127.0.0.1:{port}"}, rank="INDEX", how="initialized"
    ),
    "`keras.distribution.initialize()` called first": variables(
        {"ADDRESS": "127.0.0.1:{port}", "KERAS_BACKEND": "jax"}, rank="INDEX", how="keras"
    ),
    "`TF_CONFIG`": variables({}, each=tasks("TF_CONFIG", cluster={"worker": TWO})),
    "`replicax launch`": one_launcher(),
    "`replicax launch --hosts`": two_launchers(),
    "`JAX_COORDINATOR_ADDRESS`, ...": variables(JAX, rank="JAX_PROCESS_ID"),
    "`TPUStrategy`, by `JAX_COORDINATOR_ADDRESS`, ...": variables(
        JAX | {"REPLICAX_CPU_DEVICES": "1"}, rank="JAX_PROCESS_ID", how="tpu"
    ),
    "Slurm, `srun`": slurm_step("-n", "2"),
    "Slurm, `sbatch` without `srun`": batch_script(),
    "Slurm, `mpirun` in a step": slurm_step("-n", "1", *MPICH),
    "Kubernetes Indexed Job": pods(jobset=False),
    "JobSet": pods(jobset=True),
    "Indexed Job without permission to query the API": variables({}, rank="JOB_COMPLETION_INDEX"),
    "Kubeflow JAXJob": variables(COORDINATOR, rank="PROCESS_ID"),
    "Kubeflow TrainJob": variables(JAX, rank="JAX_PROCESS_ID"),
    "Kubeflow PyTorchJob": variables(
        {"WORLD_SIZE": "2", "MASTER_ADDR": FIRST, "MASTER_PORT": "{port}"}, rank="RANK"
    ),
    "TrainJob of PyTorch, without `torchrun`": variables(
        {"PET_NNODES": "2", "PET_MASTER_ADDR": FIRST, "PET_MASTER_PORT": "{port}"},
        rank="PET_NODE_RANK",
    ),
    "`NODE_RANK`, `NNODES`, `MASTER_ADDR`": variables(
        {"NNODES": "2", "MASTER_ADDR": FIRST, "MASTER_PORT": "{port}"}, rank="NODE_RANK"
    ),
    "RunPod": variables(
        {
            "NUM_NODES": "2",
            "NUM_TRAINERS": "8",
            "WORLD_SIZE": "16",
            "MASTER_ADDR": FIRST,
            "MASTER_PORT": "{port}",
        },
        rank="NODE_RANK",
    ),
    "LeaderWorkerSet": variables(
        {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": FIRST} | PORT, rank="LWS_WORKER_INDEX"
    ),
    "torchrun": launched(["torchrun", "--nproc-per-node=2", "--no-python"], "torchrun"),
    "`torch.distributed.init_process_group()` called first": with_torch(),
    "Ray Train, `JaxTrainer`": ray("trainer"),
    "Ray Train, `rx.integrations.ray.Config()`": ray("backend"),
    "Ray actors with `TF_CONFIG`": ray("actors"),
    "Ray actors without it": ray("bare actors"),
    "Dask tasks": tasks_of("distributed", "under_dask"),
    "ipyparallel engines": tasks_of("ipyparallel", "under_ipyparallel"),
    "Open MPI": launched(OPEN_MPI, "mpirun.openmpi"),
    "MPICH, Intel MPI": launched(MPICH, "mpirun.mpich"),
    "MPICH on several hosts": variables({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, rank="PMI_RANK"),
    "MVAPICH": variables(
        {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2", "MPIRUN_ID": "{port}"},
        rank="MV2_COMM_WORLD_RANK",
    ),
    "MPICH without an address, with mpi4py": with_mpi4py(MPICH, "MPI_LOCALNRANKS"),
    "PMIx": variables({"PMIX_NAMESPACE": "prte"}, rank="PMIX_RANK"),
    "PMIx, with mpi4py": with_mpi4py(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
    "LSF, `jsrun`": variables({"JSM_NAMESPACE_SIZE": "2"}, rank="JSM_NAMESPACE_RANK"),
    "LSF on several hosts": variables({"LSB_MCPU_HOSTS": "a 1 b 1"}, rank="NOTHING"),
    "PBS on several hosts": variables({"PBS_NODEFILE": "{folder}/nodes"}, rank="NOTHING"),
    "Cloud TPU pod on GCE": tpu_pod(),
    "Cloud TPU slice on GKE": variables(TPU_HOSTS | PORT, rank="TPU_WORKER_ID"),
    "Cloud TPU, several slices": variables(SLICES | PORT, rank="MEGASCALE_SLICE_ID"),
    "SkyPilot": variables(
        {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": f"{FIRST}\n{SECOND}"} | PORT,
        rank="SKYPILOT_NODE_RANK",
    ),
    "dstack": variables(
        {"DSTACK_NODES_NUM": "2", "DSTACK_MASTER_NODE_IP": FIRST} | PORT, rank="DSTACK_NODE_RANK"
    ),
    "SageMaker": variables(
        {"SM_HOSTS": json.dumps(HOSTS)} | PORT,
        each=[{"SM_CURRENT_HOST": host} for host in HOSTS],
    ),
    "Vertex AI": variables({}, each=tasks("CLUSTER_SPEC", cluster=POOLS)),
    "AWS Batch": variables(MAIN | PORT, rank="AWS_BATCH_JOB_NODE_INDEX"),
    "`JAX_NUM_PROCESSES` without an address": variables(
        {"JAX_NUM_PROCESSES": "2"}, rank="JAX_PROCESS_ID"
    ),
    "a launcher that nobody knows": variables({"ACME_NUM_NODES": "2"}, rank="ACME_NODE_RANK"),
}
NEED_KUBERNETES = ("Kubernetes Indexed Job", "JobSet")


def outcome(outputs, codes):
    """What the two processes did, for the table."""
    text = "\n".join(outputs)
    totals = re.findall(r"SUM=(\d+)", text)
    if not any(codes) and totals == ["2", "2"]:
        return "sum 2"
    errors = re.findall(r"ClusterError: (.*)", text)
    assert errors, text  # no result, and no error that teaches
    assert totals == [], text  # a worker that trained alone
    assert "JAX_COORDINATOR_ADDRESS" in errors[0]
    signs = re.search(r"seems to be one of several \((.*?)\), but", errors[0])
    started_by = re.search(r"started this process \((.*?)\) on several machines", errors[0])
    named = re.sub(r"(_RANK|_INDEX)=[01]", r"\1", (signs or started_by)[1])
    return f"`ClusterError`: {named}"


def table_of(page):
    """Return the rows of the page's table by their first cells, and its place in the text."""
    begin = page.index(TITLE)
    end = page.index("\n\n", begin)
    rows = [line.strip("| ").split(" | ") for line in page[begin:end].splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}, (begin, end)


def write_row(name, cells):
    page = PAGE.read_text()
    rows, (begin, end) = table_of(page)
    rows[name] = cells
    ordered = [[known, *rows[known]] for known in ENVIRONMENTS if known in rows]
    lines = [TITLE, "|---|---|---|", *(f"| {' | '.join(row)} |" for row in ordered)]
    PAGE.write_text(page[:begin] + "\n".join(lines) + page[end:])


def wait(processes):
    """Return the outputs and exit codes of processes; end all that they started."""
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return outputs, [process.returncode for process in processes]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_kubernetes if name in NEED_KUBERNETES else ())
        for name in ENVIRONMENTS
    ],
)
def test_two_processes_sum_to_two_or_name_what_is_missing(name, tmp_path, request):
    (tmp_path / "nodes").write_text(f"{socket.gethostname()}\nanother\n")
    started_by, start = ENVIRONMENTS[name]
    with ExitStack() as stack:
        cells = [started_by, outcome(*wait(list(start(stack, tmp_path, request))))]

    if os.environ.get("WRITE_TABLE"):
        write_row(name, cells)
    rows, _ = table_of(PAGE.read_text())
    assert rows[name] == cells


def test_the_page_has_a_row_for_each_environment_and_no_other():
    rows, _ = table_of(PAGE.read_text())

    assert list(rows) == list(ENVIRONMENTS)
