"""Detection of the cluster that a launcher or scheduler describes in environment variables.

Every launcher has a function that reads its variables. It returns None if the launcher did not
start this process, or started only this one, and raises `ClusterError` if the variables are
incomplete or contradict each other. `detect` tries the launchers in order, beginning with the ones
that run inside another launcher's job: for ``mpirun`` in a Slurm step, MPI describes the workers.
"""

import importlib
import importlib.util
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicax._src.base.lazy import LazyModule
from replicax._src.cluster.checks import ClusterError, parse_address, port_of_job, show, to_index
from replicax._src.cluster.signs import multi_process_signs
from replicax._src.cluster.slurm import expand_counts, expand_hosts, slurm_job
from replicax._src.cluster.spec import ClusterFacts

if TYPE_CHECKING:
    from replicax._src.compat import jax
else:
    jax = LazyModule("replicax._src.compat.jax")  # `replicax launch` does not need JAX

Env = Mapping[str, str]

# Google's firewall opens 8476 between the hosts of a slice (JAX issue 35905). Lists of processes
# often assign 8476 and the next ports to libtpu; there, use the port that JAX itself would use.
_TPU_PORTS = {"TPU_PROCESS_ADDRESSES": 8482, "TPU_WORKER_HOSTNAMES": 8476}
_LOOPBACK = "127.0.0.1"
_SAGE_MAKER_FILE = Path("/opt/ml/input/config/resourceconfig.json")
_ADDRESS = "JAX_COORDINATOR_ADDRESS"


def detect(*, ask: bool = True, is_launcher: bool = False) -> ClusterFacts | None:
    """Return the cluster that the environment describes, or None if this process is alone.

    Args:
        ask: Whether to query cloud servers too, which may take a while.
        is_launcher: Whether this process starts workers itself. Then a job with several nodes or
            tasks is no sign of other processes: its batch script runs once.

    Raises:
        ClusterError: If the variables of a launcher are incomplete or contradict each other, or
            show that this process is one of several without an address at which they could meet.

    Example:
        >>> import os
        >>> from replicax._src.cluster.launchers import detect
        >>> os.environ.update(
        ...     COORDINATOR_ADDRESS="mnist-worker-0", COORDINATOR_PORT="6666",
        ...     NUM_PROCESSES="2", PROCESS_ID="1",
        ... )
        >>> detect().addresses
        ('mnist-worker-0:6666', 'mnist-worker-1:6666')
        >>> for name in ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"):
        ...     del os.environ[name]
    """
    env = os.environ
    if own := _replicax(env):
        return own
    if _ADDRESS not in env:
        return _launched(env, ask=ask, is_launcher=is_launcher)
    if "JAX_NUM_PROCESSES" in env or "JAX_PROCESS_ID" in env:
        return _jax_variables(env, "JAX_", "JAX")
    # As in JAX, an address without a number of processes only replaces a launcher's coordinator.
    coordinator = _coordinator(env, "JAX_")
    launched = _launched(env, ask=ask, is_launcher=is_launcher)
    if launched is None:
        return _jax_variables(env, "JAX_", "JAX")
    addresses = (coordinator, *launched.addresses[1:])
    # The address identifies the run; the launcher's job id may differ between hosts.
    return replace(launched, coordinator=coordinator, addresses=addresses, job="")


def _launched(env: Env, *, ask: bool, is_launcher: bool) -> ClusterFacts | None:
    for read in (*_LAUNCHERS, *_SERVERS) if ask else _LAUNCHERS:
        if facts := read(env):
            return _at_configured_port(facts, env)
    signs = [*multi_process_signs(env, allocations=not is_launcher), *_library_signs(ask=ask)]
    if signs:
        raise ClusterError(
            f"This process seems to be one of several ({'; '.join(signs)}), but no variable says"
            f" where they meet, so each of them would train its own model. {WRITE_INSTEAD}"
        )
    return None


