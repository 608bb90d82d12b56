"""The strategies of TensorFlow 1, with its older methods in addition to the current ones.

Related classes of `tf.compat.v1`: `InputIterator`, `ConfigProto` and `TensorInfo`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import jax

from replicax._src.base.types import AnyReduceOp
from replicax._src.cluster.resolvers import ClusterResolver
from replicax._src.collectives.cross_device_ops import CrossDeviceOps
from replicax._src.collectives.options import CommunicationImplementation, CommunicationOptions
from replicax._src.context.current import require_cross_replica
from replicax._src.data.dataset import Dataset
from replicax._src.data.optional import Optional
from replicax._src.input.distribute import (
    distribute_dataset,
    distribute_from_function,
    numpy_dataset,
)
from replicax._src.input.distributed_dataset import DistributedDataset, DistributedIterator
from replicax._src.input.options import InputContext, InputReplicationMode
from replicax._src.strategy.base import StrategyBase
from replicax._src.strategy.multi_worker import InCluster, OnWorkers, WorkersAllReduce
from replicax._src.strategy.strategies import warn_of_others
from replicax._src.strategy.tpu import OnSlice
from replicax._src.topology.device_assignment import DeviceAssignment
from replicax._src.topology.mesh import Topology
from replicax._src.topology.tpu_system import TPUClusterResolver
from replicax._src.values.reduce import Axis


class _Message:
    """An object with arbitrary fields; reading an unset field creates another such object."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = _Message()
        setattr(self, name, value)
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Message) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass
class _Experimental:
    collective_group_leader: str = ""


@dataclass
class ConfigProto:
    """The fields of TensorFlow's session configuration.

    It exists for programs that fill it and pass it around; replicax has no sessions, and strategies
    use only the last four fields.

    Example:
        >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0"])
        >>> strategy.update_config_proto(rx.compat.v1.ConfigProto()).isolate_session_state
        True
    """

    device_count: dict[str, int] = field(default_factory=dict)
    intra_op_parallelism_threads: int = 0
    inter_op_parallelism_threads: int = 0
    use_per_session_threads: bool = False
    session_inter_op_thread_pool: list[Any] = field(default_factory=list)
    placement_period: int = 0
    gpu_options: Any = field(default_factory=_Message)
    pluggable_device_options: Any = field(default_factory=_Message)
    log_device_placement: bool = False
    graph_options: Any = field(default_factory=_Message)
    operation_timeout_in_ms: int = 0
    rpc_options: Any = field(default_factory=_Message)
    cluster_def: Any = field(default_factory=_Message)
    share_cluster_devices_in_session: bool = False
    allow_soft_placement: bool = False
    isolate_session_state: bool = False
    device_filters: list[str] = field(default_factory=list)
    experimental: _Experimental = field(default_factory=_Experimental)

    def copy(self) -> ConfigProto:
        """Return a deep copy."""
        return copy.deepcopy(self)


class _HasArrays(type):
    """The metaclass whose instances are all pytrees, except leaves, that contain a JAX array."""

    def __instancecheck__(cls, value: Any) -> bool:
        leaves, treedef = jax.tree.flatten(value)
        return not jax.tree_util.treedef_is_leaf(treedef) and any(
            isinstance(x, jax.Array) for x in leaves
        )


class TensorInfo:
    """TensorFlow's class of that name, of which only `CompositeTensor` exists here.

    Example:
        >>> composite = rx.compat.v1.TensorInfo.CompositeTensor
        >>> isinstance({"a": jnp.ones(2)}, composite), isinstance(jnp.ones(2), composite)
        (True, False)
    """

    class CompositeTensor(metaclass=_HasArrays):
        """A value made of several arrays: any registered pytree, including sparse arrays.

        `strategy.run` flattens and unflattens them like dicts and tuples.
        """


