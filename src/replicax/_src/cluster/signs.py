"""Signs in the environment that a process is one of several, for processes that cannot meet.

A launcher that `launchers` does not know, or whose variables are incomplete, must not leave each
process training alone. Two kinds of variables reveal it: a count of processes (or hosts) above 1,
and a rank whose count is missing.
"""

import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

Env = Mapping[str, str]

# The number of processes, or of nodes, and which of them this is: names that only launchers set.
_COUNTS_AND_RANKS = {
    "JAX_NUM_PROCESSES": "JAX_PROCESS_ID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "MVP_COMM_WORLD_SIZE": "MVP_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MPIRUN_NPROCS": "MPIRUN_RANK",
    "MPI_NRANKS": "MPI_RANKID",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
    "PALS_SIZE": "PALS_RANKID",
    "ALPS_APP_PE_COUNT": "ALPS_APP_PE",
    "PJM_MPI_PROC": "PJM_MPI_RANK",
    "HOROVOD_SIZE": "HOROVOD_RANK",
    "WORLD_SIZE": "RANK",
    "PET_NNODES": "PET_NODE_RANK",
    "GROUP_WORLD_SIZE": "GROUP_RANK",
    "SLURM_HET_SIZE": "",
    "SKYPILOT_NUM_NODES": "SKYPILOT_NODE_RANK",
    "AWS_BATCH_JOB_NUM_NODES": "AWS_BATCH_JOB_NODE_INDEX",
    "SM_HOST_COUNT": "",
    "MEGASCALE_NUM_SLICES": "MEGASCALE_SLICE_ID",
    "LWS_GROUP_SIZE": "LWS_WORKER_INDEX",
    "DSTACK_NODES_NUM": "DSTACK_NODE_RANK",
    "LEPTON_JOB_TOTAL_WORKERS": "LEPTON_JOB_WORKER_INDEX",
    "PADDLE_TRAINERS_NUM": "PADDLE_TRAINER_ID",
    "DMLC_NUM_WORKER": "DMLC_WORKER_ID",
    "ACCELERATE_NUM_PROCESSES": "ACCELERATE_MACHINE_RANK",
    "ARNOLD_WORKER_NUM": "",
    "MLP_WORKER_NUM": "MLP_ROLE_INDEX",
    "DET_NUM_NODES": "DET_NODE_RANK",
    "PBS_NUM_NODES": "",
    "_CONDOR_NPROCS": "_CONDOR_PROCNO",
}
# Set for every process that a Kubernetes Indexed Job or a PMIx launcher starts, without a count.
_RANKS_WITHOUT_COUNT = ("JOB_COMPLETION_INDEX", "PMIX_RANK")
# The number of processes on this machine.
_LOCAL_COUNTS = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MVP_COMM_WORLD_LOCAL_SIZE",
)
# Also set, to 0, for a process that is the only one of its machine or job.
_RANKS_ABOVE_0 = (
    "LOCAL_RANK",
    "NODE_RANK",
    "TPU_WORKER_ID",
    "CLOUD_TPU_TASK_ID",
    "VC_TASK_INDEX",
    "PBS_NODENUM",
)

# Launchers that no list knows: ``ACME_NUM_TASKS`` and ``ACME_TASK_RANK``.
_UNIT = "NODE|PROCESS|PROC|WORKER|HOST|TASK|TRAINER|MACHINE|REPLICA|ROLE|RANK"
_COUNT_NAMES = (
    re.compile(rf"(.*?)_?(?:NUM_|TOTAL_|N)({_UNIT})(?:S|ES)?"),
    re.compile(rf"(.*?)_?({_UNIT})(?:S|ES)?_(?:NUM|COUNT)"),
    re.compile(r"(.+?)_(WORLD|GROUP)_SIZE"),
)
_RANK_NAMES = (
    re.compile(rf"(.*?)_?({_UNIT})_(?:RANK|INDEX|ID)"),
    re.compile(r"(.+?)_(RANK|INDEX)"),
)
# The tasks of an array are independent runs. Slurm's and local variables have rules of their own.
_OTHER_NAMES = re.compile(r".*ARRAY|SLURM_|LOCAL_")

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def multi_process_signs(env: Env, *, allocations: bool = True) -> Iterator[str]:
    """Yield descriptions of variables that show that this process is one of several.

    Args:
        env: The variables.
        allocations: Whether a job with several nodes or tasks is a sign, also where nothing shows
            that more than its batch script was started.

    Example:
        >>> from replicax._src.cluster.signs import multi_process_signs
        >>> list(multi_process_signs({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}))
        ['FLUX_JOB_SIZE=2']
        >>> list(multi_process_signs({"JAX_PROCESS_ID": "0"}))
        ['JAX_PROCESS_ID=0 without JAX_NUM_PROCESSES']
        >>> list(multi_process_signs({"ACME_NUM_TASKS": "2", "ACME_TASK_RANK": "1"}))
        ['ACME_NUM_TASKS=2, ACME_TASK_RANK=1']
    """
    yield from _known_signs(env, allocations=allocations)
    if allocations:
        yield from _slurm_signs(env)
        yield from _lists_of_hosts(env)
    yield from _tf_config_signs(env)
    # A launcher that counts one process is believed, whatever else a batch script exported.
    if all(_number(env, name) != 1 for name in (*_COUNTS_AND_RANKS, "SLURM_STEP_NUM_TASKS")):
        yield from _unknown_launchers(env)
        yield from (f"{name}={env[name]}" for name in _RANKS_ABOVE_0 if _number(env, name))
        several = (name for name in _LOCAL_COUNTS if (_number(env, name) or 0) > 1)
        yield from (f"{name}={env[name]}" for name in several)
        if env.get("MASTER_ADDR", "localhost") not in _LOOPBACK:
            yield f"MASTER_ADDR={env['MASTER_ADDR']} without WORLD_SIZE"