def _library_signs(*, ask: bool) -> Iterator[str]:
    """Yield what imported libraries know of other processes."""
    if (workers := _ray_workers()) > 1:
        yield f"Ray Train has {workers} workers"
    if ask and _is_ray_process():
        yield "Ray started it as an actor or a task"
    if _is_dask_task():
        yield "a Dask worker runs it as a task"
    if _is_engine_of_ipyparallel():
        yield "an engine of ipyparallel runs it"
    if _is_spark_task():
        yield "a Spark executor runs it as a task"
    if (processes := _torch_processes()) > 1:
        yield f"torch.distributed connects {processes} processes"


def _at_configured_port(facts: ClusterFacts, env: Env) -> ClusterFacts:
    """Return ``facts`` with the port in JAX_COORDINATOR_PORT, if it is set."""
    port = _configured_port(env)
    if port is None or facts.coordinator is None:
        return facts
    coordinator = f"{facts.coordinator.rpartition(':')[0]}:{port}"
    return replace(facts, coordinator=coordinator, addresses=(coordinator, *facts.addresses[1:]))


WRITE_INSTEAD = (
    "Set JAX_COORDINATOR_ADDRESS=host:port (of the first process), JAX_NUM_PROCESSES and"
    " JAX_PROCESS_ID for each process; or set TF_CONFIG; or pass a cluster_resolver. To train in"
    " this process alone, write MultiWorkerMirroredStrategy(alone=True), or set REPLICAX_ALONE=1."
)


def rank_cluster(  # noqa: PLR0913 - the parts of a cluster
    count: int, index: int, *, host: str, port: int, source: str, job: str
) -> ClusterFacts:
    """Return a cluster of equal processes, given the address of the first.

    Args:
        count: The number of processes.
        index: The rank of this one.
        host: The host of rank 0.
        port: The port at which rank 0 listens.
        source: The launcher, for messages.
        job: The id of the run; see `ClusterFacts`.
    """
    coordinator = f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"
    parse_address(coordinator, f"The first process of {source}")
    return ClusterFacts.of_processes(
        index,
        (coordinator, *[None] * (count - 1)),
        coordinator=coordinator,
        source=source,
        job=job,
    )


# Launchers that name the coordinator.


def _replicax(env: Env) -> ClusterFacts | None:
    """Read the variables of ``replicax launch``, for programs that removed its TF_CONFIG.

    It sets PyTorch's ranks too. The address of its hub distinguishes them from the ranks of a
    torchrun that may have started it.
    """
    if "REPLICAX_HUB" not in env or env.get("WORLD_SIZE", "1") == "1":
        return None
    count, index = _count_and_index(env, "WORLD_SIZE", "RANK")
    host, port = env["REPLICAX_HUB"].rsplit(":", 1)
    return rank_cluster(
        count,
        index,
        host=host,
        port=to_index(port, "The port of REPLICAX_HUB"),
        source="replicax launch",
        job="",
    )


def _kubeflow(env: Env) -> ClusterFacts | None:
    """Read the variables of a Kubeflow JAXJob."""
    return _jax_variables(env, "", "Kubeflow JAXJob") if "COORDINATOR_ADDRESS" in env else None


def _jax_variables(env: Env, prefix: str, source: str) -> ClusterFacts:
    """Read ``NUM_PROCESSES`` and ``PROCESS_ID`` with the given prefix, and guess the addresses."""
    count, index = _count_and_index(env, f"{prefix}NUM_PROCESSES", f"{prefix}PROCESS_ID")
    coordinator = _coordinator(env, prefix)
    host, port = coordinator.rsplit(":", 1)
    # A JAXJob names its pods, and their services, <job>-worker-<index>; Kubeflow Trainer's TrainJob
    # names them <job>-node-0-<index>.<job>.
    pattern = re.fullmatch(r"(.*-(?:worker|node-0)-)0((?:\..*)?)", host)
    addresses = tuple(
        coordinator if i == 0 else f"{pattern[1]}{i}{pattern[2]}:{port}" if pattern else None
        for i in range(count)
    )
    return ClusterFacts.of_processes(index, addresses, coordinator=coordinator, source=source)


