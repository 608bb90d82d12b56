"""ClusterSpec: the tasks of a cluster, by job."""

from collections.abc import Mapping
from typing import Any, ClassVar

from replicax._lazy import LeavesOut
from replicax.cluster._errors import ClusterError, ClusterTypeError
from replicax.cluster._values import show, to_index, to_name

Jobs = dict[str, dict[int, str]]


class ClusterSpec(LeavesOut):
    """The tasks that form a cluster, as jobs of numbered network addresses.

    Args:
        cluster: A mapping from job names to a list of addresses, or to a dictionary from task
            indices to addresses where not every index is taken; or another `ClusterSpec`.

    Raises:
        ClusterTypeError: A part is of the wrong kind.
        ClusterError: An index is negative or given twice, or a name or an address is empty.

    Example:
        >>> from replicax.cluster._spec import ClusterSpec
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
            # A copy lists the jobs by name, as TensorFlow's does.
            cluster = dict(sorted(cluster.as_dict().items()))
        self._jobs = parse_jobs(cluster, "cluster")

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        # As in TensorFlow, also equal to the dictionary of dictionaries.
        return self._jobs == other if isinstance(other, dict) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, *sorted(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Describe the cluster as a dictionary.

        Returns:
            For each job a list of addresses where its indices are 0, 1, 2, ... without a gap,
            else a dictionary from indices to addresses.

        Example:
            >>> from replicax.cluster._spec import ClusterSpec
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
            >>> from replicax.cluster._spec import ClusterSpec
            >>> ClusterSpec({"chief": ["a:1"], "worker": ["b:2"]}).jobs
            ['chief', 'worker']
        """
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """Count the tasks of a job.

        Example:
            >>> from replicax.cluster._spec import ClusterSpec
            >>> ClusterSpec({"worker": {1: "a:1", 3: "b:2"}}).num_tasks("worker")
            2
        """
        return len(self._tasks_of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """List the indices of the tasks of a job, in order.

        Example:
            >>> from replicax.cluster._spec import ClusterSpec
            >>> ClusterSpec({"worker": {3: "b:2", 1: "a:1"}}).task_indices("worker")
            [1, 3]
        """
        return sorted(self._tasks_of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Look up the address of one task.

        Args:
            job_name: A job of this cluster.
            task_index: One of its indices.

        Returns:
            The address.

        Raises:
            ClusterError: There is no such job, or no such task in it.

        Example:
            >>> from replicax.cluster._spec import ClusterSpec
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
        """List the addresses of a job by index, with None where an index is not taken.

        Example:
            >>> from replicax.cluster._spec import ClusterSpec
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
    """Read a mapping from jobs to tasks, strictly.

    Args:
        cluster: What was given.
        where: How to name it in an error, such as ``TF_CONFIG["cluster"]``.

    Returns:
        The address of each task, by job and index.

    Example:
        >>> from replicax.cluster._spec import parse_jobs
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
