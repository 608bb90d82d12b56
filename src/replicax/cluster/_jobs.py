"""Clusters that a scheduler describes in the environment, beside TF_CONFIG.

Kubeflow's JAXJob, Slurm, Open MPI and Cloud TPU slices. Each ``detect`` function answers None
where its scheduler is absent, and raises where it is present but contradicts itself.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace

from replicax.cluster._errors import ClusterError
from replicax.cluster._facts import ClusterFacts
from replicax.cluster._slurm import expand_counts, expand_hosts
from replicax.cluster._values import parse_address, show, to_index

# Google's firewall opens 8476 between the hosts of a slice (JAX issue 35905). Lists of processes
# often give 8476 and its followers to libtpu; there, JAX's own choice is free.
_TPU_PORTS = {"TPU_PROCESS_ADDRESSES": 8482, "TPU_WORKER_HOSTNAMES": 8476}
_FIRST_PORT, _NUM_PORTS = 61_000, 4_000  # above what Linux gives to outgoing connections


def detect_job() -> ClusterFacts | None:
    """Look for each scheduler in turn.

    Returns:
        What the first one present says, or None where there is none.

    Raises:
        ClusterError: A scheduler's variables are incomplete or contradict each other.

    Example:
        >>> import os
        >>> from replicax.cluster._jobs import detect_job
        >>> os.environ.update(
        ...     COORDINATOR_ADDRESS="mnist-worker-0", COORDINATOR_PORT="6666",
        ...     NUM_PROCESSES="2", PROCESS_ID="1",
        ... )
        >>> detect_job().addresses
        ('mnist-worker-0:6666', 'mnist-worker-1:6666')
        >>> for name in ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID"):
        ...     del os.environ[name]
    """
    env = os.environ
    if "JAX_COORDINATOR_ADDRESS" not in env:
        return _detect_scheduler(env)
    counted = "JAX_NUM_PROCESSES" in env or "JAX_PROCESS_ID" in env
    scheduled = None if counted else _detect_scheduler(env)
    if scheduled is None:
        return _detect_jax_variables(env, "JAX_", "JAX")
    # As in JAX, the address alone moves the place where a scheduler's processes meet.
    coordinator = _coordinator(env, "JAX_")
    addresses = (coordinator, *scheduled.addresses[1:])
    return replace(scheduled, coordinator=coordinator, addresses=addresses)


def _detect_scheduler(env: Mapping[str, str]) -> ClusterFacts | None:
    return (
        _detect_jax_variables(env, "", "Kubeflow JAXJob")
        or _detect_slurm(env)
        or _detect_open_mpi(env)
        or _detect_tpu_slice(env)
    )


def _detect_jax_variables(env: Mapping[str, str], prefix: str, source: str) -> ClusterFacts | None:
    if f"{prefix}COORDINATOR_ADDRESS" not in env:
        return None
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


def _coordinator(env: Mapping[str, str], prefix: str) -> str:
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


def _count_and_index(env: Mapping[str, str], count_name: str, index_name: str) -> tuple[int, int]:
    missing = [name for name in (count_name, index_name) if name not in env]
    if missing:
        raise ClusterError(
            f"{' and '.join(missing)} not set, though the other variables of this scheduler"
            f" are; set {count_name} to the number of processes and {index_name} to this one's."
        )
    count, index = to_index(env[count_name], count_name), to_index(env[index_name], index_name)
    if not 0 <= index < count:
        raise ClusterError(
            f"{index_name} is {index} and {count_name} is {count};"
            f" with {count} processes the indices go from 0 to {count - 1}."
        )
    return count, index


def _detect_slurm(env: Mapping[str, str]) -> ClusterFacts | None:
    needed = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    if any(name not in env for name in needed):
        return None  # a login shell or a batch script, not a step
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
    # Ranks follow Slurm's own order of hosts, so that rank 0 really is on the first.
    port = _port_of(env, env.get("SLURM_JOB_ID", "") + "." + env.get("SLURM_STEP_ID", ""))
    addresses = tuple(
        f"{host}:{port + local}"
        for host, number in zip(hosts, tasks, strict=True)
        for local in range(number)
    )
    return ClusterFacts.of_processes(index, addresses, coordinator=addresses[0], source="Slurm")


def _detect_open_mpi(env: Mapping[str, str]) -> ClusterFacts | None:
    if "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    count, index = _count_and_index(env, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if count == 1:
        return None
    launcher = env.get("OMPI_MCA_orte_hnp_uri", "")
    if env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(count):
        host = "127.0.0.1"
    else:
        host = _launcher_host(launcher)
    port = _port_of(env, launcher or env.get("PMIX_NAMESPACE", ""))
    coordinator = f"{host}:{port}"
    addresses = (coordinator, *[None] * (count - 1))
    return ClusterFacts.of_processes(index, addresses, coordinator=coordinator, source="Open MPI")


def _launcher_host(uri: str) -> str:
    match = re.search(r"tcp6?://(\[)?([^,:\]]+(?(1)[^,\]]*))", uri)
    if match is None:
        raise ClusterError(
            "Open MPI started this process on several machines, but does not say where the first"
            " one is (no OMPI_MCA_orte_hnp_uri). Export JAX_COORDINATOR_ADDRESS=host:port,"
            " JAX_NUM_PROCESSES and JAX_PROCESS_ID, or TF_CONFIG, instead."
        )
    return f"[{match[2]}]" if match[1] else match[2]


def _detect_tpu_slice(env: Mapping[str, str]) -> ClusterFacts | None:
    name = next((n for n in _TPU_PORTS if n in env), "")
    # A port in it is libtpu's own.
    hosts = [re.sub(r":[0-9]+$", "", host.strip()) for host in env.get(name, "").split(",")]
    if len(hosts) < 2:
        return None
    if env.get("MEGASCALE_NUM_SLICES", "1") != "1":
        raise ClusterError(
            f"This host belongs to one of {env['MEGASCALE_NUM_SLICES']} TPU slices, which cannot be"
            " read from the environment yet; pass a cluster_resolver that lists every host."
        )
    if "TPU_WORKER_ID" not in env:
        raise ClusterError(f"{name} is set but TPU_WORKER_ID is not; set it to this host's index.")
    index = to_index(env["TPU_WORKER_ID"], "TPU_WORKER_ID")
    if index >= len(hosts):
        raise ClusterError(
            f"TPU_WORKER_ID is {index}, but {name} lists {len(hosts)} hosts: {show(hosts)}."
        )
    port = _given_port(env) or _TPU_PORTS[name]
    # The processes of one host get consecutive ports.
    addresses = tuple(f"{host}:{port + hosts[:i].count(host)}" for i, host in enumerate(hosts))
    for i, address in enumerate(addresses):
        parse_address(address, f"{name}[{i}]")
    return ClusterFacts.of_processes(index, addresses, coordinator=addresses[0], source="Cloud TPU")


def _port_of(env: Mapping[str, str], job: str) -> int:
    # The same on every process of a job, and most likely different for two jobs on one machine.
    chosen = _FIRST_PORT + zlib.crc32(job.encode(errors="replace")) % _NUM_PORTS
    return _given_port(env) or chosen


def _given_port(env: Mapping[str, str]) -> int | None:
    name = "JAX_COORDINATOR_PORT"
    if name not in env:
        return None
    port = to_index(env[name], name)
    parse_address(f"localhost:{port}", name)  # for the limits of a port
    return port
