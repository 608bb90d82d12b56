"""TFConfigClusterResolver: the cluster of the TF_CONFIG environment variable."""

import os
from typing import Any

from replicax.cluster._errors import ClusterTypeError
from replicax.cluster._json_text import read_object, refuse_misspelt
from replicax.cluster._resolver import ClusterResolver
from replicax.cluster._spec import ClusterSpec, parse_jobs
from replicax.cluster._tasks import format_master, task_or_own
from replicax.cluster._values import show, to_index, to_name

_VARIABLE = "TF_CONFIG"
_KEYS = ("cluster", "task", "rpc_layer", "session_master", "environment")
_TASK_KEYS = ("type", "index")


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster and the task from ``TF_CONFIG``, anew on every access.

    ``TF_CONFIG`` is a JSON object with two parts: ``cluster``, which lists the addresses of the
    jobs ``chief``, ``worker``, ``ps`` and ``evaluator``, and ``task``, which says which of them
    this process is. Without the variable there is no cluster. A mistake in it is reported by the
    first access that needs the wrong part, never by the constructor.

    Args:
        task_type: The job of this process, instead of ``TF_CONFIG``'s.
        task_id: The index of this process in its job, instead of ``TF_CONFIG``'s.
        rpc_layer: The protocol to put before addresses, instead of ``TF_CONFIG``'s.
        environment: A word for the surroundings.

    Example:
        >>> import json, os
        >>> from replicax.cluster._tf_config import TFConfigClusterResolver
        >>> os.environ["TF_CONFIG"] = json.dumps({
        ...     "cluster": {"worker": ["localhost:12345", "localhost:23456"]},
        ...     "task": {"type": "worker", "index": 1},
        ... })
        >>> resolver = TFConfigClusterResolver()
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'localhost:23456')
        >>> del os.environ["TF_CONFIG"]
        >>> resolver.cluster_spec()
        ClusterSpec({})
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | str | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._given_type = task_type
        self._given_id = task_id
        self._given_rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Read the cluster; an empty one if ``TF_CONFIG`` has none.

        Raises:
            ClusterError: ``TF_CONFIG`` is no JSON, or an index or an address makes no sense.
            ClusterTypeError: A part of the cluster is of the wrong kind.
        """
        config = _load()
        if "cluster" not in config:
            return ClusterSpec({})
        return ClusterSpec(parse_jobs(config["cluster"], f'{_VARIABLE}["cluster"]'))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Give the address of a task, this one's by default.

        Returns:
            ``TF_CONFIG``'s ``session_master`` if it has one; else an empty string if there is
            no cluster, or only its task 0; else the task's address.
        """
        given = _text_or_none("session_master")
        if given is not None:
            return given
        spec = self.cluster_spec()
        if [spec.task_indices(job) for job in spec.jobs] in ([], [[0]]):
            return ""
        job, index = task_or_own(self, task_type, task_id)
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        # task_address names what is missing, also when it is the task itself.
        return format_master(spec.task_address(job, index), layer)  # type: ignore[arg-type]

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Count the accelerators of a task by kind, this one's by default."""
        job, index = task_or_own(self, task_type, task_id)
        return ClusterResolver.num_accelerators(self, job, index, config_proto)

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if ``TF_CONFIG`` does not say."""
        if self._given_type is not None:
            return str(self._given_type)
        task = _task()
        return to_name(task["type"], _task_key("type")) if "type" in task else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._given_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if ``TF_CONFIG`` does not say."""
        if self._given_id is not None:
            return to_index(self._given_id, "task_id")
        task = _task()
        return to_index(task["index"], _task_key("index")) if "index" in task else None

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._given_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol to put before addresses; None for none."""
        if self._given_rpc_layer is not None:
            return self._given_rpc_layer
        return _text_or_none("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._given_rpc_layer = rpc_layer

    @property
    def environment(self) -> str | None:
        """The constructor's ``environment``."""
        return self._environment


def has_tf_config_cluster() -> bool:
    """Whether ``TF_CONFIG`` describes a cluster; an error if it cannot be read.

    Example:
        >>> import os
        >>> from replicax.cluster._tf_config import has_tf_config_cluster
        >>> os.environ.pop("TF_CONFIG", None)
        >>> has_tf_config_cluster()
        False
    """
    return "cluster" in _load()


def _load() -> dict[str, object]:
    config = read_object(os.environ.get(_VARIABLE, "{}"), _VARIABLE)
    refuse_misspelt(config, _KEYS, _VARIABLE)
    return config


def _task() -> dict[str, object]:
    task = _load().get("task", {})
    if not isinstance(task, dict):
        raise ClusterTypeError(
            f'{_VARIABLE}["task"] is {show(task)}, a {type(task).__name__}; it must be an object,'
            ' such as {"type": "worker", "index": 0}.'
        )
    refuse_misspelt(task, _TASK_KEYS, f'{_VARIABLE}["task"]')
    return task


def _task_key(key: str) -> str:
    return f'{_VARIABLE}["task"]["{key}"]'


def _text_or_none(key: str) -> str | None:
    value = _load().get(key)
    if value is not None and not isinstance(value, str):
        raise ClusterTypeError(
            f'{_VARIABLE}["{key}"] is {show(value)}, a {type(value).__name__};'
            " it must be text, or left out."
        )
    return value