def _known_signs(env: Env, *, allocations: bool) -> Iterator[str]:
    for count, rank in _COUNTS_AND_RANKS.items():
        if (number := _number(env, count)) is not None:
            if number > 1 and (allocations or rank in env):
                yield f"{count}={number}"
        elif rank in env:
            yield f"{rank}={env[rank]} without {count}"
    for name in _RANKS_WITHOUT_COUNT:
        if name in env and not _is_only_process(env, name):
            yield f"{name}={env[name]}"


def _number(env: Env, name: str) -> int | None:
    """Return the value of a variable, None if it is not set or not a number."""
    text = env.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _is_only_process(env: Env, rank: str) -> bool:
    """Whether the launcher that set ``rank`` states that it started this process only."""
    if rank != "PMIX_RANK":
        return False
    by_slurm = env.get("PMIX_NAMESPACE", "").startswith("slurm.pmix")
    return env.get("SLURM_STEP_NUM_TASKS" if by_slurm else "OMPI_COMM_WORLD_SIZE") == "1"


def _slurm_signs(env: Env) -> Iterator[str]:
    if "SLURM_STEP_NUM_TASKS" in env:
        return  # a step, whose number of tasks counts, not that of its job
    for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if env.get(name, "1") != "1":
            yield f"{name}={env[name]} outside of a job step: start the program with srun"
            return
    if "SLURM_STEP_NODELIST" in env:
        yield "SLURM_STEP_NODELIST without SLURM_STEP_NUM_TASKS"
    elif _number(env, "SLURM_PROCID"):
        yield f"SLURM_PROCID={env['SLURM_PROCID']} without SLURM_STEP_NUM_TASKS"


def _lists_of_hosts(env: Env) -> Iterator[str]:
    """Yield the variables that list several hosts, or name a file that does."""
    lists = {
        "LSB_MCPU_HOSTS": env.get("LSB_MCPU_HOSTS", "").split()[::2],  # host, slots, host, ...
        "LSB_HOSTS": env.get("LSB_HOSTS", "").split(),
    }
    for name in (
        "PBS_NODEFILE",
        "PE_HOSTFILE",
        "LSB_DJOB_HOSTFILE",
        "OAR_NODEFILE",
        "COBALT_NODEFILE",
        "BATCH_HOSTS_FILE",
    ):
        lists[name] = [line.split()[0] for line in _lines(env.get(name))]
    for name in (
        "AZ_BATCH_HOST_LIST",
        "AZ_BATCH_NODE_LIST",
        "VC_WORKER_HOSTS",
        "PADDLE_TRAINER_ENDPOINTS",
        "SKYPILOT_NODE_IPS",
        "DSTACK_NODES_IPS",
    ):
        lists[name] = re.findall(r"[^,;\s]+", env.get(name, ""))
    for name, hosts in lists.items():
        if len(set(hosts)) > 1:
            yield f"{name} lists {len(set(hosts))} hosts"
    if len(devices := env.get("NEURON_PJRT_PROCESSES_NUM_DEVICES", "").split(",")) > 1:
        yield f"NEURON_PJRT_PROCESSES_NUM_DEVICES lists {len(devices)} processes"
    for name in ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS"):
        bounds = env.get(name, "")
        if re.fullmatch(r"\d+(,\d+)*", bounds) and prod(map(int, bounds.split(","))) > 1:
            yield f"{name}={bounds}"


def _lines(path: str | None) -> list[str]:
    try:
        text = Path(path).read_text() if path else ""
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def _tf_config_signs(env: Env) -> Iterator[str]:
    """Yield a task of ``TF_CONFIG`` above 0 without a cluster."""
    try:
        config = json.loads(env.get("TF_CONFIG", "{}"))
        index = int(config["task"]["index"])
    except (ValueError, TypeError, KeyError):
        return  # no task, or a mistake that TFConfigClusterResolver describes
    if index > 0 and not config.get("cluster"):
        yield f"TF_CONFIG says that this is task {index}, but lists no cluster"


def _unknown_launchers(env: Env) -> Iterator[str]:
    """Yield pairs of variables that look like a launcher's number of processes and a rank.

    That is a count above 1, and a smaller number under a name with the same prefix.
    """
    known = _COUNTS_AND_RANKS.keys() | _COUNTS_AND_RANKS.values()
    names = [name for name in env if name not in known and not _OTHER_NAMES.match(name)]
    ranks = [(name, *key) for name in names if (key := _prefix_and_unit(name, _RANK_NAMES))]
    for name, prefix, _ in ranks:
        if prefix and name.endswith("_NODE_RANK") and _number(env, name):
            yield f"{name}={env[name]}"
    for name in names:
        count, key = _number(env, name), _prefix_and_unit(name, _COUNT_NAMES)
        if key is None or count is None or count < 2:
            continue
        prefix, unit = key
        for rank_name, rank_prefix, rank_unit in ranks:
            rank = _number(env, rank_name)
            # Without a prefix, NPROC (of threads) and TASK_ID may be of different programs.
            is_same = rank_prefix == prefix and (prefix or rank_unit == unit)
            if is_same and rank is not None and rank < count:
                yield f"{name}={count}, {rank_name}={rank}"


def _prefix_and_unit(name: str, patterns: tuple[re.Pattern[str], ...]) -> tuple[str, str] | None:
    found = next((match for pattern in patterns if (match := pattern.fullmatch(name))), None)
    return (found[1], found[2]) if found else None
