"""The verbs that bring values to the replicas, and values that are there without them.

Plain values in reductions: one value of each worker -> a per-replica value.

The verbs that bring values to the replicas: datasets, and what a function makes for each.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax

from replicax._lazy import LazyModule
from replicax._types import ReduceOp
from replicax.context._current import (
    current,
    get_replica_context,
    get_strategy,
    require_cross_replica,
)
from replicax.input._options import InputContext, InputOptions
from replicax.state._held import variable_of
from replicax.state._levels import level
from replicax.topology._mesh import Topology
from replicax.values._per_replica import Distributed, PerReplica, SomeArray, in_body, pieces
from replicax.values._placement import as_array
from replicax.values._reduce import is_slices


def is_plain(value: Any) -> bool:
    """Whether each worker has a value of its own in this place: no strategy knows of it."""
    value = value.values if is_slices(value) else value
    if isinstance(value, Distributed):
        return False
    variable = variable_of(value)
    return variable is None or variable.topology is None


def of_each_worker(value: Any, topology: Topology, verb: str, *, once: bool) -> PerReplica:
    """A plain value as the per-replica value of its worker's replicas.

    Args:
        value: A number, an array, or a variable that belongs to no strategy.
        topology: The replicas of all workers.
        verb: What is done with it.
        once: Whether it matters how many replicas of this worker hold it.

    Raises:
        ValueError: If that matters, and there are several.
    """
    count = len(topology.own)
    if once and count > 1:
        raise ValueError(
            f"{value!r} is one value for the {count} replicas of this worker, so that {verb} could"
            " count it once or for each of them. Give each replica its own, with `strategy.run` or"
            " `strategy.experimental_distribute_values_from_function`."
        )
    array = as_array(value)
    level().uses(topology, verb)
    if (body := current().body) is not None:
        return in_body(array, topology, body.across)
    return pieces([array] * count, topology)


if TYPE_CHECKING:
    from replicax.data._dataset import Dataset
    from replicax.input import _distribute
    from replicax.input._distributed import DistributedDataset
else:
    _distribute = LazyModule("replicax.input._distribute")


@dataclass(frozen=True)
class ValueContext:
    """For which replica `experimental_distribute_values_from_function` asks for a value.

    Example:
        >>> rx.distribute.experimental.ValueContext(1, 4).replica_id_in_sync_group
        1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class MultiStepContext:
    """What the steps of `experimental_run_steps_on_iterator` hand out.

    Attributes:
        last_step_outputs: What `set_last_step_output` was told in the last step, by name.
        non_tensor_outputs: What `set_non_tensor_output` was told, by name.
        run_op: None: the steps have run.
    """

    run_op: None = None

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Hand out a value, reduced over the replicas if ``reduce_op`` is given.

        Raises:
            ValueError: In a replica, without ``reduce_op``.
        """
        replica = get_replica_context()
        if replica is None:
            op, strategy = reduce_op, get_strategy()
            value = output if op is None else strategy.reduce(op, output, axis=None)
            self.last_step_outputs[name] = value
        elif reduce_op is None:
            raise ValueError(
                f"set_last_step_output({name!r}) in a replica needs reduce_op, such as"
                " rx.distribute.ReduceOp.SUM: the replicas' values become one."
            )
        else:
            replica.merge_call(
                lambda _, value: self.set_last_step_output(name, value, reduce_op), args=(output,)
            )

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Hand out anything; in a replica, those of all replicas."""
        replica = get_replica_context()
        if replica is None:
            self.non_tensor_outputs[name] = output
        else:
            replica.merge_call(
                lambda strategy, value: self.set_non_tensor_output(
                    name, strategy.experimental_local_results(value)
                ),
                args=(output,),
            )


T = TypeVar("T")


class Unknown:
    """The result of no function: to checkers, only one whose result is not known fits it."""


class Distributing:
    """Datasets and values for each replica."""

    _topology: Topology | None

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas gradients are added up."""

    @property
    @abstractmethod
    def wraps_single(self) -> bool:
        """Whether values are per-replica values even if there is one replica."""

    @property
    @abstractmethod
    def devices_or_default(self) -> Topology:
        """Which devices make which replicas."""

    @overload
    def experimental_distribute_dataset(
        self, dataset: Dataset[T], options: InputOptions | None = None
    ) -> DistributedDataset[T]: ...

    @overload
    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> DistributedDataset[Any]: ...

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset[Any]:
        """Divide the batches of a dataset over the replicas.

        Args:
            dataset: Batched by the global batch size: a `rx.data.Dataset`, another library's
                dataset or loader, arrays, or any iterable of batches.
            options: How elements travel.

        Returns:
            A `DistributedDataset`; the default strategy returns the dataset itself.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> dataset = rx.data.Dataset.range(6).batch(4)
            >>> for batch in strategy.experimental_distribute_dataset(dataset):
            ...     print(strategy.experimental_local_results(batch))
            (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
            (Array([4], dtype=int32), Array([5], dtype=int32))
        """
        require_cross_replica(self, "experimental_distribute_dataset")
        if self._topology is None:
            return dataset  # type: ignore[no-any-return]
        return _distribute.distribute_dataset(dataset, options, self._topology)

    @overload
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset[T]], options: InputOptions | None = None
    ) -> DistributedDataset[T]: ...

    @overload
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> DistributedDataset[Any]: ...

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset[Any]:
        """Spread a dataset that you shard and batch yourself.

        Args:
            dataset_fn: Called with an `InputContext` once for each worker; returns a dataset whose
                elements are one replica's batches.
            options: How elements travel.

        Returns:
            A `DistributedDataset`; of each step, every replica gets one element.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> def make(context):
            ...     return rx.data.Dataset.range(4).batch(context.get_per_replica_batch_size(4))
            >>> for batch in strategy.distribute_datasets_from_function(make):
            ...     print(strategy.experimental_local_results(batch))
            (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
        """
        require_cross_replica(self, "distribute_datasets_from_function")
        if self._topology is None:
            return dataset_fn(InputContext())  # type: ignore[no-any-return]
        return _distribute.distribute_from_function(dataset_fn, options, self._topology)

    @overload
    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset[T]], options: InputOptions | None = None
    ) -> DistributedDataset[T]: ...

    @overload
    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> DistributedDataset[Any]: ...

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset[Any]:
        """The older name of `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Unknown]
    ) -> Any: ...

    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], jax.Array]
    ) -> SomeArray: ...

    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any: ...

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """A per-replica value with a component of your own making for each replica.

        Args:
            value_fn: Called with a `ValueContext` for each replica; what it returns is kept as it
                is.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.experimental_distribute_values_from_function(
            ...     lambda context: context.replica_id_in_sync_group * 10
            ... )
            PerReplica:{
              0: 0,
              1: 10
            }
        """
        require_cross_replica(self, "experimental_distribute_values_from_function")
        count = self.num_replicas_in_sync
        own = self._topology.own if self._topology else (0,)
        values = [value_fn(ValueContext(i, count)) for i in own]
        if not self.wraps_single:
            return values[0]
        leaves, treedefs = zip(*(jax.tree.flatten(v) for v in values), strict=True)
        if any(t != treedefs[0] for t in treedefs):
            raise ValueError(
                f"value_fn returned different structures for the replicas: {list(treedefs)}."
            )
        topology = self.devices_or_default
        return jax.tree.unflatten(
            treedefs[0], [pieces(column, topology) for column in zip(*leaves, strict=True)]
        )
