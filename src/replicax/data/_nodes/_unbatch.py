"""Batches taken apart (unbatch), or cut again to other sizes (rebatch)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._tensor_spec import TensorSpec
from replicax.data._blocks import Block, ColumnBlock, RowBlock, join
from replicax.data._errors import InvalidArgumentError
from replicax.data._node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batching,
    Buffered,
    Stream,
    UnaryNode,
)
from replicax.data._nodes._batch import add_axis
from replicax.data._seeds import Run
from replicax.data._structure import map_leaves


@final
@dataclass(frozen=True, eq=False)
class UnbatchNode(UnaryNode):
    """Each element is cut along its first axis."""

    @property
    def element_spec(self) -> Any:
        """The input's without its first axis."""
        return remove_axis(self.input.element_spec, "unbatch")

    @property
    def cardinality(self) -> int:
        """Known only if all batches have the same size."""
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
            self._block = _take_apart(batch)
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
    """The elements inside the batches, in batches of these sizes in turn."""

    sizes: tuple[int, ...]
    drop_remainder: bool

    @property
    def batching(self) -> Batching | None:
        """Known if there is one size."""
        is_one = len(set(self.sizes)) == 1
        return Batching(self.sizes[0], self.drop_remainder) if is_one else None

    @property
    def element_spec(self) -> Any:
        """Static only if every batch has the same size."""
        inner = remove_axis(self.input.element_spec, "rebatch")
        is_static = self.drop_remainder and len(set(self.sizes)) == 1
        return add_axis(inner, self.sizes[0] if is_static else None)

    @property
    def cardinality(self) -> int:
        """Not known: the input's batches may differ in size."""
        size = self.input.cardinality
        return size if size in (0, INFINITE_CARDINALITY) else UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        stream = _UnbatchStream(self.input.open(run))
        return _RebatchStream(stream, self.sizes, drop_remainder=self.drop_remainder)


@final
class _RebatchStream(Stream):
    def __init__(self, stream: Stream, sizes: Sequence[int], *, drop_remainder: bool) -> None:
        self._stream = Buffered(stream)
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
    """Every leaf of a spec without its first axis."""
    return map_leaves(lambda leaf: _remove_axis(leaf, verb), spec)


def _remove_axis(leaf: Any, verb: str) -> TensorSpec:
    if not isinstance(leaf, TensorSpec) or leaf.shape == ():
        raise InvalidArgumentError(
            f"{verb}() takes batches apart along their first axis, but an element has a part"
            f" without axes: {leaf}. Call `batch` first."
        )
    return TensorSpec(None if leaf.shape is None else leaf.shape[1:], leaf.dtype)


def _take_apart(batch: Block) -> Block:
    leaves = batch.rows()[0]
    sizes: set[int] = {leaf.shape[0] if getattr(leaf, "shape", ()) else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
        raise InvalidArgumentError(
            f"unbatch() needs parts with the same first axis, but an element has shapes {shapes}."
        )
    return ColumnBlock(batch.structure, list(leaves), sizes.pop())
