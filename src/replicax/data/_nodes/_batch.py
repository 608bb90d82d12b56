"""Consecutive elements as one element with a leading axis: batch."""

from dataclasses import dataclass
from typing import Any, final

from replicax._tensor_spec import TensorSpec, TypeSpec
from replicax.data._blocks import Block, RowBlock, join
from replicax.data._errors import InvalidArgumentError
from replicax.data._node import Batching, Stream, UnaryNode
from replicax.data._seeds import Run
from replicax.data._structure import map_leaves

_BYTES_AHEAD = 1 << 17  # small batches are cut from one larger block of about this size


@final
@dataclass(frozen=True, eq=False)
class BatchNode(UnaryNode):
    """``size`` elements stacked; the last batch may be smaller."""

    size: int
    drop_remainder: bool

    @property
    def element_spec(self) -> Any:
        """The input's with a leading axis."""
        leading = self.size if self.drop_remainder else None
        return add_axis(self.input.element_spec, leading)

    @property
    def batching(self) -> Batching:
        """Its own."""
        return Batching(self.size, self.drop_remainder)

    @property
    def cardinality(self) -> int:
        """The number of batches."""
        return batches_of(self.input.cardinality, self.size, drop_remainder=self.drop_remainder)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _BatchStream(self.input.open(run), self)


@final
class _BatchStream(Stream):
    def __init__(self, stream: Stream, node: BatchNode) -> None:
        self._stream = stream
        self._size = node.size
        self._drop_remainder = node.drop_remainder
        self._may_read_ahead = not node.input.calls_user_code
        self._batch_bytes = _BYTES_AHEAD
        self._waiting: list[Block] = []
        self._count = 0

    def pull(self, limit: int) -> Block | None:
        if not self._collect(self._wanted(limit)):
            return None
        block = join(self._waiting)
        self._waiting, self._count = [], 0
        full = len(block) - len(block) % self._size or len(block)
        if full < len(block):
            self._waiting, self._count = [block.slice(full, len(block))], len(block) - full
            block = block.slice(0, full)
        return self._cut(block)

    def skip(self, count: int) -> int:
        rows = count * self._size - self._count
        self._waiting, self._count = [], 0
        found = count * self._size - rows + self._stream.skip(rows)
        return batches_of(found, self._size, drop_remainder=self._drop_remainder)

    def close(self) -> None:
        self._stream.close()

    def _wanted(self, limit: int) -> int:
        if not self._may_read_ahead or limit == 1:
            return self._size
        return self._size * max(1, min(limit, _BYTES_AHEAD // self._batch_bytes))

    def _collect(self, wanted: int) -> bool:
        while self._count < self._size:
            block = self._stream.pull(wanted - self._count)
            if block is None:
                return self._count > 0 and not self._drop_remainder
            self._waiting.append(block)
            self._count += len(block)
        return True

    def _cut(self, block: Block) -> Block:
        size, total = self._size, len(block)
        if total <= size or isinstance(block, RowBlock):
            parts = [block.slice(i, i + size) for i in range(0, total, size)]
            rows = [tuple(part.columns()) for part in (parts if total > size else [block])]
        else:
            columns = block.columns()
            starts = range(0, total, size)
            if len(columns) == 1:
                column = columns[0]
                rows = [(column[i : i + size],) for i in starts]
            else:
                rows = [tuple(column[i : i + size] for column in columns) for i in starts]
        self._batch_bytes = max(64, sum(leaf.nbytes for leaf in rows[0]))
        return RowBlock(block.structure, rows)


def add_axis(spec: Any, size: int | None) -> Any:
    """Every leaf of a spec with one more axis in front."""
    return map_leaves(lambda leaf: _add_axis(leaf, size), spec)


def batches_of(count: int, size: int, *, drop_remainder: bool) -> int:
    """How many batches ``count`` elements make; negative counts stay as they are."""
    if count < 0:
        return count
    return count // size if drop_remainder else (count + size - 1) // size


def _add_axis(leaf: TypeSpec, size: int | None) -> TensorSpec:
    if not isinstance(leaf, TensorSpec):
        raise InvalidArgumentError(
            f"Cannot batch nested datasets ({leaf}). Turn each into arrays first, for example with"
            " `flat_map(lambda window: window.batch(n))`."
        )
    return TensorSpec(None if leaf.shape is None else (size, *leaf.shape), leaf.dtype)
