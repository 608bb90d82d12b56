"""Strategy methods that distribute datasets and values, and plain values in reductions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import jax

from replicax._src.base.lazy import LazyModule
from replicax._src.base.types import AnyReduceOp
from replicax._src.context.current import (
    current,
    get_replica_context,
    get_strategy,
    require_cross_replica,
)
from replicax._src.input.options import Batch, InputContext, InputOptions
from replicax._src.state.levels import level
from replicax._src.state.variables import variable_of
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import Distributed, PerReplica, SomeArray, in_body, pieces
from replicax._src.values.placement import as_array
from replicax._src.values.reduce import is_slices
from replicax._src.values.structures import unflatten_as


def is_plain(value: Any) -> bool:
    """Whether `value` belongs to no strategy, so that each worker has its own value of it."""
    value = value.values if is_slices(value) else value
    if isinstance(value, Distributed):
        return False
    variable = variable_of(value)
    return variable is None or variable.topology is None


def plain_to_per_replica(value: Any, topology: Topology, verb: str, *, once: bool) -> PerReplica:
    """Convert a plain value to a per-replica value, equal on the replicas of each worker.

    Args:
        value: A number, an array, or a variable that belongs to no strategy.
        topology: The replicas of all workers.
        verb: The method that is called with it, for the message.
        once: Whether the result depends on how many replicas of this worker hold it.

    Raises:
        ValueError: If it does, and there are several.
    """
    count = len(topology.local_replicas)
    if once and count > 1:
        raise ValueError(
            f"{value!r} is one value for the {count} replicas of this worker, so {verb} could"
            " count it once or for each of them. Give each replica its own, with `strategy.run` or"
            " `strategy.experimental_distribute_values_from_function`."
        )
    array = as_array(value)
    level().uses(topology, verb)
    if (body := current().body) is not None:
        return in_body(array, topology, body.across)
    return pieces([array] * count, topology)


if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset
    from replicax._src.input import distribute
    from replicax._src.input.distributed_dataset import DistributedDataset
else:
    distribute = LazyModule("replicax._src.input.distribute")


@dataclass(frozen=True)
class ValueContext:
    """The replica for which `experimental_distribute_values_from_function` needs a value.

    Example:
        >>> rx.distribute.experimental.ValueContext(1, 4).replica_id_in_sync_group
        1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class MultiStepContext:
    """Collects the outputs of the steps of `experimental_run_steps_on_iterator`.

    Attributes:
        last_step_outputs: The values passed to `set_last_step_output` in the last step, by name.
        non_tensor_outputs: The values passed to `set_non_tensor_output`, by name.
        run_op: None: the steps have run.
    """

    run_op: None = None

    def __init__(self) -> None:
        self.last_step_outputs: dict[str, Any] = {}
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: AnyReduceOp | None = None
    ) -> None:
        """Output a value, reduced over the replicas if ``reduce_op`` is given.

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
        """Output any object; in a replica, the objects of all replicas."""
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
    """A marker for overloads: type checkers match it only if a result type is unknown."""


class DistributionMethods:
    """Strategy methods that distribute datasets and values."""

    _topology: Topology | None

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""

    @property
    @abstractmethod
    def wraps_single(self) -> bool:
        """Whether values are per-replica values even with a single replica."""

    @property
    @abstractmethod
    def devices_or_default(self) -> Topology:
        """The topology: which devices form which replica."""

    @overload
    def experimental_distribute_dataset(
        self,
        dataset: Dataset[T],
        options: InputOptions | None = None,
        *,
        batch: Batch = "global",
    ) -> DistributedDataset[T]: ...

    @overload
    def experimental_distribute_dataset(
        self, dataset: object, options: InputOptions | None = None, *, batch: Batch = "global"
    ) -> DistributedDataset[Any]: ...

    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None, *, batch: Batch = "global"
    ) -> DistributedDataset[Any]:
        """Split the batches of a dataset over the replicas.

        Args:
            dataset: Batched by the global batch size: a `rx.data.Dataset`, another library's
                dataset or loader, arrays, or any iterable of batches.
            options: How elements are transferred.
            batch: With "per_replica", the dataset is batched by the batch size of one replica, and
                each step takes as many batches as there are replicas. So the global batch size
                follows the number of replicas, also when that changes in an elastic run.

        Returns:
            A `DistributedDataset`; the default strategy returns the dataset itself.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> dataset = rx.data.Dataset.range(6).batch(4)
            >>> for batch in strategy.experimental_distribute_dataset(dataset):
            ...     print(strategy.experimental_local_results(batch))
            (Array([0, 1], dtype=int32), Array([2, 3], dtype=int32))
            (Array([4], dtype=int32), Array([5], dtype=int32))

            >>> dataset = rx.data.Dataset.range(6).batch(3)  # for each replica
            >>> for batch in strategy.experimental_distribute_dataset(dataset, batch="per_replica"):
            ...     print(strategy.experimental_local_results(batch))
            (Array([0, 1, 2], dtype=int32), Array([3, 4, 5], dtype=int32))
        """
        require_cross_replica(self, "experimental_distribute_dataset")
        if self._topology is None:
            return dataset  # type: ignore[no-any-return]
        return distribute.distribute_dataset(dataset, options, self._topology, batch=batch)

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
        """Distribute a dataset that you shard and batch yourself.

        Args:
            dataset_fn: Called with an `InputContext` once for each worker; returns a dataset whose
                elements are one replica's batches.
            options: How elements are transferred.

        Returns:
            A `DistributedDataset`; in each step, every replica gets one element.

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
        return distribute.distribute_from_function(dataset_fn, options, self._topology)

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
        """Deprecated name of `distribute_datasets_from_function`."""
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
        """Return a per-replica value whose components ``value_fn`` returns.

        Args:
            value_fn: Called with a `ValueContext` for each replica; its results are used
                unchanged.

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
        own = self._topology.local_replicas if self._topology else (0,)
        values = [value_fn(ValueContext(i, count)) for i in own]
        if not self.wraps_single:
            return values[0]
        leaves, treedefs = zip(*(jax.tree.flatten(v) for v in values), strict=True)
        if any(t != treedefs[0] for t in treedefs):
            raise ValueError(
                f"value_fn returned different structures for the replicas: {list(treedefs)}."
            )
        topology = self.devices_or_default
        columns = [pieces(column, topology) for column in zip(*leaves, strict=True)]
        return unflatten_as(values[0], columns, lambda x: False)
