"""Nodes that regroup consecutive elements: unbatch, rebatch and window.

Also the nodes and streams over blocks that are already in memory, which windows, groups and caches
use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.data.element_blocks import Block, ColumnBlock, Row, RowBlock, join
from replicax._src.data.graph_facts import with_unknown_sizes
from replicax._src.data.leaves import DatasetSpec, leaf_spec, private_copy
from replicax._src.data.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batching,
    BufferedStream,
    Node,
    SkippingStream,
    SourceNode,
    Stream,
    UnaryNode,
)
from replicax._src.data.nodes.batch import add_axis
from replicax._src.data.nodes.source import ArraySource, SlicesNode
from replicax._src.data.seeds import Run
from replicax._src.data.structure import LEAF, flatten, map_leaves


@final
@dataclass(frozen=True, eq=False)
class UnbatchNode(UnaryNode):
    """The rows of each batch as separate elements."""

    @property
    def element_spec(self) -> Any:
        """The input's spec without the first axis."""
        return remove_axis(self.input.element_spec, "unbatch")

    @property
    def cardinality(self) -> int:
        """The number of rows; known only if all batches have the same size."""
        size, batching = self.input.cardinality, self.input.batching
        if size > 0 and batching is not None and batching.is_static:
            return size * batching.size
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _UnbatchStream(self.input.open(run))


@final
class _UnbatchStream(Stream):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._block: Block | None = None

    def pull(self, limit: int) -> Block | None:
        while self._block is None or not len(self._block):
            batch = self._stream.pull(1)
            if batch is None:
                return None
            self._block = _unstack(batch)
        block = self._block
        if len(block) <= limit:
            self._block = None
            return block
        self._block = block.slice(limit, len(block))
        return block.slice(0, limit)

    def close(self) -> None:
        self._stream.close()


@final
@dataclass(frozen=True, eq=False)
class RebatchNode(UnaryNode):
    """The rows of the batches, regrouped into batches of `sizes`, used cyclically."""

    sizes: tuple[int, ...]
    drop_remainder: bool
    grouping = ("sizes", "drop_remainder")

    @property
    def batching(self) -> Batching | None:
        """The batch size if there is only one; static if every batch is certain to be full."""
        if len(set(self.sizes)) > 1:
            return None
        size, before = self.sizes[0], self.input.batching
        # Static input batches of a multiple of `size` leave no remainder.
        is_cut = before is not None and before.is_static and not before.size % size
        return Batching(size, self.drop_remainder or is_cut)

    @property
    def element_spec(self) -> Any:
        """The input's spec with the new batch size, which is None unless it is static."""
        inner, batching = remove_axis(self.input.element_spec, "rebatch"), self.batching
        return add_axis(inner, batching.size if batching and batching.is_static else None)

    @property
    def cardinality(self) -> int:
        """Unknown, as the input's batches may differ in size, unless empty or infinite."""
        size = self.input.cardinality
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        stream = _UnbatchStream(self.input.open(run))
        return _RebatchStream(stream, self.sizes, drop_remainder=self.drop_remainder)


@final
class _RebatchStream(Stream):
    def __init__(self, stream: Stream, sizes: Sequence[int], *, drop_remainder: bool) -> None:
        self._stream = BufferedStream(stream)
        self._sizes = sizes
        self._turn = 0
        self._drop_remainder = drop_remainder

    def pull(self, limit: int) -> Block | None:
        size = self._sizes[self._turn % len(self._sizes)]
        blocks: list[Block] = []
        missing = size
        while missing:
            block = self._stream.pull(missing)
            if block is None:
                break
            blocks.append(block)
            missing -= len(block)
        if missing and (self._drop_remainder or missing == size):
            return None
        self._turn += 1
        whole = join(blocks)
        return RowBlock(whole.structure, [tuple(whole.columns())])

    def close(self) -> None:
        self._stream.close()


def remove_axis(spec: Any, verb: str) -> Any:
    """Return `spec` with the first axis of every leaf removed; raise for a leaf without axes."""
    return map_leaves(lambda leaf: _remove_axis(leaf, verb), spec)


def _remove_axis(leaf: Any, verb: str) -> TensorSpec:
    if not isinstance(leaf, TensorSpec) or leaf.shape == ():
        raise InvalidArgumentError(
            f"{verb}() takes batches apart along their first axis, but an element has a part"
            f" without axes: {leaf}. Call `batch` first."
        )
    return TensorSpec(None if leaf.shape is None else leaf.shape[1:], leaf.dtype)