def _coordinator(env: Env, prefix: str) -> str:
    """Return the coordinator's ``host:port``, from one or two variables."""
    name = f"{prefix}COORDINATOR_ADDRESS"
    address, port = env[name], env.get(f"{prefix}COORDINATOR_PORT")
    if re.search(r"[^:\]]:[0-9]+$|\]:[0-9]+$", address):
        given = address
        if port is not None and not address.endswith(f":{port}"):
            raise ClusterError(
                f"{name} is {show(address)}, but {prefix}COORDINATOR_PORT is {show(port)};"
                " write the port in one of them only."
            )
    elif port is None:
        raise ClusterError(
            f"{name} is {show(address)} without a port; set {prefix}COORDINATOR_PORT, such as 6666."
        )
    else:
        given = f"{address}:{port}"
    parse_address(given, name)
    return given


def _torchrun(env: Env) -> ClusterFacts | None:
    """Read the variables of PyTorch's ``env://``, which ``torchrun`` and PyTorchJob set."""
    if "WORLD_SIZE" not in env or env["WORLD_SIZE"] == "1":
        return None
    if "RANK" not in env and _variables_of_node(env):
        return None  # RunPod counts all GPUs in WORLD_SIZE
    count, index = _count_and_index(env, "WORLD_SIZE", "RANK")
    host = _required(env, "MASTER_ADDR", "the address of the process with RANK 0")
    port = to_index(_required(env, "MASTER_PORT", "a port of that process"), "MASTER_PORT")
    job = f"{env.get('TORCHELASTIC_RUN_ID', '')} {host} {port}"
    if "TORCHELASTIC_RUN_ID" in env:
        port = _choose_port(env, job)  # torchrun itself listens at MASTER_PORT
    job += env.get("TORCHELASTIC_RESTART_COUNT", "")
    return rank_cluster(
        count,
        index,
        host=host,
        port=port,
        source="torchrun",
        job=job,
    )


def _one_per_node(env: Env) -> ClusterFacts | None:
    """Read PyTorch's variables of a node, where the program is started without ``torchrun``.

    Kubeflow Trainer prefixes them with ``PET_``; RunPod, Lightning and MaxText do not.
    """
    names = _variables_of_node(env)
    if not names or env[names[0]].strip() == "1":
        return None
    count, index = _count_and_index(env, *names[:2])
    host, port = env[names[2]], to_index(env[names[3]], names[3])
    return rank_cluster(count, index, host=host, port=port, source=names[1], job="")


def _variables_of_node(env: Env) -> tuple[str, ...]:
    """Return the names of PyTorch's variables of a node: number, rank, address, port; else none."""
    if "PET_NODE_RANK" in env:
        prefix, count_name = "PET_", "PET_NNODES"
    else:
        prefix, count_name = "", "NNODES" if "NNODES" in env else "NUM_NODES"
    names = (count_name, f"{prefix}NODE_RANK", f"{prefix}MASTER_ADDR", f"{prefix}MASTER_PORT")
    return names if all(name in env for name in names) else ()


# Launchers of MPI programs.


def _open_mpi(env: Env) -> ClusterFacts | None:
    return _mpi(
        env,
        "Open MPI",
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    )


def _mvapich(env: Env) -> ClusterFacts | None:
    prefix = "MVP" if "MVP_COMM_WORLD_SIZE" in env else "MV2"  # since version 4: MVP
    size, rank, local = (f"{prefix}_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE"))
    return _mpi(env, "MVAPICH", (size, rank, local), ("MPIRUN_ID",))


