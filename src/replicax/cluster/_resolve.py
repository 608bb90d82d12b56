"""resolve_cluster: a resolver, or what a scheduler left in the environment -> ClusterFacts.

Clusters that a scheduler describes in the environment, beside TF_CONFIG.

Kubeflow's JAXJob, Slurm, Open MPI and Cloud TPU slices. Each ``detect`` function answers None
where its scheduler is absent, and raises where it is present but contradicts itself.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace

from replicax.cluster._checks import (
    ClusterError,
    ClusterTypeError,
    parse_address,
    show,
    to_index,
    to_name,
)
from replicax.cluster._resolver import ClusterResolver
from replicax.cluster._slurm import expand_counts, expand_hosts
from replicax.cluster._spec import ClusterFacts, ClusterSpec
from replicax.cluster._tf_config import TFConfigClusterResolver, has_tf_config_cluster

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
        >>> from replicax.cluster._resolve import detect_job
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


_TRAINING = ("chief", "worker")
_JOBS = ("chief", "worker", "ps", "evaluator")


def resolve_cluster(resolver: ClusterResolver | None = None) -> ClusterFacts:
    """Find out which workers train together, and which of them this process is.

    Args:
        resolver: Where to look; it wins over the environment. Without one: ``TF_CONFIG``, then
            JAX's and Kubeflow JAXJob's variables, Slurm, Open MPI and Cloud TPU, in this order.

    Returns:
        The facts; one worker where there is no cluster.

    Raises:
        ClusterError: The cluster or the task makes no sense, or this task cannot train.
        ClusterTypeError: A part of the description is of the wrong kind.

    Example:
        >>> from replicax.cluster._resolve import resolve_cluster
        >>> from replicax.cluster._resolver import SimpleClusterResolver
        >>> from replicax.cluster._spec import ClusterSpec
        >>> spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]})
        >>> facts = resolve_cluster(SimpleClusterResolver(spec, task_type="worker", task_id=0))
        >>> facts.index, facts.num_workers, facts.coordinator, facts.is_chief
        (1, 3, 'a:1', False)
    """
    if resolver is not None:
        if not isinstance(resolver, ClusterResolver):
            raise ClusterTypeError(
                f"cluster_resolver is {show(resolver)}, a {type(resolver).__name__};"
                " it must be a ClusterResolver, such as"
                " rx.distribute.cluster_resolver.TFConfigClusterResolver()."
            )
        return _read(resolver, type(resolver).__name__)
    if has_tf_config_cluster():
        return _read(TFConfigClusterResolver(), "TF_CONFIG")
    return detect_job() or ClusterFacts.alone("no cluster")


def _read(resolver: ClusterResolver, source: str) -> ClusterFacts:
    spec = _spec_of(resolver, source)
    if not spec:
        return ClusterFacts.alone(source)
    # After cluster_spec(): Slurm's resolver knows its task only then.
    task_type, task_id = _own_task(resolver, source)
    _check_jobs(spec, source)
    _check_task(spec, task_type, task_id, source)
    if task_type == "evaluator":
        return _evaluator(spec, task_id, source)
    addresses = _training_addresses(spec, source)
    num_chiefs = spec.num_tasks("chief") if "chief" in spec.jobs else 0
    index = task_id if task_type == "chief" else num_chiefs + task_id
    return ClusterFacts(
        num_workers=len(addresses),
        index=index,
        addresses=addresses,
        task_type=task_type,
        task_id=task_id,
        is_chief=index == 0,
        coordinator=addresses[0],
        source=source,
    )


def _spec_of(resolver: ClusterResolver, source: str) -> ClusterSpec:
    spec: object = resolver.cluster_spec()
    if isinstance(spec, Mapping):
        return ClusterSpec(spec)
    if not isinstance(spec, ClusterSpec):
        raise ClusterTypeError(
            f"cluster_spec() of {source} returned {show(spec)}, a {type(spec).__name__};"
            " it must return a ClusterSpec."
        )
    return spec


def _own_task(resolver: ClusterResolver, source: str) -> tuple[str, int]:
    task_type, task_id = resolver.task_type, resolver.task_id
    missing = [n for n, v in (("task_type", task_type), ("task_id", task_id)) if v is None]
    if missing:
        raise ClusterError(
            f"{source} describes a cluster, but not which of its tasks this process is:"
            f" {' and '.join(missing)} is missing. In TF_CONFIG write"
            ' "task": {"type": "worker", "index": 0}; with a resolver, pass or set'
            " task_type and task_id."
        )
    return to_name(task_type, f"task_type of {source}"), to_index(task_id, f"task_id of {source}")


def _check_jobs(spec: ClusterSpec, source: str) -> None:
    for job in spec.jobs:
        if job not in _JOBS:
            raise ClusterError(
                f"The cluster of {source} has a job {show(job)}; the jobs of a training cluster"
                f" are {', '.join(_JOBS)}."
            )
    for job in ("chief", "evaluator"):
        if job in spec.jobs and spec.num_tasks(job) > 1:
            raise ClusterError(
                f"The cluster of {source} has {spec.num_tasks(job)} tasks in job {job!r}, and there"
                f" can be only one; list the others as workers."
            )


def _check_task(spec: ClusterSpec, task_type: str, task_id: int, source: str) -> None:
    if task_type == "ps":
        raise ClusterError(
            f"{source} makes this process a parameter server (task type 'ps'), and a mirrored"
            " strategy has none: every worker keeps the variables. Do not start this process; the"
            " cluster may go on listing it."
        )
    if task_type not in _JOBS:
        raise ClusterError(
            f"task_type of {source} is {show(task_type)}; the task types that train are chief,"
            " worker and evaluator."
        )
    if task_type not in spec.jobs:
        if task_type == "evaluator":
            return
        raise ClusterError(
            f"{source} makes this process a {task_type!r}, but the cluster has no such job;"
            f" its jobs are {show(sorted(spec.jobs))}."
        )
    if task_id not in spec.task_indices(task_type):
        raise ClusterError(
            f"{source} makes this process task {task_id} of job {task_type!r}, which has"
            f" {spec.num_tasks(task_type)} tasks, with the indices"
            f" {show(spec.task_indices(task_type))}."
        )


def _evaluator(spec: ClusterSpec, task_id: int, source: str) -> ClusterFacts:
    # It follows the training by its checkpoints, and waits for nobody.
    listed = "evaluator" in spec.jobs
    return ClusterFacts(
        num_workers=1,
        index=0,
        addresses=(spec.task_address("evaluator", task_id),) if listed else (),
        task_type="evaluator",
        task_id=task_id,
        is_chief=True,
        coordinator=None,
        source=source,
    )


def _training_addresses(spec: ClusterSpec, source: str) -> tuple[str, ...]:
    owners: dict[tuple[str, int], str] = {}
    addresses: list[str] = []
    for job in _TRAINING:
        indices = spec.task_indices(job) if job in spec.jobs else []
        gap = next((at for at, index in enumerate(indices) if at != index), None)
        if gap is not None:
            raise ClusterError(
                f"The cluster of {source} has no address for task {gap} of job {job!r};"
                f" every worker must be listed, without a gap, and the indices are {show(indices)}."
            )
        for index in indices:
            address, task = spec.task_address(job, index), f"{job} {index}"
            place = parse_address(address, f"In the cluster of {source}, {task}")
            if place in owners:
                raise ClusterError(
                    f"The cluster of {source} gives {owners[place]} and {task} the same address"
                    f" {address!r}; each needs a port of its own."
                )
            owners[place] = task
            addresses.append(address)
    return tuple(addresses)