def _unstack(batch: Block) -> Block:
    """Return the rows of a block of one batch; raise if its leaves differ in length."""
    leaves = batch.rows()[0]
    sizes: set[int] = {leaf.shape[0] if getattr(leaf, "shape", ()) else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
        raise InvalidArgumentError(
            f"unbatch() needs parts with the same first axis, but an element has shapes {shapes}."
        )
    return ColumnBlock(batch.structure, list(leaves), sizes.pop())


Wrap = Callable[[Node], Any]


@final
@dataclass(frozen=True, eq=False)
class WindowNode(UnaryNode):
    """Windows of `size` elements at distance `stride`, with a dataset for each leaf.

    A window starts `shift` elements after the start of the previous one.
    """

    size: int
    shift: int
    stride: int
    drop_remainder: bool
    wrap: Wrap
    grouping = ("size", "shift", "stride", "drop_remainder")

    @property
    def element_spec(self) -> Any:
        """A `DatasetSpec` for each leaf of the input."""
        return map_leaves(DatasetSpec, self.input.element_spec)

    @property
    def cardinality(self) -> int:
        """The number of windows."""
        count = self.input.cardinality
        if count < 0:
            return count
        if self.drop_remainder:
            return max(0, (count - self.reach) // self.shift + 1)
        return (count + self.shift - 1) // self.shift

    @property
    def reach(self) -> int:
        """The number of input elements from the first to the last of a window, inclusive."""
        return (self.size - 1) * self.stride + 1

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _WindowStream(self, run)


@final
class _WindowStream(Stream):
    """A pass over windows. An input element that raised makes every window it is in raise."""

    def __init__(self, node: WindowNode, run: Run) -> None:
        # Skips the gap between windows if shift > reach.
        self._skipping = SkippingStream(node.input, run, 0)
        self._node = node
        self._specs: list[TypeSpec] | None = None
        if node.input.is_spec_known:
            self._specs = flatten(node.input.element_spec)[1]
        self._waiting: Block | None = None  # elements read but not yet dropped, without failures
        self._errors: dict[int, Exception] = {}  # by position among the waiting elements

    def pull(self, limit: int) -> Block | None:
        node = self._node
        count = self._collect(node.reach)
        if not count or (count < node.reach and node.drop_remainder):
            return None
        block, errors = self._waiting, self._errors
        places = np.arange(0, min(node.reach, count), node.stride)
        self._drop(min(node.shift, count))
        self._skipping.count = max(0, node.shift - count)
        failed = [error for place, error in errors.items() if place in places]
        if failed:
            raise failed[0]
        assert block is not None
        # Failed elements have a position but no row: shift positions by the failures before them.
        before = np.searchsorted(np.array(sorted(errors), np.int64), places)
        return RowBlock(block.structure, [self._datasets(block.take(places - before))])

    def close(self) -> None:
        self._skipping.stream.close()

    def _collect(self, wanted: int) -> int:
        """Read until `wanted` elements are waiting or the input ends; return how many are."""
        if not self._skipping.skip_remaining():
            return 0
        blocks = [] if self._waiting is None else [self._waiting]
        count = sum(len(block) for block in blocks) + len(self._errors)
        while count < wanted:
            try:
                block = self._skipping.stream.pull(wanted - count)
            except Exception as error:
                self._errors[count] = error
                count += 1
                continue
            if block is None:
                break
            blocks.append(block)
            count += len(block)
        self._waiting = join(blocks) if blocks else None
        return count

    def _drop(self, count: int) -> None:
        """Drop the first `count` waiting elements, failed ones included."""
        errors = self._errors
        self._errors = {place - count: e for place, e in errors.items() if place >= count}
        good = count - len(errors) + len(self._errors)
        block = self._waiting
        if block is not None:
            self._waiting = block.slice(good, len(block)) if good < len(block) else None

    def _datasets(self, window: Block) -> Row:
        """Return a dataset for each leaf of `window`."""
        specs = self._specs or [with_unknown_sizes(leaf_spec(leaf)) for leaf in window.rows()[0]]
        if window.is_columnar():
            columns = zip(window.columns(), specs, strict=True)
            nodes: list[Node] = [
                SlicesNode(ArraySource(LEAF, [column]), spec, len(column))
                for column, spec in columns
            ]
        else:
            leaves = zip(*window.rows(), strict=True)
            blocks = [RowBlock(LEAF, [(leaf,) for leaf in part]) for part in leaves]
            nodes = [BlockNode(block, s) for block, s in zip(blocks, specs, strict=True)]
        return tuple(self._node.wrap(node) for node in nodes)


@final
@dataclass(frozen=True, eq=False)
class BlockNode(SourceNode):
    """The elements of one block in memory."""

    block: Block
    spec: Any

    @property
    def element_spec(self) -> Any:
        """The given spec."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """The number of rows in the block."""
        return len(self.block)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return CopyingStream(BlocksStream([self.block] if len(self.block) else []))


@final
class BlocksStream(Stream):
    """A pass over blocks in memory."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._next = 0
        self._left: Block | None = None

    def pull(self, limit: int) -> Block | None:
        """Return the next block, or its next `limit` rows."""
        block = self._left
        if block is None:
            if self._next == len(self._blocks):
                return None
            block = self._blocks[self._next]
            self._next += 1
        self._left = block.slice(limit, len(block)) if len(block) > limit else None
        return block.slice(0, limit) if len(block) > limit else block


@final
class CopyingStream(Stream):
    """The rows of a stream as copies, because the consumer may modify them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def pull(self, limit: int) -> Block | None:
        """Return copies of the next rows."""
        block = self._stream.pull(limit)
        if block is None:
            return None
        return RowBlock(block.structure, [copy_row(row) for row in block.rows()])

    def skip(self, count: int) -> int:
        """Skip elements without copying them."""
        return self._stream.skip(count)


def copy_row(row: Row) -> Row:
    """Return `row` with a copy of every leaf."""
    return tuple(private_copy(leaf) for leaf in row)
