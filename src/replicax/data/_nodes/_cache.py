"""Elements kept after the first complete pass: in memory, or in a file."""

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self, final

from replicax.data._blocks import Block, ColumnBlock, PlaceBlock, RowBlock, join
from replicax.data._cache_file import read_blocks, writing
from replicax.data._node import Node, PassingNode, Stream
from replicax.data._nodes._source import ArraySource, SourceStream
from replicax.data._nodes._window import BlocksStream, Copies, copied
from replicax.data._seeds import Run


class Memory:
    """What a cache in memory holds, shared by all passes."""

    def __init__(self) -> None:
        self.blocks: list[Block] | None = None
        self.lock = threading.Lock()

    def fill(self, blocks: list[Block]) -> None:
        """Keep a complete pass, as one source of arrays if elements are alike."""
        whole = join(blocks) if blocks else None
        if isinstance(whole, ColumnBlock):
            source = ArraySource(whole.structure, whole.columns())
            whole = PlaceBlock(source, 0, len(whole))
        with self.lock:
            if self.blocks is None:
                self.blocks = [] if whole is None else [whole]


@final
@dataclass(frozen=True, eq=False)
class CacheNode(PassingNode):
    """The input once, then what was kept.

    The input is always read in its first order, whichever pass fills the cache: so a restored
    iterator finds the same elements in a cache that a new process has to fill again.
    """

    filename: str
    memory: Memory = field(default_factory=Memory)

    def with_inputs(self, *inputs: Node) -> Self:
        """A cache of another input, which holds nothing yet."""
        (node,) = inputs
        return replace(self, input=node, memory=Memory())

    @property
    def gives_places(self) -> bool:
        """Only once it is filled, and not always."""
        return False

    @property
    def calls_user_code(self) -> bool:
        """Not once it is filled."""
        return not self._is_filled() and self.input.calls_user_code

    @property
    def peeked(self) -> Node:
        """The cache if it is filled, else the input."""
        return self if self._is_filled() else self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass over the cache, or over the input."""
        if self.filename:
            if os.path.exists(self.filename):
                return FileStream(self.filename, self.input)
            return _Recording(self.input.open(run.fixed()), _ToFile(self.filename))
        blocks = self.memory.blocks
        if blocks is None:
            return _Recording(self.input.open(run.fixed()), _ToMemory(self.memory))
        if len(blocks) == 1 and isinstance(blocks[0], PlaceBlock):
            return SourceStream(blocks[0].source, len(blocks[0]))
        return Copies(BlocksStream(blocks))

    def _is_filled(self) -> bool:
        return os.path.exists(self.filename) if self.filename else self.memory.blocks is not None


class _ToMemory:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: list[Block] = []

    def add(self, block: Block) -> Block:
        if isinstance(block, RowBlock):
            # The consumer may write into what it was given; rows kept must be copies.
            self._blocks.append(RowBlock(block.structure, [copied(row) for row in block.rows()]))
            return block
        columns = block.columns()
        copies = [column.copy() for column in columns]
        self._blocks.append(ColumnBlock(block.structure, copies, len(block)))
        return ColumnBlock(block.structure, columns, len(block))

    def commit(self) -> None:
        self._memory.fill(self._blocks)

    def abandon(self) -> None:
        self._blocks = []


class _ToFile:
    def __init__(self, path: str) -> None:
        self._file = writing(path)

    def add(self, block: Block) -> Block:
        if not isinstance(block, RowBlock):
            block = ColumnBlock(block.structure, block.columns(), len(block))
        self._file.add(block)
        return block

    def commit(self) -> None:
        self._file.commit()

    def abandon(self) -> None:
        self._file.abandon()


@final
class _Recording(Stream):
    """The input, kept on the side; only a complete pass counts."""

    def __init__(self, stream: Stream, target: _ToMemory | _ToFile) -> None:
        self._stream = stream
        self._target = target
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        if self._is_done:
            return None
        block = self._stream.pull(limit)
        if block is None:
            self._is_done = True
            self._target.commit()
            return None
        return self._target.add(block)

    def close(self) -> None:
        if not self._is_done:
            self._target.abandon()
        self._stream.close()


@final
class FileStream(Stream):
    def __init__(self, path: str, node: Node) -> None:
        self._path = path
        self._node = node
        self._blocks: Iterator[Block] | None = None
        self._left: Block | None = None

    def pull(self, limit: int) -> Block | None:
        if self._blocks is None:
            self._blocks = read_blocks(self._path, self._node)
        block = self._left if self._left is not None else next(self._blocks, None)
        if block is None:
            return None
        self._left = block.slice(limit, len(block)) if len(block) > limit else None
        return block.slice(0, limit) if len(block) > limit else block
