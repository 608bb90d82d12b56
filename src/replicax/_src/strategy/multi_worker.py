"""`MultiWorkerMirroredStrategy`: a replica for each device of every worker.

`InCluster` resolves the cluster, joins the workers and builds the topology of all their devices.
"""

import copy
from collections.abc import Mapping
from math import prod
from typing import Any

import jax

from replicax._src.base.errors import PlacementError, ScopeError
from replicax._src.base.types import VariablePolicy
from replicax._src.cluster.detection import choose_resolver, resolve_cluster
from replicax._src.cluster.resolvers import ClusterResolver, SimpleClusterResolver
from replicax._src.cluster.spec import ClusterFacts, ClusterSpec
from replicax._src.cluster.tf_config import TFConfigClusterResolver
from replicax._src.collectives.cross_device_ops import Leaves, NcclAllReduce
from replicax._src.collectives.options import CommunicationImplementation, CommunicationOptions
from replicax._src.collectives.packing import BETWEEN_PROCESSES, for_sharded_variables
from replicax._src.strategy import resize as _resize  # noqa: F401 - registers what it moves
from replicax._src.strategy.across_workers import AcrossWorkers
from replicax._src.strategy.strategies import Strategy
from replicax._src.topology.devices import default_devices
from replicax._src.topology.mesh import Topology, checked_axes
from replicax._src.topology.virtual_devices import requested_devices
from replicax._src.topology.worker_devices import join_workers
from replicax._src.values.sharded import (
    check_nothing_packs,
    check_shards,
    checked_reduce_dtype,
    is_sharded,
)
from replicax._src.workers import elastic, start
from replicax._src.workers import group as _group
from replicax._src.workers.group import Group


class InCluster:
    """The cluster of a strategy: its workers, their devices, and this process's task.

    Args:
        resolver: The user's resolver; None to inspect JAX and the environment.
        alone: Whether this process is the only worker.
    """

    def __init__(self, resolver: ClusterResolver | None, *, alone: bool = False) -> None:
        resolver = choose_resolver(resolver, alone=alone)
        facts = resolve_cluster(resolver, alone=alone)
        group = join_workers(facts)
        self.facts = facts if group is None else group.facts
        self.resolver = resolver if resolver is not None else _resolver_of(self.facts)
        self.topology = _topology(self.facts, group)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes files for all workers."""
        return self.facts.is_chief

    def move(self, group: Group) -> None:
        """Adopt the workers that are left of an elastic run."""
        self.facts = group.facts
        self.topology.rebind(_devices(self.facts))

    def configured(self, config_proto: Any) -> Any:
        """Return a copy of a v1 session configuration that names this process and the chief."""
        changed, facts = copy.deepcopy(config_proto), self.facts
        if facts.task_type is None or not hasattr(changed, "device_filters"):
            return changed
        leads = "chief" if "chief" in self.resolver.cluster_spec().jobs else "worker"
        changed.experimental.collective_group_leader = f"/job:{leads}/replica:0/task:0"
        changed.device_filters[:] = [f"/job:{facts.task_type}/task:{facts.task_id}"]
        return changed


class OnWorkers(AcrossWorkers):
    """Cluster properties of multi-worker strategies, for v1 and v2."""

    between_graph = True
    _cluster: InCluster

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver: the cluster, and the task of this process."""
        return self._cluster.resolver

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes files for all workers."""
        return self._cluster.is_chief

    def move_to_workers(self) -> None:
        """Adopt the workers that are left of an elastic run."""
        if (group := _group.current()) is not None:
            self._cluster.move(group)

    def _configured(self, config_proto: Any) -> Any:
        return self._cluster.configured(config_proto)


class WorkersAllReduce(NcclAllReduce):
    """One all-reduce over the replicas of all workers, packed by the strategy's options."""

    def __init__(
        self, options: CommunicationOptions | None, topology: Topology, *, sharded: bool = False
    ) -> None:
        super().__init__(num_packs=1 if topology.cores == 1 else 0)
        self.options = options or CommunicationOptions()
        # A worker of an elastic run may be alone for a while, and must compile what others do.
        is_spread = not topology.is_fully_addressable or elastic.is_on()
        if is_spread and topology.devices[0].platform == "cpu":
            self.packing = BETWEEN_PROCESSES
        if sharded:
            self.packing = for_sharded_variables(self.packing)

    def sum_replicas(
        self, leaves: Leaves, options: CommunicationOptions, topology: Topology
    ) -> Leaves:
        """Sum each pack by an all-reduce."""
        chosen = options if options.bytes_per_pack else self.options
        return super().sum_replicas(leaves, chosen, topology)


def _topology(facts: ClusterFacts, group: Group | None) -> Topology:
    """Return the topology of the devices of all workers, in the order of the workers."""
    own = _own_devices()
    if group is None:
        return Topology(own)
    start.check_equal_devices(group, len(own), own[0].platform)
    return Topology(_devices(facts))


def _devices(facts: ClusterFacts) -> tuple[jax.Device, ...]:
    """Return the devices of all workers, in the order of the workers."""
    own = _own_devices()
    return tuple(
        device
        for process in range(facts.num_workers)
        for device in jax.local_devices(process_index=process, backend=own[0].platform)[: len(own)]
    )


