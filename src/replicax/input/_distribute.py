"""Distribute: a dataset, or a function that makes one -> a distributed dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any

import jax
import numpy as np

from replicax._types import TensorSpec
from replicax.data._ahead import Failed
from replicax.data._dataset import Dataset
from replicax.data._node import INFINITE_CARDINALITY
from replicax.input._autoshard import WorkerPart, shard
from replicax.input._distributed import DistributedDataset, Pipeline, distributed_spec
from replicax.input._feed import Feed
from replicax.input._options import InputContext, InputOptions, InputReplicationMode
from replicax.input._sources import DatasetSource, InputSource, JointReading, source_of
from replicax.input._split import (
    Share,
    Step,
    attempts,
    deal,
    passed_over,
    single,
    split_batches,
    split_stream,
)
from replicax.topology._mesh import Topology

_log = logging.getLogger("replicax")
_said = False


def distribute_dataset(
    dataset: Any, options: InputOptions | None, topology: Topology, *, in_order: bool = False
) -> DistributedDataset:
    """A dataset of global batches, each divided over the replicas.

    Args:
        dataset: A dataset of ours, or what another library reads.
        options: How batches come to the devices.
        topology: The devices of the replicas.
        in_order: Whether the rows of a batch that all workers read lie on the replicas in their
            order, rather than as TensorFlow deals them.

    Raises:
        NotImplementedError: With one dataset for each replica, which needs a dataset function.
    """
    given = options or InputOptions()
    if given.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA makes one dataset for each replica, which needs a"
            " function that makes them: use `strategy.distribute_datasets_from_function`."
        )
    share = Share.of(topology, in_order=in_order)
    _say_how_arrays_are_cut(dataset, share)
    feed = Feed(topology, share.total > 1, bool(given.experimental_fetch_to_device))
    source = source_of(dataset)
    part: WorkerPart | None = None
    if isinstance(source, DatasetSource):
        policy = source.dataset.options().experimental_distribute.auto_shard_policy
        part = shard(source.dataset.node, policy, share)
        source = DatasetSource(Dataset(part.node), source.dataset, feed.rooms.new)
    shared = part is None or part.every_worker_reads_all
    reading = JointReading(share, source, shared)
    steps = _Steps(reading, part.batch_size if part else None)

    def spec() -> Any:
        own = source.element_spec
        return distributed_spec(own, feed, leading=_leading(own, share, source.cardinality))

    depth = len(topology.own) * given.experimental_per_replica_buffer_size
    count = source.cardinality if shared or share.workers == 1 else reading.cardinality
    parts = (1 if shared else share.workers, 1)
    return DistributedDataset(Pipeline(steps, feed, spec, count, depth, parts, reading.waiting))


@dataclass(frozen=True)
class _Steps:
    """The steps of a dataset of global batches.

    Attributes:
        reading: What this worker reads, and what the workers tell each other.
        size: By what size the stream is split; None to split every batch on its own.
    """

    reading: JointReading
    size: int | None

    def __call__(self, state: Any, skip: int, stop: Event) -> tuple[Iterator[Step], Any]:
        reading, share = self.reading, self.reading.share
        if share.total == 1:
            elements, begun = reading.open(state, skip)
            return single(elements), begun
        if self.size is None and reading.shared:
            elements, begun = reading.open(state, skip)
            return reading.together(split_batches(elements, share), stop), begun
        elements, begun = reading.open(state)
        if self.size is None:
            chunks = split_batches(elements, share, shared=False)
        else:
            chunks = split_stream(elements, share, self.size, reading.nothing)
        return reading.together(passed_over(chunks, skip), stop), begun


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
    topology: Topology,
    *,
    drop_partial: bool = False,
) -> DistributedDataset:
    """The datasets that a function makes, one element for each replica and step.

    Raises:
        ValueError: If options contradict each other.
    """
    given = options or InputOptions()
    _check(given, topology)
    share = Share.of(topology)
    replicas, total = share.replicas, share.total
    feed = Feed(topology, total > 1, bool(given.experimental_fetch_to_device))
    if given.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        sources = [source_of(dataset_fn(InputContext(total, i, total))) for i in topology.own]
    else:
        sources = [source_of(dataset_fn(InputContext(share.workers, share.worker, total)))]
    reading = JointReading(share, sources[0], shared=False, drop=drop_partial)
    alone = share.workers == 1

    def steps(state: Any, skip: int, stop: Event) -> tuple[Iterator[Step], Any]:
        if len(sources) == 1:
            most = sources[0].cardinality  # the last step may have been of fewer elements
            count = skip * replicas if most < 0 else min(skip * replicas, most)
            elements, begun = sources[0].open(state, count)

            def drop() -> bool:
                return drop_partial or (alone and _is_static(sources[0]))

            return reading.together(deal(elements, replicas, drop=drop), stop), begun
        opened = [
            s.open(st, skip) for s, st in zip(sources, state or [None] * replicas, strict=True)
        ]
        return reading.together(_together([e for e, _ in opened]), stop), [b for _, b in opened]

    def spec() -> Any:
        leading = True if alone or sources[0].cardinality == INFINITE_CARDINALITY else None
        return distributed_spec(sources[0].element_spec, feed, leading=leading)

    count = sources[0].cardinality
    cardinality = count if count < 0 or len(sources) > 1 else -(-count // replicas)
    cardinality = cardinality if alone else reading.cardinality
    depth = replicas * given.experimental_per_replica_buffer_size
    parts = (share.workers, replicas) if len(sources) == 1 else (total, 1)
    return DistributedDataset(
        Pipeline(steps, feed, spec, cardinality, depth, parts, reading.waiting)
    )


def numpy_dataset(numpy_input: Any) -> Dataset:
    """A dataset of the slices of arrays; a list of arrays is one array."""
    stacked = jax.tree.map(
        lambda x: np.stack(x) if isinstance(x, list) else np.array(x),
        numpy_input,
        is_leaf=lambda x: isinstance(x, list),
    )
    return Dataset.from_tensor_slices(stacked)


def _say_how_arrays_are_cut(dataset: Any, share: Share) -> None:
    """Say once that each row is a batch, where the array looks like a batch itself."""
    global _said
    if _said or share.total == 1 or not isinstance(dataset, np.ndarray | Mapping | tuple):
        return
    for array in jax.tree.leaves(dataset):
        if np.ndim(array) and len(array) and not len(array) % share.total:
            _said = True
            _log.warning(
                "`experimental_distribute_dataset` was given an array of shape %s, which is cut row"
                " by row: each row is a batch of its own, divided over the %d replicas. If the"
                " whole array is one batch, pass `rx.data.Dataset.from_tensors(array)`; if its rows"
                " are examples, `rx.data.Dataset.from_tensor_slices(array).batch(n)`. (Said once.)",
                np.shape(array),
                share.total,
            )
            return


def _together(streams: list[Iterator[Any]]) -> Iterator[Step]:
    for parts in zip(*map(attempts, streams), strict=False):
        failed = [part for part in parts if isinstance(part, Failed)]
        yield from failed[:1] or deal(parts, len(parts), drop=lambda: False)


def _leading(spec: Any, share: Share, cardinality: int) -> int | bool | None:
    if share.total == 1:
        return True
    if share.workers > 1 and cardinality != INFINITE_CARDINALITY:
        return None  # a worker may run out before the others
    first = {s.shape[0] for s in _leaves(spec) if s.shape}
    if len(first) != 1 or None in first:
        return None
    size, rest = divmod(int(next(iter(first))), share.total)
    return None if rest else size


def _is_static(source: InputSource) -> bool:
    if not isinstance(source, DatasetSource):
        return False
    specs = _leaves(source.element_spec)
    return all(s.shape is not None and None not in s.shape for s in specs)


def _leaves(spec: Any) -> list[TensorSpec]:
    leaves = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, TensorSpec))
    return [s for s in leaves if isinstance(s, TensorSpec)]


def _check(options: InputOptions, topology: Topology) -> None:
    per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    if options.experimental_place_dataset_on_device and (
        not per_replica or options.experimental_fetch_to_device
    ):
        raise ValueError(
            "experimental_place_dataset_on_device needs InputReplicationMode.PER_REPLICA and"
            " experimental_fetch_to_device=False: elements that are made on the device need not be"
            " fetched to it."
        )
    if per_replica and topology.num_replicas == 1:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA needs a strategy with several replicas; with one,"
            " PER_WORKER is the same."
        )
