"""Nodes that select, repeat or number elements: take, skip, shard, repeat, enumerate and others."""

import logging
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, ColumnBlock, RowBlock
from replicax._src.data.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Node,
    PassingNode,
    SkippingStream,
    Stream,
    UnaryNode,
)
from replicax._src.data.nodes.shuffle import ShuffleNode
from replicax._src.data.nodes.source import SourceStream
from replicax._src.data.options import Options
from replicax._src.data.seeds import Run
from replicax._src.data.structure import LEAF, tuple_of


@final
@dataclass(frozen=True, eq=False)
class OptionsNode(PassingNode):
    """The input with options attached."""

    options: Options

    def open(self, run: Run) -> Stream:
        """Start a pass over the input."""
        return self.input.open(run)


@final
@dataclass(frozen=True, eq=False)
class EnumerateNode(UnaryNode):
    """Pairs of a running index and an element."""

    start: int

    @property
    def element_spec(self) -> Any:
        """A pair of an int64 scalar and the input's spec."""
        return TensorSpec((), np.int64), self.input.element_spec

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _EnumerateStream(self.input.open(run), self.start)


@final
class _EnumerateStream(Stream):
    def __init__(self, stream: Stream, start: int) -> None:
        self._stream = stream
        self._next = start

    def pull(self, limit: int) -> Block | None:
        try:
            block = self._stream.pull(limit)
        except Exception:
            self._next += 1  # an element that raised has an index too
            raise
        if block is None:
            return None
        numbers = np.arange(self._next, self._next + len(block))
        self._next += len(block)
        structure = tuple_of((LEAF, block.structure))
        if isinstance(block, RowBlock):
            pairs = zip(numbers, block.rows(), strict=True)
            return RowBlock(structure, [(number, *row) for number, row in pairs])
        return ColumnBlock(structure, [numbers, *block.columns()], len(block))

    def skip(self, count: int) -> int:
        done = self._stream.skip(count)
        self._next += done
        return done

    def close(self) -> None:
        self._stream.close()


@final
@dataclass(frozen=True, eq=False)
class RepeatNode(PassingNode):
    """The input repeated `count` times; infinitely if negative."""

    count: int

    @property
    def cardinality(self) -> int:
        """The input's cardinality times `count`."""
        size = self.input.cardinality
        if self.count == 0 or size == 0:
            return 0
        if self.count < 0:
            return INFINITE_CARDINALITY
        return size * self.count if size >= 0 else size

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        if self.input.yields_indices and not self.input.inputs:
            stream = self.input.open(run)
            if isinstance(stream, SourceStream):  # repeats by index, without reopening the input
                return stream.repeated(self.count)
        return _RepeatStream(self.input, self.count, run)


@final
class _RepeatStream(Stream):
    def __init__(self, node: Node, count: int, run: Run) -> None:
        self._node = node
        self._count = count
        self._run = run
        self._epoch = 0
        self._stream: Stream | None = None
        self._seen = False  # whether there was an element: in this epoch, or in any (see below)
        # An infinite repeat ends at an empty epoch. TensorFlow fuses shuffle and repeat, and then
        # checks the first epoch only.
        self._ends_at_empty = not (count < 0 and _shuffles(node))

    def pull(self, limit: int) -> Block | None:
        while (stream := self._current()) is not None:
            block = stream.pull(limit)
            if block is not None:
                self._seen = True
                return block
            self._end_epoch()
        return None

    def skip(self, count: int) -> int:
        done = 0
        while done < count and (stream := self._current()) is not None:
            passed = stream.skip(count - done)
            done += passed
            self._seen = self._seen or passed > 0
            if done < count:
                self._end_epoch()
                done += self._skip_epochs(count - done)
        return done

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _current(self) -> Stream | None:
        if self._stream is None and self._epoch != self._count:
            self._stream = self._node.open(self._run.at(self._epoch))
            self._seen = self._seen and not self._ends_at_empty
        return self._stream

    def _end_epoch(self) -> None:
        self.close()
        self._stream = None
        # Stop here if the epoch was empty: an infinite repeat would never return.
        self._epoch = self._epoch + 1 if self._seen or self._count >= 0 else self._count

    def _skip_epochs(self, count: int) -> int:
        """Skip whole epochs if their size is known; return how many elements that were."""
        size = self._node.cardinality
        if size <= 0:
            return 0
        epochs = count // size
        if self._count >= 0:
            epochs = min(epochs, self._count - self._epoch)
        self._epoch += max(epochs, 0)
        return max(epochs, 0) * size


def _shuffles(node: Node) -> bool:
    while isinstance(node, OptionsNode):
        node = node.input
    return isinstance(node, ShuffleNode)


SHARD_HINT = -1

_log = logging.getLogger("replicax")


