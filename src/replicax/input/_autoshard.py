"""Autoshard: dataset -> the part of it that this worker reads, and how it is split."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from replicax._types import TensorSpec
from replicax.data._depth import once
from replicax.data._known import NoElementError
from replicax.data._node import Node, walk
from replicax.data._nodes._batch import BatchingNode
from replicax.data._nodes._cache import CacheNode
from replicax.data._nodes._combine import ConcatenateNode, ZipNode
from replicax.data._nodes._flat_map import NestedDatasetNode
from replicax.data._nodes._map import MapNode
from replicax.data._nodes._select import SHARD_HINT, ShardNode
from replicax.data._options import AutoShardPolicy
from replicax.data._readers import ReaderNode
from replicax.data._structure import map_leaves
from replicax.input._split import Share

_log = logging.getLogger("replicax")


@dataclass(frozen=True)
class WorkerPart:
    """What one worker reads.

    Attributes:
        node: The graph to read.
        batch_size: The size by which the stream is split; None to split every batch on its own.
        every_worker_reads_all: Whether workers pick their chunks from the same batches.
    """

    node: Node
    batch_size: int | None
    every_worker_reads_all: bool


def shard(node: Node, policy: AutoShardPolicy, share: Share) -> WorkerPart:
    """This worker's part of a dataset.

    Raises:
        ValueError: If FILE is asked for and there are fewer files than workers.
    """
    if share.total == 1:  # nothing is divided, so that nothing needs to be known
        return WorkerPart(node, None, every_worker_reads_all=True)
    chosen = choose(node, policy, share.workers, warns=share.worker == 0)
    if chosen is AutoShardPolicy.DATA:
        return WorkerPart(node, None, every_worker_reads_all=True)
    size = batch_size(node)
    if chosen is AutoShardPolicy.FILE:
        node = _with_files(node, share)
    elif chosen is AutoShardPolicy.HINT:
        node = _with_hints(node, share)
    return WorkerPart(node, size, every_worker_reads_all=False)


def choose(
    node: Node, policy: AutoShardPolicy, workers: int, *, warns: bool = True
) -> AutoShardPolicy:
    """The policy that is really used: AUTO becomes FILE or DATA."""
    if policy is AutoShardPolicy.FILE and workers > 1:
        _require_files(_fewest_files(node), workers)
    if policy is not AutoShardPolicy.AUTO:
        return policy
    files = _fewest_files(node)
    if files is None:
        if workers > 1 and warns:
            _log.warning(
                "The dataset is not read from files, so that every worker reads all of it and keeps"
                " its part of every batch. To have each worker read less, use"
                " `strategy.distribute_datasets_from_function` and shard in the function."
            )
        return AutoShardPolicy.DATA
    if files < workers:
        if warns:
            _log.warning(
                "The dataset reads %d file(s) for %d workers, so that every worker reads all of it"
                " and keeps its part of every batch. Write at least as many files as workers.",
                files,
                workers,
            )
        return AutoShardPolicy.DATA
    return AutoShardPolicy.FILE


def batch_size(node: Node) -> int | None:
    """How many rows a full batch has, if the graph says so.

    After a function, its result must show it, unless its input leaves it open: then the result
    does too.
    """
    while node.keeps_batches:
        (node,) = node.inputs
    if isinstance(node, BatchingNode):
        return node.size
    return None if isinstance(node, MapNode) and _is_open(node.input) else _static(node)


def _is_open(node: Node) -> bool:
    """Whether elements are known to have different sizes, without reading any."""
    if node.batching is not None:
        return not node.batching.is_static
    return node.is_spec_known and _static(node) is None


def _static(node: Node) -> int | None:
    """The size of the first axis, if all parts have one that never changes."""
    try:
        specs = _leaf_specs(node.element_spec)
    except NoElementError:
        return None  # and nothing to divide
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
    """The files of the reader that has the fewest; None if some branch has no reader."""
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
    """Whether a node reads a file for each name that comes in: ``interleave(TFRecordDataset)``."""
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
def _with_files(node: Node, share: Share) -> Node:
    if isinstance(node, ReaderNode):
        return node.shard_files(share.workers, share.worker)
    if _reads_named_files(node):
        return node.with_inputs(ShardNode(node.inputs[0], share.workers, share.worker))
    return _over(node, [_with_files(i, share) for i in node.inputs], share)


def _over(node: Node, inputs: list[Node], share: Share) -> Node:
    """The node over one worker's part of its inputs; the node itself, if that is all of them."""
    if all(new is old for new, old in zip(inputs, node.inputs, strict=True)):
        return node
    node = node.with_inputs(*inputs)
    return node.of_worker(share.worker, share.workers) if isinstance(node, CacheNode) else node


@once
def _with_hints(node: Node, share: Share) -> Node:
    node = _over(node, [_with_hints(i, share) for i in node.inputs], share)
    if isinstance(node, ShardNode) and node.num_shards == SHARD_HINT:
        return replace(node, num_shards=share.workers, index=share.worker)
    return node