def _hydra(env: Env) -> ClusterFacts | None:
    """Read the variables of MPICH and Intel MPI; Slurm sets PMI_SIZE, but not MPI_LOCALNRANKS."""
    if "MPI_LOCALNRANKS" not in env:
        return None
    return _mpi(env, "MPICH", ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"), ())


def _mpi(
    env: Env, source: str, names: tuple[str, str, str], jobs: Sequence[str]
) -> ClusterFacts | None:
    """Read the variables ``names`` (size, rank, local size) of an MPI launcher."""
    size, rank, local_size = names
    if size not in env:
        return None
    count, index = _count_and_index(env, size, rank)
    if count == 1:
        return None
    job = next((env[name] for name in jobs if name in env), "") or _local_launcher()
    if _ADDRESS in env:
        host = _LOOPBACK  # unused: `detect` replaces it by the address in JAX_COORDINATOR_ADDRESS
    elif env.get(local_size) == str(count):
        host = _LOOPBACK
    else:
        host = _launcher_host(env)
    if not host and _has_mpi4py():
        return None  # `_mpi4py` finds the host of rank 0 through MPI
    if not host:
        raise ClusterError(
            f"{source} started this process ({rank}={env[rank]}) on several machines, and does not"
            " say where its first process is. Install mpi4py, through which the processes agree on"
            " an address; or export JAX_COORDINATOR_ADDRESS=host:port, with the host of rank 0 and"
            " a free port of it, to all of them."
        )
    port = _choose_port(env, job)
    return rank_cluster(count, index, host=host, port=port, source=source, job=job)


def _local_launcher() -> str:
    """Return an id of the MPI process that started the ranks of this machine.

    MPICH puts no job id into the environment, but its ranks on a machine have a common ancestor.
    """
    pid = os.getppid()
    for _ in range(64):
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        except OSError:
            break
        if re.search(r"\((hydra|pmi_proxy|mpi)", name):
            return f"process {pid}"
        pid = int(rest.split()[1])
    return f"process {os.getppid()}"


def _launcher_host(env: Env) -> str:
    """Return the host of ``mpirun``, which rank 0 shares by default; empty if it is not known."""
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.search(r"tcp6?://(\[)?([^,:\]]+(?(1)[^,\]]*))", uri)
    return match[2] if match else ""


def _has_mpi4py() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def _mpi4py(env: Env) -> ClusterFacts | None:
    """Return the cluster of an MPI launcher that names no address, if mpi4py is installed.

    Other processes do not import mpi4py, as that initializes MPI.
    """
    if not any(name in env for name in _MPI_VARIABLES) or not _has_mpi4py():
        return None
    return _mpi4py_cluster(_configured_port(env))


@cache  # later strategies of a process are in the same cluster
def _mpi4py_cluster(port: int | None) -> ClusterFacts | None:
    """Agree on the address of rank 0 with the other processes, through MPI."""
    try:
        world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError) as error:
        raise ClusterError(
            f"An MPI launcher started this process, but mpi4py cannot be used: {error}."
            f" {WRITE_INSTEAD}"
        ) from error
    count = world.Get_size()
    if count == 1:
        return None  # an mpi4py for another MPI than the launcher's sees this process only
    host, free, job = world.bcast(_meeting_place(port))
    return rank_cluster(count, world.Get_rank(), host=host, port=free, source="mpi4py", job=job)


def _meeting_place(port: int | None = None) -> tuple[str, int, str]:
    """Return this machine's address, a free port (or the given one), and a random id of the run."""
    host = _own_address()
    with socket.socket() as free:
        free.bind((host, 0))
        return host, port or free.getsockname()[1], secrets.token_hex(16)


# Schedulers and clouds.