@final
@dataclass(frozen=True, eq=False)
class TakeNode(PassingNode):
    """The first `count` elements; all of them if negative."""

    count: int

    @property
    def part(self) -> str:
        """The selected range, as text."""
        return f"the first {self.count}"

    @property
    def cardinality(self) -> int:
        """At most `count`."""
        size = self.input.cardinality
        if self.count < 0:
            return size
        if size == INFINITE_CARDINALITY:
            return self.count
        return min(size, self.count) if size >= 0 else (size if self.count else 0)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        stream = self.input.open(run)
        return stream if self.count < 0 else _TakeStream(stream, self.count)


@final
class _TakeStream(Stream):
    def __init__(self, stream: Stream, count: int) -> None:
        self._stream = stream
        self._left = count

    def pull(self, limit: int) -> Block | None:
        if self._left <= 0:
            return None
        block = self._stream.pull(min(limit, self._left))
        if block is not None:
            self._left -= len(block)
        return block

    def skip(self, count: int) -> int:
        done = self._stream.skip(min(count, self._left))
        self._left -= done
        return done

    def close(self) -> None:
        self._stream.close()


@final
@dataclass(frozen=True, eq=False)
class SkipNode(PassingNode):
    """The elements after the first `count`; none if negative."""

    count: int

    @property
    def part(self) -> str:
        """The selected range, as text."""
        return f"all but the first {self.count}"

    @property
    def cardinality(self) -> int:
        """The input's cardinality minus `count`."""
        size = self.input.cardinality
        if self.count < 0:
            return 0
        return max(size - self.count, 0) if size >= 0 else size

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        if self.count < 0:
            return _TakeStream(self.input.open(run), 0)
        return _SkipStream(SkippingStream(self.input, run, self.count))


@final
class _SkipStream(Stream):
    def __init__(self, stream: SkippingStream) -> None:
        self._skipping = stream

    def pull(self, limit: int) -> Block | None:
        return self._skipping.stream.pull(limit) if self._skipping.skip_remaining() else None

    def skip(self, count: int) -> int:
        if not count or not self._skipping.skip_remaining(produces=False):
            return 0
        return self._skipping.stream.skip(count)

    def close(self) -> None:
        self._skipping.stream.close()


@final
@dataclass(frozen=True, eq=False)
class ShardNode(PassingNode):
    """Every `num_shards`-th element, starting at `index`.

    With `num_shards` equal to `SHARD_HINT`, the node returns all elements and only marks where a
    strategy with `AutoShardPolicy.HINT` shards.
    """

    num_shards: int
    index: int
    grouping = ("num_shards",)

    @property
    def part(self) -> str:
        """The shard, as text."""
        return f"shard {self.index} of {self.num_shards}"

    @property
    def cardinality(self) -> int:
        """The number of elements in the shard."""
        size = self.input.cardinality
        if size < 0 or self.num_shards == SHARD_HINT:
            return size
        return (size - self.index + self.num_shards - 1) // self.num_shards if size else 0

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        if self.num_shards in (1, SHARD_HINT):
            return self.input.open(run)
        return _ShardStream(SkippingStream(self.input, run, self.index), self.num_shards)


@final
class _ShardStream(Stream):
    def __init__(self, stream: SkippingStream, num_shards: int) -> None:
        self._skipping = stream  # skips the elements of other shards before the next of this one
        self._num_shards = num_shards

    def pull(self, limit: int) -> Block | None:
        if not self._skipping.skip_remaining():
            return None
        block = self._skipping.stream.pull(1 + (limit - 1) * self._num_shards)
        if block is None:
            return None
        mine = np.arange(0, len(block), self._num_shards)
        self._skipping.count = int(mine[-1]) + self._num_shards - len(block)
        return block if len(block) == 1 else block.take(mine)

    def skip(self, count: int) -> int:
        if not count or not self._skipping.skip_remaining(produces=False):
            return 0
        done = self._skipping.stream.skip(1 + (count - 1) * self._num_shards)
        mine = (done + self._num_shards - 1) // self._num_shards
        self._skipping.count = mine * self._num_shards - done
        return mine

    def close(self) -> None:
        self._skipping.stream.close()


@final
@dataclass(frozen=True, eq=False)
class IgnoreErrorsNode(PassingNode):
    """The elements of the input without those that raise."""

    log_warning: bool

    @property
    def cardinality(self) -> int:
        """Unknown unless infinite: any element may raise."""
        size = self.input.cardinality
        return size if size == INFINITE_CARDINALITY else UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _IgnoreErrorsStream(self.input.open(run), log_warning=self.log_warning)


@final
class _IgnoreErrorsStream(Stream):
    def __init__(self, stream: Stream, *, log_warning: bool) -> None:
        self._stream = stream
        self._log_warning = log_warning

    def pull(self, limit: int) -> Block | None:
        while True:
            try:
                return self._stream.pull(limit)
            except Exception as error:
                if self._log_warning:
                    _log.warning("ignore_errors() leaves out an element: %s", error)

    def close(self) -> None:
        self._stream.close()
