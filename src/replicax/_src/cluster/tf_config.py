"""`TFConfigClusterResolver`: the cluster in the ``TF_CONFIG`` environment variable.

The JSON parser is strict, and its errors point at the character or the key.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable
from typing import Any

from replicax._src.cluster.checks import ClusterError, ClusterTypeError, show, to_index, to_name
from replicax._src.cluster.resolvers import ClusterResolver
from replicax._src.cluster.spec import ClusterSpec, complete_task, format_master, parse_jobs

_CONTEXT = 30  # characters shown on each side of a mistake


def read_object(text: str, name: str) -> dict[str, object]:
    """Parse the value of a variable that must be a JSON object.

    Args:
        text: The value.
        name: The variable, for error messages.

    Returns:
        The object as a dictionary.

    Raises:
        ClusterError: If the text is not JSON, or has a duplicate key.
        ClusterTypeError: If it is JSON, but not an object.

    Example:
        >>> from replicax._src.cluster.tf_config import read_object
        >>> read_object('{"task": {"index": 1}}', "TF_CONFIG")
        {'task': {'index': 1}}
        >>> read_object("{'task': 1}", "TF_CONFIG")
        Traceback (most recent call last):
            ...
        replicax.errors.ClusterError: TF_CONFIG is not JSON: expecting property name
        enclosed in double quotes at character 1:
            {'task': 1}
             ^
        JSON wants double quotes: make the text with json.dumps, not with str.
    """
    value = _parse(text, name)
    if not isinstance(value, dict):
        raise ClusterTypeError(
            f"{name} is {show(value)}, a {type(value).__name__}; it must be a JSON object, such as"
            ' {"cluster": {"worker": ["localhost:12345", "localhost:23456"]},'
            ' "task": {"type": "worker", "index": 0}}.'
        )
    return value


def _parse(text: str, name: str) -> object:
    """Parse JSON strictly: reject duplicate keys, NaN and infinities."""

    def refuse(constant: str) -> object:
        raise ClusterError(f"{name} contains {constant}, which is not JSON; write a number.")

    try:
        return json.loads(
            text, object_pairs_hook=lambda pairs: _unique(pairs, name), parse_constant=refuse
        )
    except ClusterError:
        raise
    except json.JSONDecodeError as error:
        raise ClusterError(_describe_syntax(error, name)) from None
    except RecursionError:
        raise ClusterError(f"{name} is nested too deeply to be a cluster.") from None
    except ValueError as error:  # a number with thousands of digits
        raise ClusterError(f"{name} cannot be read: {error}.") from None


def _unique(pairs: list[tuple[str, object]], name: str) -> dict[str, object]:
    unique: dict[str, object] = {}
    for key, value in pairs:
        if key in unique:
            raise ClusterError(f"{name} has the key {show(key)} twice; keep one of them.")
        unique[key] = value
    return unique


def _describe_syntax(error: json.JSONDecodeError, name: str) -> str:
    """Return an error message that shows the place of a syntax error."""
    if not error.doc.strip():
        return (
            f"{name} is set, but empty. Unset it to run without a cluster, or write a JSON object"
            ' such as {"cluster": {"worker": ["localhost:12345"]},'
            ' "task": {"type": "worker", "index": 0}}.'
        )
    start = max(0, error.pos - _CONTEXT)
    before, after = error.doc[start : error.pos], error.doc[error.pos : error.pos + _CONTEXT]
    shown = _printable(("..." if start else "") + before)
    message = error.msg[:1].lower() + error.msg[1:]
    lines = [
        f"{name} is not JSON: {message} at character {error.pos}:",
        f"    {shown}{_printable(after)}",
        f"    {' ' * len(shown)}^",
        _hint(error.doc, error.pos),
    ]
    return "\n".join(line for line in lines if line)


def _printable(text: str) -> str:
    # Keep one column per character, so that the caret points at the right one.
    return "".join(c if c.isprintable() else " " for c in text)


def _hint(text: str, position: int) -> str:
    """Return advice on the likely cause of a syntax error."""
    rest = text[position:]
    if "'" in rest[:1] or text.lstrip()[:1] == "'":
        return "JSON wants double quotes: make the text with json.dumps, not with str."
    if rest.startswith(("True", "False", "None")):
        return "JSON writes true, false and null: make the text with json.dumps, not with str."
    # Python 3.13 points at the comma, earlier ones at the bracket.
    if re.search(r",\s*$", text[: position + 1].rstrip("}]")) and re.match(r",?\s*[}\]]", rest):
        return "A comma before a closing bracket is not allowed in JSON."
    if not rest:
        return "The text ends too early; is a closing bracket or quote missing?"
    return "Make the text with json.dumps, so that it is always valid."


def refuse_misspelt(keys: Iterable[str], known: tuple[str, ...], where: str) -> None:
    """Raise for a key that looks like a misspelt known one; ignore the keys of other programs.

    Example:
        >>> from replicax._src.cluster.tf_config import refuse_misspelt
        >>> refuse_misspelt(["clutser"], ("cluster", "task"), "TF_CONFIG")
        Traceback (most recent call last):
            ...
        replicax.errors.ClusterError: TF_CONFIG has a key 'clutser'; did you mean
        'cluster'? As it stands, the key would be ignored.
    """
    for key in keys:
        if key in known:
            continue
        alike = difflib.get_close_matches(key[:50].strip().lower(), known, n=1, cutoff=0.75)
        if alike:
            raise ClusterError(
                f"{where} has a key {show(key)}; did you mean {alike[0]!r}?"
                " As it stands, the key would be ignored."
            )


_VARIABLE = "TF_CONFIG"
_KEYS = ("cluster", "task", "rpc_layer", "session_master", "environment")
_TASK_KEYS = ("type", "index")


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster and the task from ``TF_CONFIG``, again on every access.

    ``TF_CONFIG`` is a JSON object with two parts: ``cluster``, which lists the addresses of the
    jobs ``chief``, ``worker``, ``ps`` and ``evaluator``, and ``task``, which names the one that
    this process is. Without the variable there is no cluster. A mistake in it raises at the first
    access that needs the wrong part, never in the constructor.

    Args:
        task_type: The job of this process, instead of ``TF_CONFIG``'s.
        task_id: The index of this process in its job, instead of ``TF_CONFIG``'s.
        rpc_layer: The protocol to prepend to addresses, instead of ``TF_CONFIG``'s.
        environment: The name of the environment.

    Example:
        >>> import json, os
        >>> from replicax._src.cluster.tf_config import TFConfigClusterResolver
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
        self._type_override = task_type
        self._id_override = task_id
        self._rpc_layer_override = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster; an empty one if ``TF_CONFIG`` has none.

        Raises:
            ClusterError: If ``TF_CONFIG`` is not JSON, or an index or an address is invalid.
            ClusterTypeError: If a part of the cluster has the wrong type.
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
        """Return the address of a task, by default this one's.

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
        job, index = complete_task(self, task_type, task_id)
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        # task_address raises for an unknown job or index, and for None.
        return format_master(spec.task_address(job, index), layer)  # type: ignore[arg-type]

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: Any = None,
    ) -> dict[str, int]:
        """Count the accelerators of a task by kind, by default this one's."""
        job, index = complete_task(self, task_type, task_id)
        return ClusterResolver.num_accelerators(self, job, index, config_proto)

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if ``TF_CONFIG`` has none."""
        if self._type_override is not None:
            return str(self._type_override)
        task = _task()
        return to_name(task["type"], _task_key("type")) if "type" in task else None

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._type_override = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if ``TF_CONFIG`` has none."""
        if self._id_override is not None:
            return to_index(self._id_override, "task_id")
        task = _task()
        return to_index(task["index"], _task_key("index")) if "index" in task else None

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._id_override = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol to prepend to addresses; None for none."""
        if self._rpc_layer_override is not None:
            return self._rpc_layer_override
        return _text_or_none("rpc_layer")

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer_override = rpc_layer

    @property
    def environment(self) -> str | None:
        """The constructor's ``environment``."""
        return self._environment


def has_tf_config_cluster() -> bool:
    """Whether ``TF_CONFIG`` describes a cluster; raise ClusterError if it cannot be read.

    Example:
        >>> import os
        >>> from replicax._src.cluster.tf_config import has_tf_config_cluster
        >>> os.environ.pop("TF_CONFIG", None)
        >>> has_tf_config_cluster()
        False
    """
    return _load().get("cluster", {}) != {}


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
