"""rx.data datasets as input of Keras's trainers, and the placement of batches on devices."""

import inspect
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from replicax._src.compat.jax import put_rows
from replicax._src.context.current import get_strategy
from replicax._src.data.dataset import Dataset
from replicax._src.data.node import INFINITE_CARDINALITY
from replicax._src.input.distribute import distribute_dataset
from replicax._src.input.distributed_dataset import DistributedDataset, is_scaled
from replicax._src.input.split import Share
from replicax._src.integrations.keras_private import (
    DataAdapter,
    class_weight_to_sample_weights,
    unpack_x_y_sample_weight,
)
from replicax._src.topology.mesh import Topology
from replicax._src.values.origins import rebuildable
from replicax._src.values.per_replica import PerReplica, is_distributed
from replicax._src.values.placement import NUMERIC, private, replicate
from replicax._src.values.reduce import rows_of
from replicax._src.workers import elastic
from replicax._src.workers.elastic import cached_until_resize


def adapted(original: Any) -> Any:
    """Wrap Keras's ``get_data_adapter`` to return a `DatasetAdapter` for rx.data datasets."""
    signature = inspect.signature(original)

    def get_data_adapter(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        dataset = arguments["x"]
        if not isinstance(dataset, Dataset | DistributedDataset | DatasetAdapter):
            return original(*args, **kwargs)
        for name in ("y", "sample_weight"):
            if arguments.get(name) is not None:
                raise ValueError(
                    f"`{name}` was given together with a dataset, whose elements must contain it:"
                    " (inputs, targets) or (inputs, targets, sample_weights)."
                )
        adapter = (
            dataset
            if isinstance(dataset, DatasetAdapter)
            else DatasetAdapter(dataset, get_strategy(), arguments.get("class_weight"))
        )
        if adapter.is_infinite and not arguments.get("steps_per_epoch"):
            raise ValueError(
                "The dataset is infinite. Pass the number of batches in an epoch:"
                " `steps_per_epoch=` in fit, `validation_steps=` for validation data, `steps=` in"
                " evaluate and predict."
            )
        return adapter

    return get_data_adapter


class DatasetAdapter(DataAdapter):  # type: ignore[misc]
    """A data adapter of Keras for rx.data datasets and distributed datasets.

    Args:
        dataset: The dataset; in a strategy's scope it is distributed here, if it is not yet.
        strategy: The strategy.
        class_weight: Keras's weights of the classes, or None.
        was_dealt: Whether to restore the order that rows had before they were distributed.
    """

    batch_size = None
    has_partial_batch = False
    partial_batch_size = None

    def __init__(
        self, dataset: Any, strategy: Any, class_weight: Any = None, *, was_dealt: bool = False
    ) -> None:
        self._was_dealt = was_dealt
        self._strategy = strategy
        self._topology: Topology | None = strategy.topology
        is_spread = isinstance(dataset, DistributedDataset)
        self._dataset = dataset
        if is_spread and is_scaled(dataset) and elastic.is_on():
            raise ValueError(
                '`fit` cannot use a dataset that was distributed with batch="per_replica" in an'
                " elastic run: the number of steps of an epoch would change within the epoch. Pass"
                " the dataset itself, batched by the global batch size."
            )
        if not is_spread and self._topology is not None:
            self._dataset = distribute_dataset(dataset, None, self._topology, in_order=True)
        self.iterator: Any = None  # over the newest pass
        self._resumed: Any = None
        self._class_weight = class_weight
        self._cardinality = int(
            self._dataset.cardinality if is_spread or strategy.topology else dataset.cardinality()
        )

    @property
    def is_infinite(self) -> bool:
        """Whether the dataset is infinite."""
        return self._cardinality == INFINITE_CARDINALITY

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None if unknown."""
        return self._cardinality if self._cardinality >= 0 else None

    def get_jax_iterator(self) -> Iterator[Any]:
        """Yield global batches, sharded over the replicas."""
        resumed, self._resumed = self._resumed, None
        self.iterator = iter(self._dataset) if resumed is None else resumed
        for element in self.iterator:
            batch = self._rows(element)
            if self._class_weight is not None:
                x, y, _ = unpack_x_y_sample_weight(batch)
                weights = class_weight_to_sample_weights(np.asarray(y), self._class_weight)
                batch = x, y, weights
            yield batch

    get_numpy_iterator = get_jax_iterator

    def open_pass(self) -> None:
        """Start the pass that `resume_at` moves to a saved position.

        A worker that joins a run calls this before it joins: starting a pass is a collective, in
        which the other workers do not take part.
        """
        self.iterator = self._resumed = iter(self._dataset)

    def resume_at(self, state: dict[str, Any]) -> None:
        """Make the next pass start at a saved position, also of another process."""
        if self._resumed is None:
            self.open_pass()
        assert self._resumed is not None
        self._resumed.restore_state(state)

    def start_after(self, state: dict[str, Any]) -> None:
        """Make the next pass the successor of a saved one, for example in shuffling."""
        self.resume_at({**state, "steps": 0})
        self.close()

    def close(self) -> None:
        """End the current pass."""
        if self.iterator is not None:
            self.iterator.close()
        self._resumed = None

    def _rows(self, element: Any) -> Any:
        topology = self._topology
        if topology is None:
            return element
        order = self._order(element) if self._was_dealt else None

        def rows(x: Any) -> Any:
            if not is_distributed(x):
                return x
            if order is None:
                return rebuildable(lambda: rows_of(x, topology))
            found = rows_of(x, topology)
            return _reorder(found.sharding)(found, order)

        return jax.tree.map(rows, element, is_leaf=is_distributed)

    def _order(self, element: Any) -> np.ndarray:
        """Return the permutation that restores the original order of a batch's rows.

        Chunks of rows were dealt to the workers in turn.
        """
        first = next(filter(is_distributed, jax.tree.leaves(element, is_leaf=is_distributed)))
        chunks = Share.of(self._strategy.topology).chunks
        numbers = [np.full(len(v), n, np.int32) for v, n in zip(first.values, chunks, strict=True)]
        dealt = np.asarray(self._strategy.gather(PerReplica(numbers), axis=0))
        return np.argsort(dealt, kind="stable")


@cached_until_resize
def _reorder(sharding: Any) -> Any:
    return jax.jit(lambda x, order: x[order], out_shardings=sharding)


def placed(data: Any, topology: Topology) -> Any:
    """Shard a batch over the replicas if its rows divide evenly; otherwise replicate it."""

    def put(x: Any) -> Any:
        return x if _is_there(x, topology) else rebuildable(lambda: _put(x, topology))

    return jax.tree.map(put, data)


def _put(x: Any, topology: Topology) -> Any:
    divides = _divides(x, topology)
    is_one_each = len(topology.devices) == topology.num_replicas
    is_cut_here = divides and is_one_each and isinstance(x, np.ndarray) and x.dtype.kind in NUMERIC
    if topology.is_fully_addressable and not is_cut_here:
        return jax.device_put(private(x), topology.stacked if divides else topology.mirrored)
    host = private(np.asarray(x))
    if not divides:
        return replicate(host, topology)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    if topology.is_fully_addressable:
        n = topology.num_replicas
        parts = [*host.reshape(n, len(host) // n, *host.shape[1:])]
        return put_rows(parts, topology.stacked, topology.devices)
    return jax.make_array_from_callback(host.shape, topology.stacked, lambda index: host[index])


def _is_there(x: Any, topology: Topology) -> bool:
    return isinstance(x, jax.Array) and x.sharding.device_set == topology.mirrored.device_set


def _divides(x: Any, topology: Topology) -> bool:
    rows = np.shape(x)[0] if np.ndim(x) else 0
    return rows > 0 and rows % topology.num_replicas == 0


def whole(data: Any, topology: Topology) -> Any:
    """Gather all rows of a batch on this worker, for eager steps, which every worker computes."""

    def put(x: Any) -> Any:
        if _is_there(x, topology):
            rows = jax.jit(lambda r: r, out_shardings=topology.mirrored)(x)
            return rows.addressable_data(0)
        return jax.device_put(private(x), topology.primary_devices[0])

    return jax.tree.map(put, data)
