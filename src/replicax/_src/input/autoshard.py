"""Auto-sharding: rewrite a dataset's graph to the part that this worker reads."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from replicax._src.base.types import TensorSpec
from replicax._src.data.deep_pipelines import once
from replicax._src.data.graph_facts import NoElementError
from replicax._src.data.node import Node, walk
from replicax._src.data.nodes.batch import BatchingNode
from replicax._src.data.nodes.cache import CacheNode
from replicax._src.data.nodes.combine import ConcatenateNode, ZipNode
from replicax._src.data.nodes.flat_map import NestedDatasetNode
from replicax._src.data.nodes.map import MapNode
from replicax._src.data.nodes.select import SHARD_HINT, ShardNode
from replicax._src.data.options import AutoShardPolicy
from replicax._src.data.readers import ReaderNode
from replicax._src.data.structure import map_leaves
from replicax._src.input.split import Share

_log = logging.getLogger("replicax")


@dataclass(frozen=True)
class WorkerPart:
    """The part of a dataset that one worker reads.

    Attributes:
        node: The graph to read.
        batch_size: The batch size by which to split the stream; None to split each batch
            separately.
        every_worker_reads_all: Whether all workers read the same batches and each takes its chunks.
    """

    node: Node
    batch_size: int | None
    every_worker_reads_all: bool


def shard(node: Node, policy: AutoShardPolicy, share: Share, *, warns: bool = True) -> WorkerPart:
    """Return the part of the graph of `node` that this worker reads under `policy`.

    `warns` enables log messages, which the first worker writes.

    Raises:
        ValueError: If `policy` is FILE and there are fewer files than workers.
    """
    if share.total == 1:  # nothing to split: do not read an element to learn the batch size
        return WorkerPart(node, None, every_worker_reads_all=True)
    chosen = choose(node, policy, share.workers, warns=warns and share.worker == 0)
    if chosen is AutoShardPolicy.DATA:
        return WorkerPart(node, None, every_worker_reads_all=True)
    size = batch_size(node)
    if chosen is AutoShardPolicy.FILE:
        node = _shard_files(node, share)
    elif chosen is AutoShardPolicy.HINT:
        node = _shard_at_hints(node, share)
    return WorkerPart(node, size, every_worker_reads_all=False)


def choose(
    node: Node, policy: AutoShardPolicy, workers: int, *, warns: bool = True
) -> AutoShardPolicy:
    """Return the effective policy: AUTO becomes FILE or DATA. `warns` enables log messages."""
    if policy is AutoShardPolicy.FILE and workers > 1:
        _require_files(_fewest_files(node), workers)
    if policy is not AutoShardPolicy.AUTO:
        return policy
    files = _fewest_files(node)
    if files is None:
        if workers > 1 and warns:
            _log.warning(
                "The dataset is not read from files, so every worker reads all of it and keeps its"
                " part of every batch. To have each worker read less, use"
                " `strategy.distribute_datasets_from_function` and shard in the function."
            )
        return AutoShardPolicy.DATA
    if files < workers:
        if warns:
            _log.warning(
                "The dataset reads %d file(s) for %d workers, so every worker reads all of it"
                " and keeps its part of every batch. Write at least as many files as workers.",
                files,
                workers,
            )
        return AutoShardPolicy.DATA
    return AutoShardPolicy.FILE


def batch_size(node: Node) -> int | None:
    """Return the number of rows of a full batch, or None if the graph does not determine it.

    The size after a `map` is that of the function's results, unless the size of its input varies:
    then it is None.
    """
    while node.keeps_batches:
        (node,) = node.inputs
    if isinstance(node, BatchingNode):
        return node.size
    return None if isinstance(node, MapNode) and _size_varies(node.input) else _static_size(node)


def _size_varies(node: Node) -> bool:
    """Whether the graph shows, without reading, that the first axis of elements varies in size."""
    if node.batching is not None:
        return not node.batching.is_static
    return node.is_spec_known and _static_size(node) is None


def _static_size(node: Node) -> int | None:
    """Return the size of the first axis if all leaves have the same static one, otherwise None."""
    try:
        specs = _leaf_specs(node.element_spec)
    except NoElementError:
        return None  # an empty dataset: nothing to split
    sizes = {
        spec.shape[0] if isinstance(spec, TensorSpec) and spec.shape else None for spec in specs
    }
    return sizes.pop() if len(sizes) == 1 else None


def _leaf_specs(spec: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, spec)
    return found


@once
def _fewest_files(node: Node) -> int | None:
    """Return the smallest number of files of a reader, or None if a branch has no reader."""
    if isinstance(node, ReaderNode):
        return len(node.files)
    if not node.inputs:
        return None
    if _reads_named_files(node):
        names = node.inputs[0].cardinality
        return names if names >= 0 else None
    counts = [_fewest_files(i) for i in node.inputs]
    if isinstance(node, ZipNode | ConcatenateNode):
        known = [c for c in counts if c is not None]
        return min(known) if len(known) == len(counts) else None
    return counts[0]


def _reads_named_files(node: Node) -> bool:
    """Whether `node` opens a file for each input name, as `interleave(TFRecordDataset)` does."""
    if not isinstance(node, NestedDatasetNode):
        return False
    try:
        inner = node.first_inner()
    except NoElementError:
        return False
    return any(isinstance(part, ReaderNode) for part in walk(inner))


def _require_files(files: int | None, workers: int) -> None:
    if files is None:
        raise ValueError(
            "AutoShardPolicy.FILE needs a dataset that is read from files (TFRecordDataset,"
            " TextLineDataset, FixedLengthRecordDataset). Use AutoShardPolicy.DATA."
        )
    if files < workers:
        raise ValueError(
            f"AutoShardPolicy.FILE needs a file for each of the {workers} workers, and the dataset"
            f" reads {files}. Write more files, or use AutoShardPolicy.DATA."
        )


@once
def _shard_files(node: Node, share: Share) -> Node:
    """Return the graph with the files of every reader sharded over the workers."""
    if isinstance(node, ReaderNode):
        return node.shard_files(share.workers, share.worker)
    if _reads_named_files(node):
        return node.with_inputs(ShardNode(node.inputs[0], share.workers, share.worker))
    return _with_sharded_inputs(node, [_shard_files(i, share) for i in node.inputs], share)


def _with_sharded_inputs(node: Node, inputs: list[Node], share: Share) -> Node:
    """Return `node` over its sharded inputs, or `node` itself if none of them changed."""
    if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):
        return node
    node = node.with_inputs(*inputs)
    # Workers that read different data must not share a cache file.
    return node.of_worker(share.worker, share.workers) if isinstance(node, CacheNode) else node


@once
def _shard_at_hints(node: Node, share: Share) -> Node:
    """Return the graph with every `shard(SHARD_HINT)` replaced by this worker's shard."""
    node = _with_sharded_inputs(node, [_shard_at_hints(i, share) for i in node.inputs], share)
    if isinstance(node, ShardNode) and node.num_shards == SHARD_HINT:
        return replace(node, num_shards=share.workers, index=share.worker)
    return node
