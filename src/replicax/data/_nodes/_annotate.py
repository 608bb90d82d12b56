"""Transformations that leave elements as they are or number them: options, enumerate."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._blocks import Block, ColumnBlock, RowBlock
from replicax.data._node import PassingNode, Stream, UnaryNode
from replicax.data._options import Options
from replicax.data._seeds import Run
from replicax.data._structure import LEAF, tuple_of


@final
@dataclass(frozen=True, eq=False)
class OptionsNode(PassingNode):
    """The input with options attached."""

    options: Options

    def open(self, run: Run) -> Stream:
        """Start a pass of the input."""
        return self.input.open(run)


@final
@dataclass(frozen=True, eq=False)
class EnumerateNode(UnaryNode):
    """Pairs of a number and an element."""

    start: int

    @property
    def element_spec(self) -> Any:
        """A pair."""
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
            self._next += 1  # the element that failed has a number too
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
