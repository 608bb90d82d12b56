"""Descriptions of a cluster.

`ClusterSpec`, TensorFlow's class, lists the addresses of all tasks by job. `ClusterFacts` has the
facts that a strategy needs, independent of their source. The helpers in between parse addresses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from replicax._src.base.lazy import LeavesOut
from replicax._src.cluster.checks import ClusterError, ClusterTypeError, show, to_index, to_name

if TYPE_CHECKING:
    from replicax._src.cluster.resolvers import ClusterResolver

Jobs = dict[str, dict[int, str]]


class ClusterSpec(LeavesOut):
    """The tasks that form a cluster, as jobs of numbered network addresses.

    Args:
        cluster: A mapping from job names to a list of addresses, or to a dictionary from task
            indices to addresses if some indices are missing; or another `ClusterSpec`.

    Raises:
        ClusterTypeError: If a part has the wrong type.
        ClusterError: If an index is negative or duplicate, or a name or an address is empty.

    Example:
        >>> from replicax._src.cluster.spec import ClusterSpec
        >>> spec = ClusterSpec({"worker": ["a:1", "b:2"], "ps": {0: "p:0", 2: "p:2"}})
        >>> spec.num_tasks("worker"), spec.task_address("ps", 2)
        (2, 'p:2')
        >>> spec
        ClusterSpec({'ps': {0: 'p:0', 2: 'p:2'}, 'worker': ['a:1', 'b:2']})
    """

    left_out: ClassVar[Mapping[str, str]] = {
        "as_cluster_def": "There are no protocol buffers of clusters: use `spec.as_dict()`."
    }

    def __init__(self, cluster: "Mapping[str, Any] | ClusterSpec") -> None:
        if isinstance(cluster, ClusterSpec):
            # Like TensorFlow's, a copy has its jobs sorted by name.
            cluster = dict(sorted(cluster.as_dict().items()))
        self._jobs = parse_jobs(cluster, "cluster")

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        # Like TensorFlow's, also equal to the dictionary of dictionaries.
        return self._jobs == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, *sorted(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the cluster as a dictionary.

        Returns:
            For each job, a list of addresses if its indices are 0, 1, 2, ... without a gap,
            else a dictionary from indices to addresses.

        Example:
            >>> from replicax._src.cluster.spec import ClusterSpec
            >>> ClusterSpec({"worker": {"0": "a:1", "1": "b:2"}}).as_dict()
            {'worker': ['a:1', 'b:2']}
        """
        described: dict[str, list[str] | dict[int, str]] = {}
        for job, tasks in self._jobs.items():
            in_order = dict(sorted(tasks.items()))
            dense = bool(tasks) and list(in_order) == list(range(len(tasks)))
            described[job] = list(in_order.values()) if dense else in_order
        return described

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs.

        Example:
            >>> from replicax._src.cluster.spec import ClusterSpec
            >>> ClusterSpec({"chief": ["a:1"], "worker": ["b:2"]}).jobs
            ['chief', 'worker']
        """
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job.

        Example:
            >>> from replicax._src.cluster.spec import ClusterSpec
            >>> ClusterSpec({"worker": {1: "a:1", 3: "b:2"}}).num_tasks("worker")
            2
        """
        return len(self._tasks_of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the sorted indices of the tasks of a job.

        Example:
            >>> from replicax._src.cluster.spec import ClusterSpec
            >>> ClusterSpec({"worker": {3: "b:2", 1: "a:1"}}).task_indices("worker")
            [1, 3]
        """
        return sorted(self._tasks_of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task.

        Args:
            job_name: A job of this cluster.
            task_index: One of its indices.

        Returns:
            The address.

        Raises:
            ClusterError: If there is no such job, or no such task in it.

        Example:
            >>> from replicax._src.cluster.spec import ClusterSpec
            >>> ClusterSpec({"worker": ["a:1", "b:2"]}).task_address("worker", 1)
            'b:2'
        """
        tasks = self._tasks_of(job_name)
        if task_index not in tasks:
            raise ClusterError(
                f"There is no task {show(task_index)} in job {job_name!r};"
                f" its indices are {show(sorted(tasks))}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by index, with None for missing indices.

        Example:
            >>> from replicax._src.cluster.spec import ClusterSpec
            >>> ClusterSpec({"ps": {0: "p:0", 2: "p:2"}}).job_tasks("ps")
            ['p:0', None, 'p:2']
        """
        tasks = self._tasks_of(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks_of(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ClusterError(
                f"There is no job {show(job_name)} in this cluster;"
                f" its jobs are {show(sorted(self._jobs))}."
            )
        return self._jobs[job_name]


def parse_jobs(cluster: object, where: str) -> Jobs:
    """Parse and validate a mapping from jobs to tasks.

    Args:
        cluster: The mapping.
        where: How to name it in an error, such as ``TF_CONFIG["cluster"]``.

    Returns:
        The address of each task, by job and index.

    Example:
        >>> from replicax._src.cluster.spec import parse_jobs
        >>> parse_jobs({"worker": ["a:1"]}, "cluster")
        {'worker': {0: 'a:1'}}
    """
    if not isinstance(cluster, Mapping):
        raise ClusterTypeError(
            f"{where} is {show(cluster)}, a {type(cluster).__name__}; it must map job names to"
            ' addresses, such as {"worker": ["localhost:12345", "localhost:23456"]}.'
        )
    jobs: Jobs = {}
    for job, tasks in cluster.items():
        name = to_name(job, f"A job name in {where}")
        jobs[name] = _parse_tasks(tasks, f'{where}["{name}"]')
    return jobs


def _parse_tasks(tasks: object, where: str) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        return {i: _parse_task(task, f"{where}[{i}]") for i, task in enumerate(tasks)}
    if not isinstance(tasks, Mapping):
        raise ClusterTypeError(
            f"{where} is {show(tasks)}, a {type(tasks).__name__}; it must be a list of addresses,"
            ' such as ["localhost:12345"], or a dictionary from task indices to addresses.'
        )
    parsed: dict[int, str] = {}
    for key, task in tasks.items():
        index = to_index(key, f"The task index {show(key)} in {where}")
        if index in parsed:
            raise ClusterError(f"{where} has two addresses for task {index}; keep one of them.")
        parsed[index] = _parse_task(task, f"{where}[{index}]")
    return parsed


def _parse_task(task: object, where: str) -> str:
    if not isinstance(task, str):
        raise ClusterTypeError(
            f"{where} is {show(task)}, a {type(task).__name__}; an address is text,"
            ' such as "localhost:12345".'
        )
    if not task:
        raise ClusterError(f'{where} is empty; write an address, such as "localhost:12345".')
    return task


def complete_task(
    resolver: "ClusterResolver", task_type: str | None, task_id: int | None
) -> tuple[str | None, int | None]:
    """Return the task type and id, with the resolver's own where one is None.

    Example:
        >>> from replicax._src.cluster.resolvers import SimpleClusterResolver
        >>> from replicax._src.cluster.spec import ClusterSpec
        >>> from replicax._src.cluster.spec import complete_task
        >>> resolver = SimpleClusterResolver(ClusterSpec({}), task_type="worker", task_id=1)
        >>> complete_task(resolver, None, 0)
        ('worker', 0)
    """
    job = resolver.task_type if task_type is None else task_type
    return job, resolver.task_id if task_id is None else task_id


def format_master(address: str, rpc_layer: str | None) -> str:
    """Prepend the protocol, if there is one, to an address.

    Example:
        >>> from replicax._src.cluster.spec import format_master
        >>> format_master("a:1", "grpc"), format_master("a:1", None)
        ('grpc://a:1', 'a:1')
    """
    return f"{rpc_layer}://{address}" if rpc_layer else address


@dataclass(frozen=True)
class ClusterFacts:
    """The workers that train together, and which of them this process is.

    Attributes:
        num_workers: The number of workers that train together; 1 without a cluster.
        index: The index of this process among them: the chief is 0, and the workers follow.
        addresses: The address of each worker, None where unknown; empty without a cluster.
        task_type: The job of this process, or None without a cluster.
        task_id: The index of this process in its job, or None without a cluster.
        is_chief: Whether this process writes the output of all.
        coordinator: The address of worker 0, where the workers join; None if there are no others.
        source: The origin of these facts, for messages.
        job: An id that all workers of this run share and that no other run has, such as a job id;
            empty if only the addresses distinguish runs.
        is_connected: Whether `jax.distributed.initialize` has connected the workers already.

    Example:
        >>> from replicax._src.cluster.spec import ClusterFacts
        >>> facts = ClusterFacts.alone("no cluster")
        >>> facts.num_workers, facts.index, facts.is_chief
        (1, 0, True)
    """

    num_workers: int
    index: int
    addresses: tuple[str | None, ...]
    task_type: str | None
    task_id: int | None
    is_chief: bool
    coordinator: str | None
    source: str
    job: str = ""
    is_connected: bool = False

    @classmethod
    def alone(cls, source: str) -> "ClusterFacts":
        """Return the facts of a single process without a cluster.

        Example:
            >>> from replicax._src.cluster.spec import ClusterFacts
            >>> ClusterFacts.alone("no cluster").coordinator is None
            True
        """
        return cls(
            num_workers=1,
            index=0,
            addresses=(),
            task_type=None,
            task_id=None,
            is_chief=True,
            coordinator=None,
            source=source,
        )

    @classmethod
    def of_processes(  # noqa: PLR0913 - the parts of a cluster
        cls,
        index: int,
        addresses: tuple[str | None, ...],
        *,
        coordinator: str,
        source: str,
        job: str = "",
        is_connected: bool = False,
    ) -> "ClusterFacts":
        """Return the facts of equal processes without a chief, as most launchers start them.

        Example:
            >>> from replicax._src.cluster.spec import ClusterFacts
            >>> facts = ClusterFacts.of_processes(
            ...     1, ("a:1", "b:1"), coordinator="a:1", source="Slurm"
            ... )
            >>> facts.task_type, facts.task_id, facts.is_chief
            ('worker', 1, False)
        """
        return cls(
            num_workers=len(addresses),
            index=index,
            addresses=addresses,
            task_type="worker",
            task_id=index,
            is_chief=index == 0,
            coordinator=coordinator,
            source=source,
            job=job,
            is_connected=is_connected,
        )

    def describe(self, index: int) -> str:
        """Return a worker's name for messages.

        Example:
            >>> from replicax._src.cluster.spec import ClusterFacts
            >>> facts = ClusterFacts.of_processes(
            ...     0, ("a:1", None), coordinator="a:1", source="Kubeflow"
            ... )
            >>> facts.describe(0), facts.describe(1)
            ('worker 0 (a:1)', 'worker 1')
        """
        address = self.addresses[index] if index < len(self.addresses) else None
        return f"worker {index} ({address})" if address else f"worker {index}"
