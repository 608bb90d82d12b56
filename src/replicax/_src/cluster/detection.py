"""Resolution of the cluster: from a resolver, an initialized JAX, or the environment."""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from replicax._src.base.errors import ReplicaxError
from replicax._src.base.lazy import LazyModule
from replicax._src.cluster.checks import (
    ClusterError,
    ClusterTypeError,
    parse_address,
    show,
    to_index,
    to_name,
)
from replicax._src.cluster.launchers import detect
from replicax._src.cluster.resolvers import ClusterResolver
from replicax._src.cluster.spec import ClusterFacts, ClusterSpec
from replicax._src.cluster.tf_config import TFConfigClusterResolver, has_tf_config_cluster

if TYPE_CHECKING:
    from replicax._src.compat import jax
else:
    jax = LazyModule("replicax._src.compat.jax")  # `replicax launch` does not need JAX

ALONE = "REPLICAX_ALONE"
RESOLVERS = "replicax.cluster_resolvers"  # a group of entry points
_MEANS_ALONE = {"": False, "0": False, "false": False, "1": True, "true": True}
_TRAINING = ("chief", "worker")
_JOBS = ("chief", "worker", "ps", "evaluator")


def resolve_cluster(
    resolver: ClusterResolver | None = None, *, alone: bool = False
) -> ClusterFacts:
    """Determine which workers train together, and which of them this process is.

    Args:
        resolver: The source; it takes precedence over everything else. Without one: the processes
            that ``jax.distributed.initialize`` has connected, then ``TF_CONFIG``, then the
            resolvers of installed packages (see `installed_resolver`), then the launchers of
            `replicax._src.cluster.launchers`.
        alone: Skip the detection and train in this process only, as with ``REPLICAX_ALONE=1``.

    Returns:
        The facts; one worker where there is no cluster.

    Raises:
        ClusterError: If the cluster or the task is invalid, or this task cannot train.
        ClusterTypeError: If a part of the description has the wrong type.

    Example:
        >>> from replicax._src.cluster.detection import resolve_cluster
        >>> from replicax._src.cluster.resolvers import SimpleClusterResolver
        >>> from replicax._src.cluster.spec import ClusterSpec
        >>> spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]})
        >>> facts = resolve_cluster(SimpleClusterResolver(spec, task_type="worker", task_id=0))
        >>> facts.index, facts.num_workers, facts.coordinator, facts.is_chief
        (1, 3, 'a:1', False)
    """
    resolver = choose_resolver(resolver, alone=alone)
    if resolver is not None:
        facts = _read(resolver, type(resolver).__name__)
        if isinstance(resolver, TFConfigClusterResolver) and not alone and facts.task_type is None:
            _require_nothing_else(facts.source)
        return facts
    if _is_alone(alone=alone):
        return ClusterFacts.alone("alone=True" if alone else ALONE)
    if connected := _connected():
        return connected
    if has_tf_config_cluster():
        return _read(TFConfigClusterResolver(), "TF_CONFIG")
    return detect() or ClusterFacts.alone("no cluster")


def choose_resolver(
    resolver: ClusterResolver | None, *, alone: bool = False
) -> ClusterResolver | None:
    """Return the user's resolver; else, if nothing else takes precedence, an installed one.

    Args:
        resolver: The user's resolver.
        alone: As for `resolve_cluster`.

    Raises:
        ClusterTypeError: If ``resolver`` is not a resolver.
    """
    if resolver is None:
        is_known = _is_alone(alone=alone) or _connected() or has_tf_config_cluster()
        return None if is_known else installed_resolver()
    if not isinstance(resolver, ClusterResolver):
        raise ClusterTypeError(
            f"cluster_resolver is {show(resolver)}, a {type(resolver).__name__};"
            " it must be a ClusterResolver, such as"
            " rx.distribute.cluster_resolver.TFConfigClusterResolver()."
        )
    return resolver


def _is_alone(*, alone: bool) -> bool:
    text = os.environ.get(ALONE, "0")
    if text.lower() not in _MEANS_ALONE:
        raise ClusterError(
            f"{ALONE} is {show(text)}; set it to 1 to train in this process alone, or to 0."
        )
    return alone or _MEANS_ALONE[text.lower()]