def _slurm(env: Env) -> ClusterFacts | None:
    """Read the variables of a Slurm job step."""
    if not _is_step_of_several(env):
        return None
    count, index = _count_and_index(env, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if count == 1:
        return None
    hosts = expand_hosts(env["SLURM_STEP_NODELIST"])
    tasks = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE", f"1(x{count})"))
    if len(hosts) != len(tasks) or sum(tasks) != count:
        raise ClusterError(
            f"Slurm's step has {count} tasks, but {len(hosts)} hosts with {tasks} tasks:"
            " SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE"
            " contradict each other."
        )
    job = slurm_job(env)
    port = _choose_port(env, job)
    # Ranks follow Slurm's order of hosts, which is why rank 0 is on the first.
    addresses: list[str | None] = [
        f"{host}:{port + local}"
        for host, number in zip(hosts, tasks, strict=True)
        for local in range(number)
    ]
    distribution = env.get("SLURM_DISTRIBUTION", "block")
    if not distribution.startswith("block"):
        # Only "block" places consecutive ranks on one host; rank 0 is on the first host.
        addresses[1:] = [None] * (count - 1)
    if distribution.startswith("arbitrary"):  # but here, where Slurm sorts its list of hosts
        addresses[0] = f"{_first_of_host_file(env)}:{port}"
    return ClusterFacts.of_processes(
        index, tuple(addresses), coordinator=str(addresses[0]), source="Slurm", job=job
    )


def _is_step_of_several(env: Env) -> bool:
    """Whether this is a task of a step with others; raise if their hosts are unknown."""
    if "SLURM_STEP_NUM_TASKS" not in env:
        return False  # a login shell or a batch script
    if env.get("SLURM_HET_SIZE", "1") != "1":
        raise ClusterError(
            f"The Slurm job is heterogeneous (SLURM_HET_SIZE={env['SLURM_HET_SIZE']}), and its"
            f" variables do not say on which host task 0 runs. {WRITE_INSTEAD}"
        )
    if env["SLURM_STEP_NUM_TASKS"] == "1" and env.get("SLURM_PROCID", "0") == "0":
        return False
    if env["SLURM_STEP_NUM_TASKS"] != "1":
        _required(env, "SLURM_STEP_NODELIST", "the nodes of the step; containers may hide it")
    return True


def _first_of_host_file(env: Env) -> str:
    """Return the host of rank 0, with ``srun --distribution=arbitrary``."""
    try:
        [first, *_] = Path(env.get("SLURM_HOSTFILE", "")).read_text().split()
    except (OSError, ValueError) as error:
        raise ClusterError(
            "Slurm's distribution is 'arbitrary', and its list of hosts, the file SLURM_HOSTFILE,"
            f" cannot be read here ({error}): it is not known where task 0 runs. {WRITE_INSTEAD}"
        ) from None
    return expand_hosts(first)[0]


def _sky_pilot(env: Env) -> ClusterFacts | None:
    """Read the variables of a SkyPilot task."""
    if env.get("SKYPILOT_NUM_NODES", "1") == "1":
        return None
    count, index = _count_and_index(env, "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")
    hosts = _required(env, "SKYPILOT_NODE_IPS", "the addresses of all nodes, a line each").split()
    return _one_per_host(env, hosts, count, index, "SkyPilot", env.get("SKYPILOT_TASK_ID", ""))


def _sage_maker(env: Env) -> ClusterFacts | None:
    """Read the variables of a SageMaker training job, or its configuration file.

    SageMaker's own images set the variables; other images have only the file.
    """
    if "SM_HOSTS" in env or "SM_CURRENT_HOST" in env:
        _required(env, "SM_HOSTS", "the JSON list of all hosts")
        hosts, mine = _json(env, "SM_HOSTS"), env.get("SM_CURRENT_HOST")
        names = ("SM_HOSTS", "SM_CURRENT_HOST")
    elif _SAGE_MAKER_FILE.exists() or "SM_RESOURCE_CONFIG" in env:
        place = str(_SAGE_MAKER_FILE) if _SAGE_MAKER_FILE.exists() else "SM_RESOURCE_CONFIG"
        found = _json(env if place in env else {place: _SAGE_MAKER_FILE.read_text()}, place)
        hosts, mine = (found.get(key) for key in ("hosts", "current_host"))
        names = (f"'hosts' in {place}", f"'current_host' in {place}")
    else:
        return None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ClusterError(f"{names[0]} is {show(hosts)}; it must be a JSON list of host names.")
    if len(hosts) == 1:
        return None
    if not mine:
        raise ClusterError(f"{names[1]} is not set, though there are several hosts; set it.")
    if mine not in hosts:
        raise ClusterError(f"{names[1]} is {show(mine)}, which is not in {show(hosts)}.")
    job = env.get("TRAINING_JOB_NAME", "")
    return _one_per_host(env, hosts, len(hosts), hosts.index(mine), "SageMaker", job)


def _dstack(env: Env) -> ClusterFacts | None:
    """Read the variables of a dstack task."""
    if env.get("DSTACK_NODES_NUM", "1") == "1":
        return None
    count, index = _count_and_index(env, "DSTACK_NODES_NUM", "DSTACK_NODE_RANK")
    host = _required(env, "DSTACK_MASTER_NODE_IP", "the address of the first node")
    job = env.get("DSTACK_RUN_ID", "")
    port = _choose_port(env, job)
    return rank_cluster(count, index, host=host, port=port, source="dstack", job=job)


def _leader_worker_set(env: Env) -> ClusterFacts | None:
    """Read the variables of a group of Kubernetes' LeaderWorkerSet."""
    if env.get("LWS_GROUP_SIZE", "1") == "1":
        return None
    count, index = _count_and_index(env, "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    host = _required(env, "LWS_LEADER_ADDRESS", "the name of the leader's pod")
    port = _choose_port(env, host)
    return rank_cluster(count, index, host=host, port=port, source="LeaderWorkerSet", job="")


def _vertex(env: Env) -> ClusterFacts | None:
    """Read Vertex AI's CLUSTER_SPEC: the first pool has the chief, the second the workers."""
    if "CLUSTER_SPEC" not in env:
        return None
    spec = _json(env, "CLUSTER_SPEC")
    try:
        pools, task = spec["cluster"], spec["task"]
        training = ("workerpool0", "workerpool1")  # other pools hold servers and evaluators
        places = [(pool, i) for pool in training for i in range(len(pools.get(pool, ())))]
        addresses = tuple(pools[pool][i] for pool, i in places)
        mine = (task["type"], int(task["index"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ClusterError(
            f"CLUSTER_SPEC is {show(spec)}; it must have 'cluster', with a list of addresses for"
            " each pool, and 'task' with 'type' and 'index'."
        ) from None
    if mine not in places:
        raise ClusterError(
            f"CLUSTER_SPEC makes this process task {mine[1]} of {show(mine[0])}, and the processes"
            f" that train are {show([f'{pool} {i}' for pool, i in places])}. Do not start a"
            " multi-worker strategy in it."
        )
    if len(addresses) == 1:
        return None
    for address in addresses:
        parse_address(address, "CLUSTER_SPEC")
    return ClusterFacts.of_processes(
        places.index(mine), addresses, coordinator=addresses[0], source="Vertex AI"
    )


def _aws_batch(env: Env) -> ClusterFacts | None:
    """Read the variables of a multi-node AWS Batch job."""
    if env.get("AWS_BATCH_JOB_NUM_NODES", "1") == "1":
        return None
    count, index = _count_and_index(env, "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX")
    main = env.get("AWS_BATCH_JOB_MAIN_NODE_INDEX", "0")
    if main != "0":
        raise ClusterError(
            f"AWS_BATCH_JOB_MAIN_NODE_INDEX is {main}, and worker 0 must be the main node: make"
            f" node 0 the main node of the job. {WRITE_INSTEAD}"
        )
    name = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    # Batch does not set it on the main node itself.
    host = env.get(name) or (_own_address() if index == 0 else "")
    if not host:
        _required(env, name, "the address of the main node")
    job = env.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
    port = _choose_port(env, job)
    return rank_cluster(count, index, host=host, port=port, source="AWS Batch", job=job)


def _own_address() -> str:
    """Return the address of this machine on its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: for UDP, this only selects a route
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _tpu_slice(env: Env) -> ClusterFacts | None:
    """Read the variables of a Cloud TPU host."""
    name = next((n for n in _TPU_PORTS if n in env), "")
    # A port in the list is libtpu's.
    hosts = [re.sub(r":[0-9]+$", "", host.strip()) for host in env.get(name, "").split(",")]
    slices = to_index(env.get("MEGASCALE_NUM_SLICES") or "1", "MEGASCALE_NUM_SLICES")
    if len(hosts) * slices < 2 or not name:
        return None
    index = to_index(_required(env, "TPU_WORKER_ID", "this host's index"), "TPU_WORKER_ID")
    if index >= len(hosts):
        raise ClusterError(
            f"TPU_WORKER_ID is {index}, but {name} lists {len(hosts)} hosts: {show(hosts)}."
        )
    port = _configured_port(env) or _TPU_PORTS[name]
    if slices > 1:
        return _tpu_slices(env, slices, len(hosts), index, port)
    # The processes of one host get consecutive ports.
    addresses = tuple(f"{host}:{port + hosts[:i].count(host)}" for i, host in enumerate(hosts))
    for i, address in enumerate(addresses):
        parse_address(address, f"{name}[{i}]")
    return ClusterFacts.of_processes(index, addresses, coordinator=addresses[0], source="Cloud TPU")


def _tpu_slices(env: Env, slices: int, hosts: int, index: int, port: int) -> ClusterFacts:
    """Read the variables of several slices; as in JAX, the hosts of the first slice come first."""
    name = "MEGASCALE_COORDINATOR_ADDRESS"
    host = re.sub(r":[0-9]+$", "", _required(env, name, "the first host of the first slice"))
    number = _required(env, "MEGASCALE_SLICE_ID", "the number of this host's slice")
    slice_id = to_index(number, "MEGASCALE_SLICE_ID")
    if slice_id >= slices:
        raise ClusterError(
            f"MEGASCALE_SLICE_ID is {slice_id}, but MEGASCALE_NUM_SLICES is {slices}."
        )
    rank = slice_id * hosts + index
    return rank_cluster(slices * hosts, rank, host=host, port=port, source="Cloud TPU", job="")


def _ray_train(_: Env) -> ClusterFacts | None:
    """Return the cluster of a Ray Train run, whose workers agree on an address through Ray."""
    count = _ray_workers()
    return _ray_cluster(count) if count > 1 else None


@cache  # later strategies of a process are in the same cluster
def _ray_cluster(count: int) -> ClusterFacts:
    """Agree on the address of rank 0 with the other workers of the Ray Train run."""
    collective: Any = importlib.import_module("ray.train.collective")
    context = sys.modules["ray.train"].get_context()
    index = context.get_world_rank()
    host, port, job = collective.broadcast_from_rank_zero(_meeting_place())
    return rank_cluster(count, index, host=host, port=port, source="Ray Train", job=job)


def _jax_cluster(_: Env) -> ClusterFacts | None:
    """Ask JAX's detection, which queries GCE for TPU pods, and Kubernetes for Jobs and JobSets."""
    try:
        found = jax.detected_cluster()
    except Exception as error:
        raise ClusterError(
            f"JAX found a cluster, but not its processes: {error} {WRITE_INSTEAD}"
        ) from error
    if found is None or found.count == 1:
        return None
    host, port = found.coordinator.rsplit(":", 1)
    return rank_cluster(
        found.count, found.index, host=host, port=int(port), source=found.source, job=""
    )


_LAUNCHERS: tuple[Callable[[Env], ClusterFacts | None], ...] = (
    _kubeflow,
    _torchrun,
    _open_mpi,
    _mvapich,
    _hydra,
    _slurm,
    _one_per_node,
    _sky_pilot,
    _dstack,
    _sage_maker,
    _vertex,
    _aws_batch,
    _tpu_slice,
    _leader_worker_set,
)

_SERVERS = (_ray_train, _mpi4py, _jax_cluster)


# Set by MPI launchers that may not name an address.
_MPI_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MVP_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_RANK",
    "JSM_NAMESPACE_SIZE",
    "PALS_SIZE",
)


def _ray_workers() -> int:
    """Return the number of workers in this process's Ray Train run; 0 outside of one."""
    train = sys.modules.get("ray.train")
    if train is None:
        return 0
    try:
        return int(train.get_context().get_world_size())
    except Exception:
        return 0  # Ray is imported, but this process is not one of its training workers


def _is_ray_process() -> bool:
    """Whether Ray started this process for an actor or a task, outside of a Ray Train run."""
    ray = sys.modules.get("ray")
    if ray is None or _ray_workers() or not ray.is_initialized():
        return False
    # Its method get_task_id() would log a warning in a driver.
    return bool(ray.get_runtime_context().worker.mode == ray.WORKER_MODE)


def _is_dask_task() -> bool:
    """Whether this thread runs a task of a Dask worker."""
    distributed = sys.modules.get("distributed")
    try:
        return distributed is not None and distributed.get_worker() is not None
    except ValueError:
        return False


def _is_engine_of_ipyparallel() -> bool:
    """Whether this process is an engine of an ipyparallel cluster."""
    app: Any = sys.modules.get("ipyparallel.engine.app")
    return app is not None and bool(app.IPEngine.initialized())


def _is_spark_task() -> bool:
    """Whether a Spark executor runs this process for a task."""
    context = getattr(sys.modules.get("pyspark"), "TaskContext", None)
    return context is not None and context.get() is not None


def _torch_processes() -> int:
    """Return the number of processes that `torch.distributed` connects, 0 if it does not."""
    torch: Any = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available() or not torch.is_initialized():
        return 0
    return int(torch.get_world_size())


# Helpers.


def _one_per_host(  # noqa: PLR0913 - the parts of a cluster
    env: Env, hosts: Sequence[str], count: int, index: int, source: str, job: str
) -> ClusterFacts:
    """Return a cluster with one process on each host."""
    if len(hosts) != count:
        raise ClusterError(f"{source} starts {count} processes, but lists {show(hosts)}.")
    port = _choose_port(env, job)
    addresses = tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)
    for address in addresses:
        parse_address(address, source)
    return ClusterFacts.of_processes(
        index, addresses, coordinator=addresses[0], source=source, job=job
    )


def _count_and_index(env: Env, count_name: str, index_name: str) -> tuple[int, int]:
    """Return the number of processes and this one's index; validate both."""
    missing = [name for name in (count_name, index_name) if name not in env]
    if missing:
        raise ClusterError(
            f"{' and '.join(missing)} not set, though the other variables of this launcher"
            f" are; set {count_name} to the number of processes and {index_name} to this one's."
        )
    count, index = to_index(env[count_name], count_name), to_index(env[index_name], index_name)
    if not 0 <= index < count:
        raise ClusterError(
            f"{index_name} is {index} and {count_name} is {count};"
            f" with {count} processes the indices go from 0 to {count - 1}."
        )
    return count, index


def _required(env: Env, name: str, meaning: str) -> str:
    """Return a variable's value; raise ClusterError, naming its ``meaning``, if it is not set."""
    if value := env.get(name, "").strip():
        return value
    raise ClusterError(
        f"{name} is not set, though the other variables of this launcher are; set it to {meaning}."
    )


def _json(env: Env, name: str) -> Any:
    try:
        return json.loads(env[name])
    except ValueError as error:
        raise ClusterError(f"{name} is not JSON: {show(env[name])} ({error}).") from None


def _choose_port(env: Env, job: str) -> int:
    """Return the configured port, or one derived from the job's id."""
    return _configured_port(env) or port_of_job(job)


def _configured_port(env: Env) -> int | None:
    name = "JAX_COORDINATOR_PORT"
    if name not in env:
        return None
    port = to_index(env[name], name)
    parse_address(f"localhost:{port}", name)  # validates the range
    return port