def _own_devices() -> tuple[jax.Device, ...]:
    """Return all accelerators of this process, else one CPU device, or the number requested."""
    devices = default_devices()
    if devices[0].platform != "cpu":
        return devices
    count = requested_devices() or 1
    if count > len(devices):
        raise ScopeError(
            f"REPLICAX_CPU_DEVICES={count} came too late: JAX has started with {len(devices)} CPU"
            " device(s). Set it before Python starts."
        )
    return devices[:count]


def _resolver_of(facts: ClusterFacts) -> ClusterResolver:
    if facts.source == "TF_CONFIG" or facts.num_workers == 1:
        return TFConfigClusterResolver()
    jobs: dict[str, Any] = {"worker": [a or "" for a in facts.addresses]}
    return SimpleClusterResolver(
        ClusterSpec(jobs), task_type=facts.task_type or "", task_id=facts.task_id or 0
    )


class MultiWorkerMirroredStrategy(OnWorkers, Strategy):
    """Synchronous training on the devices of several machines.

    Each variable has a copy on every device of every worker, and the copies are kept equal. Every
    worker runs the same program. The cluster, and which of its workers this process is, comes from
    the resolver; else from ``jax.distributed`` if the program has initialized it, from
    ``TF_CONFIG``, or from the launcher that started the process (``replicax launch``, Slurm, MPI,
    Kubernetes, ``torchrun``, Cloud TPU and others). Without any of them there is one worker.

    A worker takes all of its GPUs, else one CPU device, or ``REPLICAX_CPU_DEVICES`` of them.

    Args:
        cluster_resolver: Describes the cluster; by default the environment is used.
        communication_options: How to pack and transfer data between workers.
        variable_policy: ``"mirrored"``, or ``"sharded"`` as for `MirroredStrategy`. Reading a
            sharded variable outside of `run` is a collective: all workers must do it.
        reduce_dtype: The type in which gradients of sharded variables are summed, as for
            `MirroredStrategy`.
        devices_per_replica: How many devices of a worker form a replica, or the names and sizes of
            their axes, as for `MirroredStrategy`.
        shards: Over how many consecutive replicas variables are sharded, as for
            `MirroredStrategy`, such as those of one worker; all by default.
        alone: Train in this process only, and ignore the environment.

    Raises:
        ClusterError: If the cluster is inconsistent, its workers do not connect, or the
            environment shows that this process is one of several, but not where they meet.
        RuntimeError: If JAX has already started: create the strategy first.

    Example:
        >>> strategy = rx.distribute.MultiWorkerMirroredStrategy()  # no cluster: one worker
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(  # noqa: PLR0913
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        variable_policy: VariablePolicy = "mirrored",
        *,
        reduce_dtype: Any = None,
        devices_per_replica: int | Mapping[str, int] = 1,
        shards: int | None = None,
        alone: bool = False,
    ) -> None:
        sharded = is_sharded(variable_policy)
        axes = checked_axes(devices_per_replica)
        check_shards(shards, variable_policy)
        checked_reduce_dtype(reduce_dtype, variable_policy)
        _check_kind("cluster_resolver", cluster_resolver, ClusterResolver)
        _check_kind("communication_options", communication_options, CommunicationOptions)
        packs = communication_options.bytes_per_pack if communication_options else 0
        check_nothing_packs(reduce_dtype, bytes_per_pack=packs)
        self._cluster = InCluster(cluster_resolver, alone=alone)
        topology = self._cluster.topology
        _check_within_worker(prod(axes.values()), topology)
        topology = self._cluster.topology = topology.divided(axes, shards or 0)
        ops = WorkersAllReduce(communication_options, topology, sharded=sharded)
        super().__init__(topology, ops, variable_policy, reduce_dtype)


def _check_within_worker(cores: int, topology: Topology) -> None:
    """Refuse replicas whose devices would belong to several workers."""
    each = len(topology.local_replicas)
    if each % cores:
        raise PlacementError(
            f"devices_per_replica is {cores}, and each worker has {each} devices: a replica is"
            " within one worker, so it must divide their number. To shard variables over several"
            ' workers use variable_policy="sharded".'
        )


def _check_kind(name: str, value: Any, kind: type) -> None:
    """Refuse an argument of the wrong class before workers start waiting for each other."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f"{name} must be an rx.distribute {kind.__name__}, or None, got {value!r}"
            f" ({type(value).__name__})."
        )


class _OlderForm(type(MultiWorkerMirroredStrategy)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, MultiWorkerMirroredStrategy)


class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy, metaclass=_OlderForm):
    """The deprecated form of `rx.distribute.MultiWorkerMirroredStrategy`; all are instances of it.

    Args:
        communication: The library that transfers the data; accepted, but XLA chooses.
        cluster_resolver: Describes the cluster; by default the environment is used.

    Example:
        >>> strategy = rx.distribute.experimental.MultiWorkerMirroredStrategy(
        ...     communication=rx.distribute.experimental.CollectiveCommunication.RING
        ... )
        >>> isinstance(strategy, rx.distribute.MultiWorkerMirroredStrategy)
        True
    """

    def __init__(
        self,
        communication: Any = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))
