"""Windows: small datasets of consecutive elements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._tensor_spec import TypeSpec
from replicax.data._blocks import Block, Row, RowBlock, join
from replicax.data._dataset_spec import DatasetSpec
from replicax.data._first import opened
from replicax.data._leaves import leaf_spec, own
from replicax.data._node import Node, Passed, SourceNode, Stream, UnaryNode
from replicax.data._nodes._source import ArraySource, SlicesNode
from replicax.data._seeds import Run
from replicax.data._structure import LEAF, flatten, map_leaves

Wrap = Callable[[Node], Any]


@final
@dataclass(frozen=True, eq=False)
class WindowNode(UnaryNode):
    """Each leaf of a window is a dataset of ``size`` elements, ``stride`` apart.

    Windows start ``shift`` elements after each other.
    """

    size: int
    shift: int
    stride: int
    drop_remainder: bool
    wrap: Wrap

    @property
    def element_spec(self) -> Any:
        """Nested datasets."""
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
        """Elements from the first of a window to its last."""
        return (self.size - 1) * self.stride + 1

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _WindowStream(self, run)


@final
class _WindowStream(Stream):
    """Elements wait for their windows; one that failed waits too, and fails those it is in."""

    def __init__(self, node: WindowNode, run: Run) -> None:
        self._passed = Passed(node.input, run, 0)  # elements between windows that are apart
        self._node = node
        self._specs: list[TypeSpec] | None = None
        if node.input.is_spec_known:
            self._specs = flatten(node.input.element_spec)[1]
        self._waiting: Block | None = None  # elements without those that failed
        self._errors: dict[int, Exception] = {}  # by how many elements wait before

    def pull(self, limit: int) -> Block | None:
        node = self._node
        count = self._collect(node.reach)
        if not count or (count < node.reach and node.drop_remainder):
            return None
        block, errors = self._waiting, self._errors
        places = np.arange(0, min(node.reach, count), node.stride)
        self._drop(min(node.shift, count))
        self._passed.count = max(0, node.shift - count)
        failed = [error for place, error in errors.items() if place in places]
        if failed:
            raise failed[0]
        assert block is not None
        before = np.searchsorted(np.array(sorted(errors), np.int64), places)
        return RowBlock(block.structure, [self._datasets(block.take(places - before))])

    def close(self) -> None:
        self._passed.stream.close()

    def _collect(self, wanted: int) -> int:
        """Have ``wanted`` elements waiting, or as many as there are; how many."""
        if not self._passed.is_past():
            return 0
        blocks = [] if self._waiting is None else [self._waiting]
        count = sum(len(block) for block in blocks) + len(self._errors)
        while count < wanted:
            try:
                block = self._passed.stream.pull(wanted - count)
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
        """Forget the first elements that wait."""
        errors = self._errors
        self._errors = {place - count: e for place, e in errors.items() if place >= count}
        good = count - len(errors) + len(self._errors)
        block = self._waiting
        if block is not None:
            self._waiting = block.slice(good, len(block)) if good < len(block) else None

    def _datasets(self, window: Block) -> Row:
        specs = self._specs or [opened(leaf_spec(leaf)) for leaf in window.rows()[0]]
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
    """Elements that exist already, of any form."""

    block: Block
    spec: Any

    @property
    def element_spec(self) -> Any:
        """What is known of them."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """How many there are."""
        return len(self.block)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return Copies(BlocksStream([self.block] if len(self.block) else []))


@final
class BlocksStream(Stream):
    """Blocks that exist already."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = blocks
        self._next = 0
        self._left: Block | None = None

    def pull(self, limit: int) -> Block | None:
        """The next block, cut to size."""
        block = self._left
        if block is None:
            if self._next == len(self._blocks):
                return None
            block = self._blocks[self._next]
            self._next += 1
        self._left = block.slice(limit, len(block)) if len(block) > limit else None
        return block.slice(0, limit) if len(block) > limit else block


@final
class Copies(Stream):
    """What was kept, in copies: the consumer may write into what it is given."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def pull(self, limit: int) -> Block | None:
        """The next elements."""
        block = self._stream.pull(limit)
        if block is None:
            return None
        return RowBlock(block.structure, [copied(row) for row in block.rows()])

    def skip(self, count: int) -> int:
        """Pass over elements."""
        return self._stream.skip(count)


def copied(row: Row) -> Row:
    """An element in memory of its own."""
    return tuple(own(leaf) for leaf in row)
