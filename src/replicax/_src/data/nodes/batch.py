"""Nodes that stack consecutive elements along a new leading axis: batch and padded_batch."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax._src.base.types import Shape, TensorSpec, TypeSpec
from replicax._src.data.element_blocks import Block, NewArray, Row, RowBlock, join
from replicax._src.data.leaves import Array, to_array
from replicax._src.data.node import Batching, Node, PassingNode, Stream, UnaryNode, discard_elements
from replicax._src.data.nodes.map import MapNode
from replicax._src.data.seeds import Run
from replicax._src.data.structure import Structure, flatten, map_leaves, parts_like, require_dense

_BATCHES_AHEAD = 16  # batches whose indices are read at once from a random-access source
_BYTES_AHEAD = 1 << 17  # small batches are sliced from one larger block of about this size


@dataclass(frozen=True, eq=False)
class BatchingNode(UnaryNode):
    """A node that combines `size` elements into one; the last batch may be smaller."""

    size: int
    drop_remainder: bool
    grouping = ("size", "drop_remainder")

    @property
    def batching(self) -> Batching:
        """The batch size, static if the remainder is dropped."""
        return Batching(self.size, self.drop_remainder)

    @property
    def skips_failed_batch(self) -> bool:
        """Whether an element that raises also discards the elements after it in its batch."""
        return False

    @property
    def cardinality(self) -> int:
        """The number of batches."""
        return self.batches_of(self.input.cardinality)

    def batches_of(self, count: int) -> int:
        """Return the number of batches of `count` elements; negative constants are unchanged."""
        if count < 0:
            return count
        return count // self.size if self.drop_remainder else (count + self.size - 1) // self.size

    def gather(self, stream: Stream, most: int, left: Block | None = None) -> Block | None:
        """Return `left` and further rows of `stream`, at most `most`, for at least one batch.

        Return fewer rows at the end of the input, or None without rows for a batch. If an element
        raises, the rows gathered for its batch are lost.
        """
        blocks = [] if left is None else [left]
        count = 0 if left is None else len(left)
        while count < self.size:
            try:
                block = stream.pull(most - count)
            except Exception:
                if self.skips_failed_batch:
                    discard_elements(stream, self.size - count - 1)
                raise
            if block is None:
                break
            blocks.append(block)
            count += len(block)
        if not count or (count < self.size and self.drop_remainder):
            return None
        require_dense(blocks[0].structure, "batch")
        return join(blocks)


@final
@dataclass(frozen=True, eq=False)
class BatchNode(BatchingNode):
    """Elements of equal shape, stacked."""

    @property
    def skips_failed_batch(self) -> bool:
        """True after `map`, as in TensorFlow, which fuses the two."""
        return isinstance(self.input, MapNode)

    @property
    def element_spec(self) -> Any:
        """The input's spec with a leading axis."""
        leading = self.size if self.drop_remainder else None
        return add_axis(self.input.element_spec, leading)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        # Only the outermost batch goes to the consumer's memory; an inner one is copied again.
        return _BatchStream(self.input.open(replace(run, new=None)), self, run.new)