class InputIterator:
    """An iterator over a distributed dataset, restarted by `initialize`.

    Example:
        >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> iterator = strategy.make_dataset_iterator(rx.data.Dataset.range(4).batch(2))
        >>> iterator.initialize()
        >>> [x.tolist() for x in strategy.experimental_local_results(iterator.get_next())]
        [[0], [1]]
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._pass: DistributedIterator | None = None

    def initialize(self) -> None:
        """Start a new pass over the dataset."""
        if self._pass is not None:
            self._pass.close()
        self._pass = iter(self._dataset)

    @property
    def initializer(self) -> None:
        """Call `initialize`; there is no operation to run later."""
        return self.initialize()

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: The dataset is exhausted.
        """
        return self._current().get_next()

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an empty optional at the end."""
        return self._current().get_next_as_optional()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._current())

    def _current(self) -> DistributedIterator:
        if self._pass is None:
            self.initialize()
        assert self._pass is not None
        return self._pass


class Strategy(StrategyBase):
    """A distribution strategy with the methods of TensorFlow 1.

    Example:
        >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> isinstance(strategy, rx.compat.v1.distribute.Strategy)
        True
        >>> isinstance(strategy, rx.distribute.Strategy)
        False
    """

    def reduce(self, reduce_op: AnyReduceOp, value: Any, axis: Axis = None) -> Any:
        """Combine a per-replica value into one.

        Args:
            reduce_op: SUM or MEAN, as the enumeration or as text.
            value: A result of `run`.
            axis: Also reduce over this axis of each replica's value.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(()))))
            2.0
        """
        return self.reduce_value(reduce_op, value, axis)

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `run`; this is its name in TensorFlow 2.0."""
        _deprecated("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """Return an iterator over a dataset of global batches, split over the replicas.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> iterator = strategy.make_dataset_iterator(rx.data.Dataset.range(4).batch(4))
            >>> iterator.initialize()
            >>> len(strategy.experimental_local_results(iterator.get_next()))
            2
        """
        require_cross_replica(self, "make_dataset_iterator")
        return InputIterator(distribute_dataset(dataset, None, self.devices_or_default))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the dataset of ``input_fn``; each replica gets one element.

        Args:
            input_fn: Takes an `InputContext`; returns a dataset, or a function that returns
                elements.
            replication_mode: PER_WORKER, the only supported mode.

        Raises:
            ValueError: Another mode was given.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> iterator = strategy.make_input_fn_iterator(
            ...     lambda context: rx.data.Dataset.range(4).batch(1)
            ... )
            >>> [x.tolist() for x in strategy.experimental_local_results(iterator.get_next())]
            [[0], [1]]
        """
        require_cross_replica(self, "make_input_fn_iterator")
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"make_input_fn_iterator supports the replication mode PER_WORKER only, got"
                f" {replication_mode}. `distribute_datasets_from_function` has PER_REPLICA."
            )

        def made(context: InputContext) -> Any:
            result = input_fn(context)
            return iter(result, object()) if callable(result) else result

        return InputIterator(
            distribute_from_function(made, None, self.devices_or_default, drop_partial=True)
        )

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return a dataset of the slices of arrays along their first axis.

        Args:
            numpy_input: An array, or a structure of arrays; a list of arrays is stacked.
            session: Accepted and ignored: there are no sessions.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> len(strategy.experimental_make_numpy_dataset(np.ones(10)))
            10
        """
        return numpy_dataset(numpy_input)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Call `experimental_local_results`; this is its older name.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> [int(x) for x in strategy.unwrap(strategy.run(lambda: jnp.asarray(3)))]
            [3, 3]
        """
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Do nothing: the operations of ``value`` have already run."""

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing: there are no sessions, and a resolver defines the cluster.

        Raises:
            ValueError: A cluster is given.
        """
        if cluster_spec is not None or task_type is not None or task_id is not None:
            raise ValueError(
                "configure() cannot change the cluster of a strategy: pass `cluster_resolver=` when"
                " you make it."
            )

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """Call `extended.colocate_vars_with`, where newer programs find this method."""
        return self.extended.colocate_vars_with(colocate_with_variable)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """Call ``fn`` on every replica with the next element of an iterator, if one is given."""
        _deprecated("experimental_run", "run")
        args = () if input_iterator is None else (input_iterator.get_next(),)
        return self.run(fn, args)


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine; see `rx.distribute.MirroredStrategy`.

    Example:
        >>> rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
        2
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        warn_of_others("MirroredStrategy")
        super().__init__(Topology.local(devices), cross_device_ops)


@final
class OneDeviceStrategy(Strategy):
    """All variables and all computation on one device; see `rx.distribute.OneDeviceStrategy`.

    Example:
        >>> rx.compat.v1.distribute.OneDeviceStrategy("CPU:0").num_replicas_in_sync
        1
    """

    def __init__(self, device: str | jax.Device) -> None:
        warn_of_others("OneDeviceStrategy")
        super().__init__(Topology.local([device]))

    @property
    def wraps_single(self) -> bool:
        """Whether values of a single replica are wrapped; here they are plain arrays."""
        return False

    def _configured(self, config_proto: Any) -> Any:
        return copy.deepcopy(config_proto)


_warned: set[str] = set()


def _deprecated(old: str, new: str) -> None:
    if old not in _warned:
        _warned.add(old)
        warnings.warn(
            f"{old} is an older name; use `strategy.{new}`.", DeprecationWarning, stacklevel=3
        )


@final
class MultiWorkerMirroredStrategy(OnWorkers, Strategy):
    """Synchronous training on several machines; see `rx.distribute.MultiWorkerMirroredStrategy`.

    Args:
        communication: The communication library; ignored, XLA chooses one.
        cluster_resolver: The resolver of the cluster; by default one for the environment.

    Example:
        >>> v1 = rx.compat.v1.distribute
        >>> v1.experimental.MultiWorkerMirroredStrategy().num_replicas_in_sync
        1
    """

    def __init__(
        self,
        communication: Any = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        self._cluster = InCluster(cluster_resolver)
        options = CommunicationOptions(implementation=communication)
        super().__init__(self._cluster.topology, WorkersAllReduce(options, self._cluster.topology))


@final
class TPUStrategy(OnSlice, Strategy):
    """Synchronous training on a TPU slice; see `rx.distribute.TPUStrategy`.

    Args:
        tpu_cluster_resolver: The resolver of the TPU; by default that of this machine.
        steps_per_run: Accepted for compatibility with TensorFlow; use `rx.scan` to run several
            steps in one call.
        device_assignment: The cores of each replica; by default one core per replica.

    Example:
        >>> rx.compat.v1.distribute.experimental.TPUStrategy().num_replicas_in_sync
        8
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        self.steps_per_run = steps_per_run or 1
        super().__init__(tpu_cluster_resolver, device_assignment)

    def reduce(self, reduce_op: AnyReduceOp, value: Any, axis: Axis = None) -> Any:
        """Combine a per-replica value into one, in host memory."""
        return OnSlice.reduce(self, reduce_op, value, axis)
