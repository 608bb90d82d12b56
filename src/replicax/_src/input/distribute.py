"""Build a distributed dataset from a dataset, or from a function that returns one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

import jax
import numpy as np

from replicax._src.base.errors import check_parameters
from replicax._src.base.types import TensorSpec
from replicax._src.data.dataset import Dataset
from replicax._src.data.node import INFINITE_CARDINALITY
from replicax._src.data.optional import Failed
from replicax._src.data.options import AutoShardPolicy
from replicax._src.input.autoshard import WorkerPart, shard
from replicax._src.input.distributed_dataset import (
    SCALED,
    DistributedDataset,
    Pipeline,
    distributed_spec,
)
from replicax._src.input.feed import Feed
from replicax._src.input.options import Batch, InputContext, InputOptions, InputReplicationMode
from replicax._src.input.sources import CoordinatedReading, DatasetSource, InputSource, source_of
from replicax._src.input.split import (
    Grouped,
    Share,
    Step,
    catch_failures,
    deal,
    skip_items,
    split_batches,
    split_stream,
    whole_elements,
)
from replicax._src.topology.mesh import Topology

_log = logging.getLogger("replicax")
_has_warned = False


def distribute_dataset(
    dataset: Any,
    options: InputOptions | None,
    topology: Topology,
    *,
    in_order: bool = False,
    batch: Batch = "global",
) -> DistributedDataset:
    """Return a distributed dataset that splits each global batch over the replicas.

    Args:
        dataset: An `rx.data.Dataset`, or a dataset or iterable of another library.
        options: How batches are transferred to the devices.
        topology: The devices of the replicas.
        in_order: Whether replica i gets the i-th chunk of a batch that all workers read; otherwise
            workers take chunks in turn, as in TensorFlow.
        batch: Whether a batch of ``dataset`` is the one of all replicas, or of one replica.

    Raises:
        ValueError: If ``batch`` is neither.
        NotImplementedError: If `options` ask for one dataset per replica, which needs a function.
    """
    if batch not in ("global", "per_replica"):
        raise ValueError(
            f'batch={batch!r} is not known: pass batch="global" if the dataset is batched by the'
            ' global batch size, or batch="per_replica" if by that of each replica.'
        )
    options = options or InputOptions()
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotImplementedError(
            "InputReplicationMode.PER_REPLICA makes one dataset for each replica, which needs a"
            " function that makes them: use `strategy.distribute_datasets_from_function`."
        )
    return DistributedDataset(
        _pipeline_of_dataset(
            dataset, options, topology, in_order=in_order, is_scaled=batch == "per_replica"
        )
    )


def _pipeline_of_dataset(  # noqa: PLR0913 - what a dataset is distributed with
    dataset: Any,
    options: InputOptions,
    topology: Topology,
    *,
    in_order: bool,
    is_scaled: bool,
    warns: bool = True,
) -> Pipeline:
    """Return the pipeline that splits each global batch over the replicas.

    If it ``is_scaled``, a global batch is a batch of the dataset for each replica. ``warns``
    enables log messages about the policy.
    """
    # A group of batches is divided in their order: each replica gets one of them.
    share = Share.of(topology, in_order=in_order or is_scaled)
    _warn_if_array_looks_like_batch(dataset, share)
    feed = Feed(topology, share.total > 1, bool(options.experimental_fetch_to_device))
    source = source_of(dataset)
    part: WorkerPart | None = None
    if isinstance(source, DatasetSource):
        policy = source.dataset.options().experimental_distribute.auto_shard_policy
        if is_scaled:  # all workers read all batches, and each takes its own of them
            policy = _data_policy(policy)
        part = shard(source.dataset.node, policy, share, warns=warns)
        new = None if is_scaled else feed.buffers.new
        source = DatasetSource(Dataset(part.node), source.dataset, new)
    shared = part is None or part.every_worker_reads_all
    reading = CoordinatedReading(share, source, shared)
    steps = (
        _GroupFactory(reading)
        if is_scaled
        else _StepFactory(reading, part.batch_size if part else None)
    )

    def spec() -> Any:
        local = source.element_spec
        leading = _leading_size(local, share, source.cardinality)
        if is_scaled:
            is_even = share.total == 1 or source.cardinality == INFINITE_CARDINALITY
            leading = True if is_even else None
        return distributed_spec(local, feed, leading=leading)

    depth = len(topology.local_replicas) * options.experimental_per_replica_buffer_size
    count = source.cardinality if shared or share.workers == 1 else reading.cardinality
    parts = (1 if shared else share.workers, 1)
    if is_scaled:
        count, parts = -(-count // share.total) if count > 0 else count, SCALED
    fixed = ""
    if not shared:
        fixed = (
            "Each worker reads its own files; use AutoShardPolicy.DATA, with which all read all."
        )
    elif reading.needs_exchange or not isinstance(source, DatasetSource):
        fixed = (
            "The number of steps of a distributed dataset is unknown, or it is another library's;"
            " use an `rx.data` dataset, and `assert_cardinality` or `repeat()` after `filter`."
        )
    rebuild = partial(
        _pipeline_of_dataset,
        *(dataset, options, topology),
        in_order=in_order,
        is_scaled=is_scaled,
        warns=False,  # not at every resize
    )
    per_step = share.total if is_scaled else 1
    return Pipeline(
        steps, feed, spec, count, depth, parts, reading.wait_context, rebuild, fixed, per_step
    )


def _data_policy(policy: AutoShardPolicy) -> AutoShardPolicy:
    """Return the policy with which all workers read all.

    Raises:
        ValueError: If the dataset asks for another one.
    """
    if policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA):
        raise ValueError(
            f'batch="per_replica" needs AutoShardPolicy.DATA, and the dataset has {policy.name}:'
            " all workers must read the same batches, so that they can be divided over another"
            " number of replicas. Set `options.experimental_distribute.auto_shard_policy`."
        )
    return AutoShardPolicy.DATA


@dataclass(frozen=True)
class _GroupFactory:
    """Creates the steps of one pass over a dataset of per-replica batches.

    Attributes:
        reading: The source, which all workers read, and the coordination with them.
    """

    reading: CoordinatedReading

    def __call__(
        self, state: Any, skip: int, stop: Event, sizes: Sequence[int] = ()
    ) -> tuple[Iterator[Step], Any]:
        reading, share = self.reading, self.reading.share
        most = reading.source.cardinality  # the last step may have had fewer batches
        elements, begin_state = reading.open(state, skip if most < 0 else min(skip, most))
        if share.total == 1 and not sizes:
            return whole_elements(elements), begin_state
        groups = Grouped(elements, share.total, sizes)
        if share.total == 1:
            return whole_elements(groups), begin_state
        return reading.align(split_batches(groups, share), stop), begin_state


@dataclass(frozen=True)
class _StepFactory:
    """Creates the steps of one pass over a dataset of global batches.

    Attributes:
        reading: This worker's source, and its coordination with the other workers.
        size: The batch size by which to split the stream; None to split each batch separately.
    """

    reading: CoordinatedReading
    size: int | None

    def __call__(self, state: Any, skip: int, stop: Event) -> tuple[Iterator[Step], Any]:
        reading, share = self.reading, self.reading.share
        if share.total == 1:
            elements, begin_state = reading.open(state, skip)
            return whole_elements(elements), begin_state
        if self.size is None and reading.shared:
            elements, begin_state = reading.open(state, skip)
            return reading.align(split_batches(elements, share), stop), begin_state
        # A step is not a whole number of elements here, so skip steps instead of elements.
        elements, begin_state = reading.open(state)
        if self.size is None:
            chunks = split_batches(elements, share, shared=False)
        else:
            chunks = split_stream(elements, share, self.size, reading.empty_batch)
        return reading.align(skip_items(chunks, skip), stop), begin_state


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any],
    options: InputOptions | None,
    topology: Topology,
    *,
    drop_partial: bool = False,
) -> DistributedDataset:
    """Return a distributed dataset of the per-replica batches of a function's datasets.

    Args:
        dataset_fn: Takes an `InputContext`, returns the dataset of one worker or replica.
        options: How batches are transferred to the devices.
        topology: The devices of the replicas.
        drop_partial: Whether to drop a last step that has no element for some replica; otherwise
            those replicas get empty batches.

    Raises:
        ValueError: If options contradict each other.
    """
    check_parameters(
        dataset_fn,
        1,
        "The function given to distribute_datasets_from_function is called with one argument, an"
        " rx.distribute.InputContext: write `lambda context: dataset`. For a whole dataset write"
        " `strategy.experimental_distribute_dataset(dataset)`.",
    )
    options = options or InputOptions()
    _check(options, topology)
    share = Share.of(topology)
    replicas, total = share.replicas, share.total
    feed = Feed(topology, total > 1, bool(options.experimental_fetch_to_device))
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        sources = [
            source_of(dataset_fn(InputContext(total, i, total))) for i in topology.local_replicas
        ]
    else:
        sources = [source_of(dataset_fn(InputContext(share.workers, share.worker, total)))]
    reading = CoordinatedReading(share, sources[0], shared=False, drop=drop_partial)
    alone = share.workers == 1

    def steps(state: Any, skip: int, stop: Event) -> tuple[Iterator[Step], Any]:
        if len(sources) == 1:
            most = sources[0].cardinality  # the last step may have had fewer elements
            count = skip * replicas if most < 0 else min(skip * replicas, most)
            elements, begin_state = sources[0].open(state, count)

            def drop() -> bool:
                return drop_partial or (alone and _is_static(sources[0]))

            return reading.align(deal(elements, replicas, drop=drop), stop), begin_state
        passes = [
            s.open(st, skip) for s, st in zip(sources, state or [None] * replicas, strict=True)
        ]
        return reading.align(_zip_sources([e for e, _ in passes]), stop), [s for _, s in passes]

    def spec() -> Any:
        leading = True if alone or sources[0].cardinality == INFINITE_CARDINALITY else None
        return distributed_spec(sources[0].element_spec, feed, leading=leading)

    count = sources[0].cardinality
    cardinality = count if count < 0 or len(sources) > 1 else -(-count // replicas)
    cardinality = cardinality if alone else reading.cardinality
    depth = replicas * options.experimental_per_replica_buffer_size
    parts = (share.workers, replicas) if len(sources) == 1 else (total, 1)
    fixed = (
        "A dataset function made a dataset for each worker; use experimental_distribute_dataset."
    )
    return DistributedDataset(
        Pipeline(steps, feed, spec, cardinality, depth, parts, reading.wait_context, None, fixed)
    )


def numpy_dataset(numpy_input: Any) -> Dataset:
    """Return a dataset of the slices of arrays; a list of arrays is stacked first."""
    stacked = jax.tree.map(
        lambda x: np.stack(x) if isinstance(x, list) else np.array(x),
        numpy_input,
        is_leaf=lambda x: isinstance(x, list),
    )
    return Dataset.from_tensor_slices(stacked)


def _warn_if_array_looks_like_batch(dataset: Any, share: Share) -> None:
    """Warn once that rows are not batched, if an array looks like a batch for all replicas."""
    global _has_warned
    if _has_warned or share.total == 1 or not isinstance(dataset, np.ndarray | Mapping | tuple):
        return
    for array in jax.tree.leaves(dataset):
        if np.ndim(array) and len(array) and not len(array) % share.total:
            _has_warned = True
            _log.warning(
                "`experimental_distribute_dataset` was given an array of shape %s, which is cut row"
                " by row: each row is a batch of its own, divided over the %d replicas. If the"
                " whole array is one batch, pass `rx.data.Dataset.from_tensors(array)`; if its rows"
                " are examples, `rx.data.Dataset.from_tensor_slices(array).batch(n)`. (Shown"
                " once.)",
                np.shape(array),
                share.total,
            )
            return


def _zip_sources(streams: list[Iterator[Any]]) -> Iterator[Step]:
    """Yield steps of one element from each stream; a step fails if any of its elements does."""
    for parts in zip(*map(catch_failures, streams), strict=False):
        failed = [part for part in parts if isinstance(part, Failed)]
        yield from failed[:1] or deal(parts, len(parts), drop=lambda: False)


def _leading_size(spec: Any, share: Share, cardinality: int) -> int | bool | None:
    """Return the size of the first axis of each replica's part of an element.

    Returns:
        True if it is the size in `spec`; None if it varies.
    """
    if share.total == 1:
        return True
    if share.workers > 1 and cardinality != INFINITE_CARDINALITY:
        return None  # a worker may run out of data before the others
    first = {s.shape[0] for s in _leaves(spec) if s.shape}
    if len(first) != 1 or None in first:
        return None
    size, rest = divmod(int(next(iter(first))), share.total)
    return None if rest else size


def _is_static(source: InputSource) -> bool:
    """Whether all sizes of the elements of `source` are known."""
    if not isinstance(source, DatasetSource):
        return False
    specs = _leaves(source.element_spec)
    return all(s.shape is not None and None not in s.shape for s in specs)


def _leaves(spec: Any) -> list[TensorSpec]:
    leaves = jax.tree.leaves(spec, is_leaf=lambda x: isinstance(x, TensorSpec))
    return [s for s in leaves if isinstance(s, TensorSpec)]


def _check(options: InputOptions, topology: Topology) -> None:
    """Raise if `options` contradict each other or do not fit the topology."""
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
