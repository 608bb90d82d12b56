"""SlurmClusterResolver: the cluster of a Slurm job step."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from replicax._src.cluster.checks import (
    ClusterError,
    ClusterStateError,
    port_of_job,
    show,
    to_index,
)
from replicax._src.cluster.resolvers import AddressedResolver
from replicax._src.cluster.spec import ClusterSpec

_MOST_HOSTS = 100_000
# Equal in all tasks of a step, and different in those of other clusters and attempts.
_RUNS = ("SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT", "SLURM_STEP_LAUNCHER_PORT")


class _Default(int):
    """An int that differs by identity from the same number passed by a caller."""


_DEFAULT_PORT = _Default(8888)


class SlurmClusterResolver(AddressedResolver):
    """Reads the cluster from the variables of a Slurm job step (``srun``).

    Hosts are in the order in which Slurm sorts them, with task 0 on the first, and the tasks of one
    host get consecutive ports. `task_type` and `task_id` are set by `cluster_spec`.

    Args:
        jobs: The number of tasks of each job; by default all tasks are workers.
        port_base: The port of the first task of each host. By default, worker 0 listens at a port
            derived from the ids of the job and its step, which avoids conflicts between two jobs
            on one node.
        gpus_per_node: The number of GPUs of each host; by default those in
            ``CUDA_VISIBLE_DEVICES``, else those that ``nvidia-smi`` lists.
        gpus_per_task: The number of GPUs of each task; by default an equal share.
        tasks_per_node: The number of tasks per host, or a mapping from host names; by default
            Slurm's.
        auto_set_gpu: Let `cluster_spec` set ``CUDA_VISIBLE_DEVICES`` to this task's GPUs.
        rpc_layer: The protocol to prepend to addresses.

    Raises:
        ClusterStateError: If this is not a job step, or the numbers of tasks or GPUs do not match.
        ClusterError: If one of Slurm's variables cannot be parsed.

    Example:
        >>> import os
        >>> from replicax._src.cluster.slurm import SlurmClusterResolver
        >>> os.environ.update(
        ...     SLURM_PROCID="2", SLURM_STEP_NUM_TASKS="3",
        ...     SLURM_STEP_NODELIST="n[1-2]", SLURM_STEP_TASKS_PER_NODE="2,1",
        ... )
        >>> resolver = SlurmClusterResolver(gpus_per_node=0)
        >>> resolver.cluster_spec().as_dict()
        {'worker': ['n1:8888', 'n1:8889', 'n2:8888']}
        >>> resolver.get_task_info()
        ('worker', 2)
    """

    def __init__(  # noqa: PLR0913 - TensorFlow's signature
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = _DEFAULT_PORT,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,  # noqa: FBT001, FBT002 - TensorFlow's signature
        rpc_layer: str | None = "grpc",
    ) -> None:
        self.job = slurm_job()
        if port_base is _DEFAULT_PORT:
            # TensorFlow's default port would collide between two jobs on one node.
            self.meeting_port = port_of_job(self.job)
        self._rank = _slurm_number("PROCID")
        self._jobs = {"worker": _slurm_number("STEP_NUM_TASKS")} if jobs is None else dict(jobs)
        self._port_base = port_base
        self._tasks_of_host = _tasks_of_hosts(tasks_per_node)
        most = max(self._tasks_of_host.values())
        self._gpus_per_node = _count_gpus() if gpus_per_node is None else gpus_per_node
        self._gpus_per_task = (
            self._gpus_per_node // most if gpus_per_task is None else gpus_per_task
        )
        self._auto_set_gpu = auto_set_gpu
        self._rpc_layer = rpc_layer
        if most * self._gpus_per_task > self._gpus_per_node:
            raise ClusterStateError(
                f"{most} tasks of {self._gpus_per_task} GPUs each do not fit on a node with"
                f" {self._gpus_per_node} GPUs; ask for fewer tasks per node or GPUs per task."
            )
        wanted, given = sum(self._jobs.values()), sum(self._tasks_of_host.values())
        if wanted != given:
            raise ClusterStateError(
                f"The jobs {self._jobs} need {wanted} tasks, but Slurm started {given}:"
                f" {self._tasks_of_host}. Start the step with srun --ntasks={wanted}, or change"
                " the jobs."
            )

    def cluster_spec(self) -> ClusterSpec:
        """Assign the tasks to hosts, and determine which of them this process is.

        Returns:
            The cluster. As in TensorFlow, this also sets `task_type`, `task_id` and, if
            ``auto_set_gpu``, ``CUDA_VISIBLE_DEVICES``.
        """
        tasks = list(self._place_tasks())
        cluster: dict[str, list[str]] = {}
        start = 0
        for job, count in sorted(self._jobs.items()):
            cluster[job] = [address for address, _ in tasks[start : start + count]]
            if start <= self._rank < start + count:
                self._task_type, self._task_id = job, self._rank - start
            start += count
        if self._auto_set_gpu and self._gpus_per_task and self._rank < len(tasks):
            os.environ["CUDA_VISIBLE_DEVICES"] = tasks[self._rank][1]
        return ClusterSpec(cluster)

    def _place_tasks(self) -> Iterator[tuple[str, str]]:
        """Yield the address and the GPU indices of each task."""
        for host in sorted(self._tasks_of_host, key=_host_key):
            for local in range(self._tasks_of_host[host]):
                first = local * self._gpus_per_task
                gpus = range(first, first + self._gpus_per_task)
                yield f"{host}:{self._port_base + local}", ",".join(map(str, gpus))

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the task type and index of this process; None before `cluster_spec` was called."""
        return self.task_type, self.task_id

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the number of GPUs of each task."""
        del task_type, task_id, config_proto
        return {"GPU": self._gpus_per_task}


def slurm_job(env: Mapping[str, str] = os.environ) -> str:
    """Return an id that the tasks of one job step share, and that no other step has.

    The number of restarts tells a requeued job from tasks that its first attempt has left behind,
    and the port of `srun` tells jobs of different Slurm clusters.

    Example:
        >>> from replicax._src.cluster.slurm import slurm_job
        >>> slurm_job({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
        '7.0'
        >>> slurm_job({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"})
        '7.0 1'
    """
    step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
    return " ".join([step, *(env[name] for name in _RUNS if name in env)])


def expand_hosts(text: str) -> list[str]:
    """Expand Slurm's compressed host list.

    Args:
        text: A list such as ``n[1,3-4],m7``; leading zeros are kept.

    Returns:
        The hosts, in Slurm's order.

    Raises:
        ClusterError: If the text is malformed.

    Example:
        >>> from replicax._src.cluster.slurm import expand_hosts
        >>> expand_hosts("n[1,3-4],a[08-10]")
        ['n1', 'n3', 'n4', 'a08', 'a09', 'a10']
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        match = re.fullmatch(r"([^\[\],\s]*)(?:\[([0-9,-]+)\])?", part)
        if match is None or not part:
            raise _bad_hosts(text, part)
        prefix, ranges = match[1], match[2]
        numbers = _expand_ranges(ranges, text) if ranges else [""]
        hosts.extend(prefix + number for number in numbers)
        if len(hosts) > _MOST_HOSTS:
            raise _bad_hosts(text, part)
    return hosts


def _host_key(host: str) -> tuple[str, int, str]:
    """Return Slurm's sort key: the name without its last number, then that number.

    Slurm's own lists are sorted; those that a caller passes as ``tasks_per_node`` need not be.
    """
    match = re.fullmatch(r"(.*?)([0-9]*)", host, re.DOTALL)
    assert match is not None
    return match[1], int(match[2] or -1), match[2]


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if match is None:
            raise _bad_hosts(text, part)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + _MOST_HOSTS:
            raise _bad_hosts(text, part)
        numbers.extend(str(n).zfill(len(match[1])) for n in range(first, last + 1))
    return numbers


def _bad_hosts(text: str, part: str) -> ClusterError:
    return ClusterError(
        f"The host list {show(text)} cannot be read at {show(part)}; expected names and ranges,"
        " such as n[1,3-4],m7."
    )


def expand_counts(text: str) -> list[int]:
    """Expand Slurm's compressed task counts per host.

    Args:
        text: Counts such as ``2(x3),1``.

    Returns:
        One count per host.

    Raises:
        ClusterError: If the text is malformed.

    Example:
        >>> from replicax._src.cluster.slurm import expand_counts
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,5})\))?", part)
        if match is None:
            raise ClusterError(
                f"The task counts {show(text)} cannot be read at {show(part)}; expected counts"
                " with repetitions, such as 2(x3),1."
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def _tasks_of_hosts(tasks_per_node: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return the number of tasks of each host."""
    if isinstance(tasks_per_node, Mapping):
        tasks = {
            host: to_index(count, f"tasks_per_node[{host!r}]")
            for host, count in tasks_per_node.items()
        }
    else:
        hosts = expand_hosts(slurm_variable("STEP_NODELIST"))
        if tasks_per_node is None:
            counts = expand_counts(slurm_variable("STEP_TASKS_PER_NODE"))
        else:
            counts = [to_index(tasks_per_node, "tasks_per_node")] * len(hosts)
        tasks = dict(zip(hosts, counts, strict=False))
    if not tasks or min(tasks.values()) < 1:
        raise ClusterError(f"Every host needs at least one task; Slurm's step has {tasks}.")
    return tasks


def slurm_variable(name: str) -> str:
    """Return the value of ``SLURM_<name>``.

    Raises:
        ClusterStateError: If it is not set.

    Example:
        >>> import os
        >>> from replicax._src.cluster.slurm import slurm_variable
        >>> os.environ["SLURM_PROCID"] = "3"
        >>> slurm_variable("PROCID")
        '3'
    """
    value = os.environ.get(f"SLURM_{name}")
    if value is None:
        raise ClusterStateError(
            f"SLURM_{name} is not set, so this is no Slurm job step; start the program with srun."
        )
    return value


def _slurm_number(name: str) -> int:
    return to_index(slurm_variable(name), f"SLURM_{name}")


def _count_gpus() -> int:
    """Return the number of visible GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip()])
    command = shutil.which("nvidia-smi")
    if command is None:
        return 0
    try:
        listed = subprocess.run(
            [command, "--list-gpus"], capture_output=True, text=True, check=True, timeout=60
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise ClusterStateError(
            f"{command} --list-gpus failed: {error}. Pass gpus_per_node to SlurmClusterResolver."
        ) from error
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
