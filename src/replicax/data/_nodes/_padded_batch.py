"""Batches of elements with different lengths, padded to a common shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._tensor_spec import Shape, TensorSpec
from replicax.data._blocks import Block, Row, RowBlock
from replicax.data._errors import InvalidArgumentError, StructureError
from replicax.data._leaves import Array, to_array
from replicax.data._node import Stream
from replicax.data._nodes._batch import BatchingNode, add_axis
from replicax.data._seeds import Run
from replicax.data._structure import Structure, flatten, parts_like


@final
@dataclass(frozen=True, eq=False)
class PaddedBatchNode(BatchingNode):
    """Elements, each padded at the end of every axis.

    ``shapes`` and ``values`` are nested like elements, or None for the longest of each batch and
    for zeros.
    """

    shapes: Any
    values: Any

    @property
    def element_spec(self) -> Any:
        """The padded shapes with a leading axis."""
        leading = self.size if self.drop_remainder else None
        structure, specs = flatten(self.input.element_spec)
        if self.shapes is not None:
            shapes = padded_shapes(structure, self.shapes)
            specs = [TensorSpec(s, spec.dtype) for s, spec in zip(shapes, specs, strict=True)]
        return add_axis(structure.unflatten(specs), leading)

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


def padded_shapes(structure: Structure, shapes: Any) -> list[Shape]:
    """The shape for each leaf; lists and tuples of numbers are shapes, -1 and None are open."""
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
    sizes = shape.shape if isinstance(shape, TensorSpec) else shape
    return tuple(None if size is None or size < 0 else int(size) for size in sizes)


def _padding_values(structure: Structure, values: Any) -> list[Any]:
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
    result = np.full((len(arrays), *target), _fill(value, dtype), dtype)
    for place, array in enumerate(arrays):
        inside: tuple[Any, ...] = (place, *(slice(size) for size in array.shape))
        result[inside] = array
    return result


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """What to fill with, in the dtype of the part; it must be that value there too."""
    if value is None:
        return b"" if dtype.kind == "O" else 0
    given = to_array(value)
    if given.ndim or (given.dtype.kind == "O") != (dtype.kind == "O"):
        fits = False
    elif dtype.kind == "O" or np.can_cast(given.dtype, dtype, "same_kind"):
        fits = True
    else:
        fits = bool((given.astype(dtype).astype(given.dtype) == given).all())
    if not fits:
        raise StructureError(
            f"padding_values has {value!r} for a part of dtype {dtype}, which cannot hold it. Give"
            " a value of that dtype, or None for zero or an empty string."
        )
    return given[()] if dtype.kind == "O" else given.astype(dtype)[()]