def installed_resolver() -> ClusterResolver | None:
    """Return the resolver of an installed package that describes this process's cluster, if any.

    A package declares a function, or a class, under the entry point group
    ``replicax.cluster_resolvers``. It is called without arguments and returns a `ClusterResolver`,
    or None if the process does not run under its cluster manager. The first in the order of names
    that returns one is used. A process that ``replicax launch`` started is described by that.

    Raises:
        ClusterTypeError: If it returns anything else.
    """
    if "REPLICAX_HUB" in os.environ:
        return None
    for point in sorted(entry_points(group=RESOLVERS), key=lambda point: point.name):
        resolver = point.load()()
        if resolver is None:
            continue
        if not isinstance(resolver, ClusterResolver):
            raise ClusterTypeError(
                f"The entry point {point.name!r} of group {RESOLVERS!r} ({point.value}) returned"
                f" {show(resolver)}; it must return an rx.distribute.cluster_resolver"
                ".ClusterResolver, or None where its cluster manager did not start this process."
            )
        return resolver
    return None


def _require_nothing_else(source: str) -> None:
    """Raise if ``TF_CONFIG`` has no cluster, but something else shows that there is one."""
    if found := others():
        raise ClusterError(
            f"{source} finds no cluster in TF_CONFIG, so this process would train alone. {found}"
            " Omit the resolver to use every description of a cluster, or write alone=True."
        )


def others(*, is_launcher: bool = False) -> str:
    """Return a sentence on the cluster that this process is a worker of; empty if it is alone.

    Unlike `resolve_cluster`, this queries no server and does not raise.

    Args:
        is_launcher: As for `detect`.
    """
    try:
        if _is_alone(alone=False):
            return ""
        if has_tf_config_cluster():
            facts: ClusterFacts | None = _read(TFConfigClusterResolver(), "TF_CONFIG")
        else:
            # A launcher has not started JAX, and imports nothing of it.
            connected = None if is_launcher else _connected()
            facts = connected or detect(ask=False, is_launcher=is_launcher)
    except ReplicaxError as error:
        return str(error)
    if facts is None or facts.num_workers == 1:
        return ""
    return f"This process is worker {facts.index} of {facts.num_workers} (by {facts.source})."


def _connected() -> ClusterFacts | None:
    """Return the cluster that `jax.distributed.initialize` connected this process to, if it did."""
    client = jax.distributed_client()
    if client is None or client.count == 1:
        return None
    return ClusterFacts.of_processes(
        client.index,
        (None,) * client.count,
        coordinator=client.coordinator,
        source="jax.distributed",
        is_connected=True,
    )


def _read(resolver: ClusterResolver, source: str) -> ClusterFacts:
    """Return the facts of the cluster that ``resolver`` describes, after validating them."""
    spec = _cluster_spec(resolver, source)
    if not spec:
        return ClusterFacts.alone(source)
    # Only after cluster_spec(), which sets the task of Slurm's resolver.
    task_type, task_id = _this_task(resolver, source)
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
        coordinator=_with_port(addresses[0], resolver.meeting_port),
        source=source,
        job=resolver.job,
    )


def _with_port(address: str, port: int | None) -> str:
    return address if port is None else f"{address.rpartition(':')[0]}:{port}"


def _cluster_spec(resolver: ClusterResolver, source: str) -> ClusterSpec:
    spec: object = resolver.cluster_spec()
    if isinstance(spec, Mapping):
        return ClusterSpec(spec)
    if not isinstance(spec, ClusterSpec):
        raise ClusterTypeError(
            f"cluster_spec() of {source} returned {show(spec)}, a {type(spec).__name__};"
            " it must return a ClusterSpec."
        )
    return spec


def _this_task(resolver: ClusterResolver, source: str) -> tuple[str, int]:
    task_type, task_id = resolver.task_type, resolver.task_id
    missing = [n for n, v in (("task_type", task_type), ("task_id", task_id)) if v is None]
    if missing:
        raise ClusterError(
            f"{source} describes a cluster, but not which of its tasks this process is:"
            f" {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. In TF_CONFIG"
            ' write "task": {"type": "worker", "index": 0}; with a resolver, pass or set'
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
    """Raise if this process's task does not train, or is not in the cluster."""
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
    # An evaluator reads the checkpoints of the training, and does not join the workers.
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
    """Return the addresses of the chief and the workers; raise for duplicates and gaps."""
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
