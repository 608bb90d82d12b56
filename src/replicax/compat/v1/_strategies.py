"""The strategies of TensorFlow 1, with older verbs beside the current ones, and their iterators.

ConfigProto: the session configuration that v1 strategies adjust.

TensorInfo: the name under which the pages speak of values made of several arrays.

InputIterator: the iterators of v1 strategies, which are initialized by hand.

The v1 strategies: the same strategies, with older verbs beside the current ones.

The v1 form of MultiWorkerMirroredStrategy.

The v1 form of TPUStrategy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, final

import jax

from replicax._types import ReduceOp
from replicax.cluster._resolver import ClusterResolver
from replicax.collectives._cross_device_ops import CrossDeviceOps
from replicax.collectives._options import CommunicationImplementation, CommunicationOptions
from replicax.context._current import require_cross_replica
from replicax.data._ahead import Optional
from replicax.data._dataset import Dataset
from replicax.input._distribute import (
    distribute_dataset,
    distribute_from_function,
    numpy_dataset,
)
from replicax.input._distributed import DistributedDataset, DistributedIterator
from replicax.input._options import InputContext, InputReplicationMode
from replicax.strategy._base import StrategyBase
from replicax.strategy._multi_worker import InCluster, OnWorkers, WorkersAllReduce
from replicax.strategy._tpu import OnSlice
from replicax.topology._device_assignment import DeviceAssignment
from replicax.topology._mesh import Topology
from replicax.topology._system import TPUClusterResolver
from replicax.values._reduce import Axis


@dataclass
class _Experimental:
    collective_group_leader: str = ""


@dataclass
class ConfigProto:
    """The fields of TensorFlow's session configuration that strategies look at.

    There are no sessions here; it is carried for programs that pass it around.

    Example:
        >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0"])
        >>> strategy.update_config_proto(rx.compat.v1.ConfigProto()).isolate_session_state
        True
    """

    allow_soft_placement: bool = False
    isolate_session_state: bool = False
    device_filters: list[str] = field(default_factory=list)
    experimental: _Experimental = field(default_factory=_Experimental)

    def copy(self) -> ConfigProto:
        """An equal configuration that can be changed."""
        return copy.deepcopy(self)


class _HasArrays(type):
    def __instancecheck__(cls, value: Any) -> bool:
        leaves, treedef = jax.tree.flatten(value)
        return not jax.tree_util.treedef_is_leaf(treedef) and any(
            isinstance(x, jax.Array) for x in leaves
        )


class TensorInfo:
    """What a value is made of.

    Example:
        >>> composite = rx.compat.v1.TensorInfo.CompositeTensor
        >>> isinstance({"a": jnp.ones(2)}, composite), isinstance(jnp.ones(2), composite)
        (True, False)
    """

    class CompositeTensor(metaclass=_HasArrays):
        """A value made of several arrays: any registered pytree, sparse arrays included.

        `strategy.run` takes them apart and puts them together as it does with dicts and tuples.
        """


class InputIterator:
    """One pass over a distributed dataset, begun anew by `initialize`.

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
        """Begin a new pass."""
        if self._pass is not None:
            self._pass.close()
        self._pass = iter(self._dataset)

    @property
    def initializer(self) -> None:
        """Begin a new pass; there are no operations to run later."""
        return self.initialize()

    def get_next(self) -> Any:
        """The next element.

        Raises:
            OutOfRangeError: At the end.
        """
        return self._current().get_next()

    def get_next_as_optional(self) -> Optional:
        """The next element, or an empty optional at the end."""
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
    """A way to spread computation, with the verbs of TensorFlow 1.

    Example:
        >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> isinstance(strategy, rx.compat.v1.distribute.Strategy)
        True
        >>> isinstance(strategy, rx.distribute.Strategy)
        False
    """

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis = None) -> Any:
        """Combine a per-replica value into one.

        Args:
            reduce_op: SUM or MEAN, as the enumeration or as text.
            value: What `run` returned.
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
        """The name of `run` in TensorFlow 2.0."""
        _deprecated("experimental_run_v2", "run")
        return self.run(fn, args, kwargs)

    def make_dataset_iterator(self, dataset: Any) -> InputIterator:
        """An iterator over a dataset of global batches, divided over the replicas.

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
        """An iterator over the dataset that a function makes; every replica takes one element.

        Args:
            input_fn: Takes an `InputContext`; returns a dataset, or a function that gives elements.
            replication_mode: Only PER_WORKER.

        Raises:
            ValueError: For another mode.

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
        """A dataset of the slices of arrays.

        Args:
            numpy_input: An array, or a structure of arrays; a list of arrays is stacked into one.
            session: Accepted and ignored: there are no sessions.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> len(strategy.experimental_make_numpy_dataset(np.ones(10)))
            10
        """
        return numpy_dataset(numpy_input)

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """An older name of `experimental_local_results`.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> [int(x) for x in strategy.unwrap(strategy.run(lambda: jnp.asarray(3)))]
            [3, 3]
        """
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """One operation that runs all of a value's; they have run already."""

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Accepted for TensorFlow's sake: there are no sessions, and a resolver has the cluster.

        Raises:
            ValueError: If a cluster is given.
        """
        if cluster_spec is not None or task_type is not None or task_id is not None:
            raise ValueError(
                "configure() cannot change the cluster of a strategy: pass `cluster_resolver=` when"
                " you make it."
            )

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """An older place of `extended.colocate_vars_with`."""
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
        super().__init__(Topology.local(devices), cross_device_ops)


@final
class OneDeviceStrategy(Strategy):
    """All variables and all computation on one device; see `rx.distribute.OneDeviceStrategy`.

    Example:
        >>> rx.compat.v1.distribute.OneDeviceStrategy("CPU:0").num_replicas_in_sync
        1
    """

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(Topology.local([device]))

    @property
    def wraps_single(self) -> bool:
        """Its one replica's values are plain."""
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
        communication: Which library moves the data; XLA chooses, whatever is named.
        cluster_resolver: Where to find the cluster; by default the environment.

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
        tpu_cluster_resolver: The TPU; that of this machine by default.
        steps_per_run: Accepted for TensorFlow's sake; `rx.scan` takes several steps in one call.
        device_assignment: Which cores form which replica; one replica on each core by default.

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

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis = None) -> Any:
        """Combine a per-replica value into one, in the memory of the host."""
        return OnSlice.reduce(self, reduce_op, value, axis)