@final
class _BatchStream(Stream):
    def __init__(self, stream: Stream, node: BatchNode, new: NewArray | None) -> None:
        self._stream = stream
        self._new = new
        self._size = node.size
        self._node = node
        # Indices are cheap to read ahead, and larger pulls mean fewer calls through the pipeline.
        self._rows_ahead = node.size * (_BATCHES_AHEAD if node.input.yields_indices else 1)
        self._batch_bytes = 0
        self._block: Block | None = None
        self._used = 0  # rows of the block that have been returned in batches

    def pull(self, limit: int) -> Block | None:
        size = self._size
        block = self._block
        if block is None or len(block) - self._used < size:
            block = self._refill()
        if block is None:
            return None
        start = self._used
        batches = 1 if limit == 1 else self._most_batches(limit)
        self._used = stop = min(len(block), start + batches * size)
        if stop - start > size:
            stop -= (stop - start) % size
            self._used = stop
        try:
            return self._cut(block, start, stop)
        except InvalidArgumentError:  # shapes differ in some batch; return one at a time
            self._used = min(start + size, stop)
            return self._cut(block, start, self._used)

    def skip(self, count: int) -> int:
        waiting = 0 if self._block is None else len(self._block) - self._used
        here = min(waiting, count * self._size)
        self._used += here
        found = here
        if here == waiting:
            self._block, self._used = None, 0
            found += self._stream.skip(count * self._size - here)
        return self._node.batches_of(found)

    def close(self) -> None:
        self._stream.close()

    def _most_batches(self, limit: int) -> int:
        """Return how many batches to slice from one block: about `_BYTES_AHEAD`."""
        if not self._batch_bytes:
            return 1
        return max(1, min(limit, _BYTES_AHEAD // self._batch_bytes))

    def _refill(self) -> Block | None:
        block, used = self._block, self._used
        left = block.slice(used, len(block)) if block is not None and used < len(block) else None
        self._block, self._used = None, 0
        self._block = self._node.gather(self._stream, self._rows_ahead, left)
        return self._block

    def _cut(self, block: Block, start: int, stop: int) -> Block:
        """Return the rows `start` to `stop` of `block` as batches."""
        size = self._size
        part = block if stop - start == len(block) else block.slice(start, stop)
        if stop - start <= size:  # a single batch is written to the consumer's memory
            rows: list[Row] = [tuple(part.columns_in(self._new))]
        elif isinstance(part, RowBlock):
            starts = range(0, stop - start, size)
            rows = [tuple(part.slice(i, i + size).columns()) for i in starts]
        else:
            columns = part.columns()
            starts = range(0, stop - start, size)
            if len(columns) == 1:
                column = columns[0]
                rows = [(column[i : i + size],) for i in starts]
            else:
                rows = [tuple(column[i : i + size] for column in columns) for i in starts]
        if not self._batch_bytes:
            self._batch_bytes = max(64, sum(leaf.nbytes for leaf in rows[0]))
        return RowBlock(block.structure, rows)


def ends_in_batches(node: Node) -> bool:
    """Whether elements are batches that no user function has received."""
    while isinstance(node, PassingNode):
        node = node.input
    return isinstance(node, BatchNode)


def add_axis(spec: Any, size: int | None) -> Any:
    """Return `spec` with a leading axis of `size` added to every leaf."""
    return map_leaves(lambda leaf: _add_axis(leaf, size), spec)


def _add_axis(leaf: TypeSpec, size: int | None) -> TensorSpec:
    if not isinstance(leaf, TensorSpec):
        raise InvalidArgumentError(
            f"Cannot batch nested datasets ({leaf}). Turn each into arrays first, for example with"
            " `flat_map(lambda window: window.batch(n))`."
        )
    return TensorSpec(None if leaf.shape is None else (size, *leaf.shape), leaf.dtype)


@final
@dataclass(frozen=True, eq=False)
class PaddedBatchNode(BatchingNode):
    """Stacked elements, each padded at the end of every axis.

    `shapes` has the structure of elements, or is None to pad to the longest element of a batch;
    `values` likewise, or None for zeros and empty strings.
    """

    shapes: Any
    values: Any

    @property
    def element_spec(self) -> Any:
        """The specs of padded elements with a leading axis."""
        leading = self.size if self.drop_remainder else None
        structure, specs = flatten(self.input.element_spec)
        if self.shapes is not None:
            shapes = padded_shapes(structure, self.shapes)
            specs = [TensorSpec(s, spec.dtype) for s, spec in zip(shapes, specs, strict=True)]
        return add_axis(structure.unflatten(specs), leading)

    def check(self) -> None:
        """Raise if shapes or values do not fit the spec of elements."""
        structure, specs = flatten(self.input.element_spec)
        values = _padding_values(structure, self.values)
        shapes = [spec.shape for spec in flatten(self.element_spec)[1]]
        for spec, value, shape in zip(specs, values, shapes, strict=True):
            _padding_value(value, spec.dtype)
            if spec.shape is not None and shape is not None:
                _require_room(spec.shape, shape[1:], self.shapes)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _PaddedBatchStream(self.input.open(run), self)


@final
class _PaddedBatchStream(Stream):
    def __init__(self, stream: Stream, node: PaddedBatchNode) -> None:
        self._stream = stream
        self._node = node

    def pull(self, limit: int) -> Block | None:
        whole = self._node.gather(self._stream, self._node.size)
        if whole is None:
            return None
        return RowBlock(whole.structure, [self._pad(whole.structure, whole.rows())])

    def close(self) -> None:
        self._stream.close()

    def _pad(self, structure: Structure, rows: Sequence[Row]) -> Row:
        node = self._node
        columns = list(zip(*rows, strict=True))
        shapes: list[Shape | None] = [None] * len(columns)
        if node.shapes is not None:
            shapes = list(padded_shapes(structure, node.shapes))
        values = _padding_values(structure, node.values)
        return tuple(
            _pad_leaf(leaves, shape, value)
            for leaves, shape, value in zip(columns, shapes, values, strict=True)
        )


def _require_room(given: Shape, padded: Shape, wanted: Any) -> None:
    """Raise if elements of shape `given` cannot be padded to `padded`."""
    if len(given) != len(padded):
        raise InvalidArgumentError(
            f"padded_shapes={wanted!r} has {len(padded)} axes for a part that has {len(given)}:"
            f" elements have the shape {given}. Give one size, or None, for each axis."
        )
    pairs = zip(given, padded, strict=True)
    if any(size is not None and most is not None and size > most for size, most in pairs):
        raise InvalidArgumentError(
            f"padded_shapes={wanted!r} is smaller than elements of the shape {given}: padding only"
            " adds. Cut them in a `map`, or use None for the longest of each batch."
        )


def padded_shapes(structure: Structure, shapes: Any) -> list[Shape]:
    """Return one shape for each leaf of `structure`; a size of -1 or None becomes None."""
    if structure.kind == "leaf":
        return [_to_shape(shapes)]
    try:
        parts = parts_like(structure, shapes)
    except StructureError as error:
        raise StructureError(
            f"padded_shapes={shapes!r} is not nested like the elements, which are {structure}."
            " Give one shape for each part, for example `([None], [])` for pairs."
        ) from error
    return [_to_shape(part) for part in parts]


def _to_shape(shape: Any) -> Shape:
    """Return a user's shape of a component, with None for -1."""
    sizes = shape.shape if isinstance(shape, TensorSpec) else shape
    try:
        known = [None if size is None else operator.index(size) for size in sizes]
    except TypeError:
        raise StructureError(
            f"padded_shapes has {shape!r:.100} where the shape of a part belongs. A shape is a list"
            " of ints, with None for the longest of each batch, such as [None, 3]."
        ) from None
    if any(size is not None and size < -1 for size in known):
        raise InvalidArgumentError(
            f"padded_shapes has {shape!r:.100}: a size is at least 0, or None (or -1) for the"
            " longest of each batch."
        )
    return tuple(None if size is None or size < 0 else size for size in known)


def _padding_values(structure: Structure, values: Any) -> list[Any]:
    """Return one padding value for each leaf; a single value applies to all."""
    if values is None or not isinstance(values, (tuple, Mapping)):
        return [values] * structure.num_leaves
    try:
        return parts_like(structure, values)
    except StructureError as error:
        raise StructureError(
            f"padding_values={values!r} is not nested like the elements, which are {structure}"
            f" ({error}). Give one value for each part, None for zero or an empty string."
        ) from error


def _pad_leaf(leaves: Sequence[Any], shape: Shape | None, value: Any) -> Array:
    """Stack `leaves`, padded with `value` to `shape` or to the longest one."""
    arrays = [to_array(leaf) for leaf in leaves]
    ranks = {array.ndim for array in arrays} | (set() if shape is None else {len(shape)})
    if len(ranks) > 1:
        raise InvalidArgumentError(
            f"Cannot pad elements of different rank in one batch: shapes"
            f" {[array.shape for array in arrays]}, padded_shapes {shape}."
        )
    longest = tuple(max(sizes) for sizes in zip(*(a.shape for a in arrays), strict=True))
    target = (
        longest
        if shape is None
        else tuple(
            most if size is None else size for size, most in zip(shape, longest, strict=True)
        )
    )
    if any(most > size for most, size in zip(longest, target, strict=True)):
        raise InvalidArgumentError(
            f"An element of shape {longest} does not fit into padded_shapes {shape}:"
            " padding only adds. Cut it in a `map`, or use None for the longest of each batch."
        )
    dtype = arrays[0].dtype
    result = np.full((len(arrays), *target), _padding_value(value, dtype), dtype)
    for place, array in enumerate(arrays):
        inside: tuple[Any, ...] = (place, *(slice(size) for size in array.shape))
        result[inside] = array
    return result


def _padding_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the padding value in `dtype`; raise if the conversion would change it."""
    if value is None:
        return b"" if dtype.kind == "O" else 0
    array = to_array(value)
    if array.ndim or (array.dtype.kind == "O") != (dtype.kind == "O"):
        fits = False
    elif dtype.kind == "O" or np.can_cast(array.dtype, dtype, "same_kind"):
        fits = True
    else:
        fits = bool((array.astype(dtype).astype(array.dtype) == array).all())
    if not fits:
        raise StructureError(
            f"padding_values has {value!r} for a part of dtype {dtype}, which cannot hold it. Give"
            " a value of that dtype, or None for zero or an empty string."
        )
    return array[()] if dtype.kind == "O" else array.astype(dtype)[()]
