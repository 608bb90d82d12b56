"""The `ClusterResolver` interface, and the resolvers that do not read the environment."""

from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

from replicax._src.base.lazy import LazyModule
from replicax._src.cluster.checks import ClusterConflictError, ClusterError, ClusterTypeError, show
from replicax._src.cluster.spec import ClusterSpec, complete_task, format_master

if TYPE_CHECKING:
    import jax
else:
    jax = LazyModule("jax")  # `replicax launch` does not need JAX


class ClusterResolver(ABC):
    """Finds the cluster, and this process's task in it.

    Subclass it to support another cluster manager: implement `cluster_spec` and `master`, and
    set ``self._task_type``, ``self._task_id`` and ``self._rpc_layer`` where they are known (or
    override the properties).

    Example:
        >>> class TwoHosts(ClusterResolver):
        ...     def __init__(self, index):
        ...         self._task_type, self._task_id = "worker", index
        ...
        ...     def cluster_spec(self):
        ...         return ClusterSpec({"worker": ["alpha:8888", "beta:8888"]})
        ...
        ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
        ...         return ""
        >>> resolver = TwoHosts(1)
        >>> resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
        'beta:8888'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    # An id that all processes of this run share and that no other run has; see `ClusterFacts.job`.
    job: str = ""
    # The port at which worker 0 listens, if it is not that of its address.
    meeting_port: int | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current cluster; query the source on every call instead of caching."""

    @abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one's.

        Args:
            task_type: The job of the task.
            task_id: The index of the task in its job.
            rpc_layer: A protocol to prepend to the address, as in ``grpc://host:port``.

        Returns:
            The address, or an empty string if the program needs none.
        """

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Count the accelerators of a task by kind; CPU devices do not count.

        This initializes JAX's devices. In a cluster, create the strategy first.

        Args:
            task_type: The job of the task.
            task_id: The index of the task in its job. Only this process's devices are visible, so
                the result for any other task is empty.
            config_proto: Ignored.

        Returns:
            Counts such as ``{"GPU": 8}``; a kind that is missing counts 0.

        Raises:
            ClusterError: If there is no such task in the cluster.

        Example:
            >>> resolver = SimpleClusterResolver(ClusterSpec({}), num_accelerators={"GPU": 4})
            >>> resolver.num_accelerators()
            {'GPU': 4}
        """
        del config_proto
        self.master(task_type, task_id)  # raises if there is no such task
        asked, own = (task_type, task_id), (self.task_type, self.task_id)
        if None not in asked and None not in own and asked != own:
            return Counter()
        return local_accelerators()

    @property
    def environment(self) -> str | None:
        """The name of the environment; empty unless a subclass overrides it.

        Example:
            >>> SimpleClusterResolver(ClusterSpec({}), environment="lab").environment
            'lab'
        """
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process: 'chief', 'worker', 'evaluator' or 'ps'; None if unknown.

        Example:
            >>> resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}))
            >>> resolver.task_type = "worker"
            >>> resolver.task_type
            'worker'
        """
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if unknown.

        Example:
            >>> resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}))
            >>> resolver.task_id = 0
            >>> resolver.task_id
            0
        """
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol to prepend to addresses; None for none.

        Example:
            >>> SimpleClusterResolver(ClusterSpec({}), rpc_layer="grpc").rpc_layer
            'grpc'
        """
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer


def local_accelerators() -> Counter[str]:
    """Count the accelerators of this process, by kind.

    Example:
        >>> local_accelerators()["CPU"]
        0
    """
    kinds = (device.platform.upper() for device in jax.local_devices())
    return Counter(kind for kind in kinds if kind != "CPU")


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns its constructor's arguments.

    Args:
        cluster_spec: The cluster.
        master: The result of `master` when no task is named.
        task_type: The job of this process.
        task_id: The index of this process in its job.
        environment: The name of the environment.
        num_accelerators: The result of `num_accelerators`.
        rpc_layer: The protocol to prepend to addresses.

    Raises:
        ClusterTypeError: If ``cluster_spec`` is not a `ClusterSpec`, or ``master`` is not text.

    Example:
        >>> spec = ClusterSpec({"worker": ["a:1", "b:2"]})
        >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=1, rpc_layer="grpc")
        >>> resolver.master("worker", 1)
        'grpc://b:2'
    """

    def __init__(  # noqa: PLR0913 - TensorFlow's signature
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise ClusterTypeError(
                f"cluster_spec is {show(cluster_spec)}, a {type(cluster_spec).__name__};"
                " it must be a ClusterSpec: write rx.train.ClusterSpec(...) around it."
            )
        if not isinstance(master, str):
            raise ClusterTypeError(
                f"master is {show(master)}, a {type(master).__name__}; it must be text,"
                " such as 'host:8888'."
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the constructor's ``cluster_spec``."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the named task, or by default the constructor's ``master``."""
        address = self._master
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
        return format_master(address, rpc_layer or self.rpc_layer)

    @property
    def environment(self) -> str:
        """The constructor's ``environment``."""
        return self._environment

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the constructor's ``num_accelerators`` for every task."""
        del task_type, task_id, config_proto
        return {} if self._num_accelerators is None else self._num_accelerators


class AddressedResolver(ClusterResolver):
    """The base of resolvers that know the address of every task."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one's; empty if that is unknown."""
        job, index = complete_task(self, task_type, task_id)
        if job is None or index is None:
            return ""
        address = self.cluster_spec().task_address(job, index)
        return format_master(address, rpc_layer or self.rpc_layer)


class UnionResolver(ClusterResolver):
    """The union of several resolvers: their clusters merged, all else from the first.

    Args:
        *args: The resolvers.
        **kwargs: ``task_type``, ``task_id`` and ``rpc_layer``, to override the first resolver's.

    Raises:
        ClusterError: If there is no resolver, or a keyword is unknown.
        ClusterTypeError: If an argument is not a resolver.

    Example:
        >>> one = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker")
        >>> two = SimpleClusterResolver(ClusterSpec({"worker": ["b:2"], "ps": ["c:3"]}))
        >>> union = UnionResolver(one, two)
        >>> union.cluster_spec().as_dict(), union.task_type
        ({'worker': ['a:1', 'b:2'], 'ps': ['c:3']}, 'worker')
    """

    def __init__(self, *args: ClusterResolver, **kwargs: Any) -> None:
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        if kwargs:
            raise ClusterError(
                f"UnionResolver does not know {', '.join(sorted(kwargs))};"
                " its keywords are task_type, task_id and rpc_layer."
            )
        if not args:
            raise ClusterError("UnionResolver needs at least one resolver; it was given none.")
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise ClusterTypeError(
                    f"UnionResolver was given {show(resolver)}, a {type(resolver).__name__};"
                    " every argument must be a ClusterResolver."
                )
        self._resolvers = args

    def cluster_spec(self) -> ClusterSpec:
        """Return the merged clusters.

        Returns:
            A cluster in which a job that all resolvers list without gaps is the concatenation of
            their lists; if one of them gives indices, all tasks keep their indices.

        Raises:
            ClusterConflictError: If two resolvers give an address for the same task.
        """
        parts = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        merged: dict[str, list[str] | dict[int, str]] = {}
        for job in dict.fromkeys(job for part in parts for job in part):
            groups = [part[job] for part in parts if job in part]
            lists = [group for group in groups if isinstance(group, list)]
            if len(lists) == len(groups):
                merged[job] = [address for group in lists for address in group]
            else:
                merged[job] = _merge_indexed(job, groups)
        return ClusterSpec(merged)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of the named task, or by default the first resolver's ``master``."""
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return format_master(address, rpc_layer or self._rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    @property
    def task_type(self) -> str | None:
        """The overriding task type, else the first resolver's."""
        return self._task_type if self._task_type is not None else self._resolvers[0].task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The overriding task index, else the first resolver's."""
        return self._task_id if self._task_id is not None else self._resolvers[0].task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The overriding protocol, else the first resolver's."""
        return self._rpc_layer or self._resolvers[0].rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The first resolver's environment."""
        return self._resolvers[0].environment

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Return the first resolver's result."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)


def _merge_indexed(job: str, groups: list[list[str] | dict[int, str]]) -> dict[int, str]:
    """Merge the tasks of a job by index; raise if two resolvers have the same index."""
    merged: dict[int, str] = {}
    for group in groups:
        tasks = dict(enumerate(group)) if isinstance(group, list) else group
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise ClusterConflictError(
                f"Two resolvers of the union both have a task {twice[0]} in job {job!r}:"
                f" {merged[twice[0]]!r} and {tasks[twice[0]]!r}. Give them different indices,"
                " or list the addresses without indices, which appends them."
            )
        merged.update(tasks)
    return merged
