"""Nodes that batch elements of different lengths without padding: ragged_batch, sparse_batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import (
    ArgumentTypeError,
    DataLossError,
    InvalidArgumentError,
    UnimplementedError,
)
from replicax._src.base.types import Shape, TensorSpec
from replicax._src.data.element_blocks import Block, RowBlock
from replicax._src.data.leaves import stack, to_array
from replicax._src.data.node import Stream
from replicax._src.data.nodes.batch import BatchingNode
from replicax._src.data.records.features import RaggedTensor, SparseTensor
from replicax._src.data.seeds import Run
from replicax._src.data.structure import Structure, flatten


@final
@dataclass(frozen=True, eq=False)
class RaggedBatchNode(BatchingNode):
    """Batches with a `RaggedTensor` for each leaf of varying length; other leaves are stacked."""

    row_splits_dtype: np.dtype[Any]

    @property
    def batching(self) -> None:  # type: ignore[override]
        """None: a ragged value cannot be sliced along its first axis."""
        return None

    @property
    def element_spec(self) -> Any:
        """A ragged spec for each leaf of unknown length, and a stacked spec for the others."""
        size = self.size if self.drop_remainder else None
        structure, specs = flatten(self.input.element_spec)
        return structure.unflatten(
            [
                self._ragged(spec, size) if is_ragged else _stacked(spec, size)
                for spec, is_ragged in zip(specs, self.are_ragged(), strict=True)
            ]
        )

    def are_ragged(self) -> list[bool]:
        """Return for each leaf whether its length may vary."""
        specs = flatten(self.input.element_spec)[1]
        return [self._is_ragged(spec) for spec in specs]

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _RaggedStream(self, run)

    def _is_ragged(self, spec: Any) -> bool:
        """Whether the first axis of `spec` may vary in size; raise if other axes may."""
        if not isinstance(spec, TensorSpec):
            raise ArgumentTypeError(
                f"ragged_batch() needs elements of arrays, but a part is {spec}. Turn nested"
                " datasets into arrays first, with `flat_map(lambda window: window.batch(n))`."
            )
        if spec.shape is None or None in spec.shape[1:]:
            raise UnimplementedError(
                f"ragged_batch() makes rows of different lengths, and a part of the spec {spec} has"
                " further axes without a fixed size. Write `padded_batch(n)`, or flatten the part"
                " in a `map` and keep its shape beside it."
            )
        # A size inferred from the first element may differ in others.
        return bool(spec.shape) and (spec.shape[0] is None or not self.input.is_spec_sure)

    def _ragged(self, spec: Any, size: int | None) -> RaggedTensor:
        splits = TensorSpec((None if size is None else size + 1,), self.row_splits_dtype)
        values: Any = TensorSpec((None, *spec.shape[1:]), spec.dtype)
        return RaggedTensor(values, splits)  # type: ignore[arg-type]


def _stacked(spec: Any, size: int | None) -> TensorSpec:
    return TensorSpec((size, *spec.shape), spec.dtype)


@final
class _RaggedStream(Stream):
    def __init__(self, node: RaggedBatchNode, run: Run) -> None:
        self._node = node
        self._are_ragged = node.are_ragged()
        self._structure: Structure | None = None
        self._stream = node.input.open(run)

    def pull(self, limit: int) -> Block | None:
        whole = self._node.gather(self._stream, self._node.size)
        if whole is None:
            return None
        columns = zip(*whole.rows(), strict=True)
        parts: list[Any] = [
            self._ragged(leaves) if is_ragged else stack(leaves)
            for leaves, is_ragged in zip(columns, self._are_ragged, strict=True)
        ]
        if self._structure is None:
            self._structure = flatten(whole.structure.unflatten(parts))[0]
        leaves = self._structure.leaves_of(whole.structure.unflatten(parts))
        return RowBlock(self._structure, [tuple(leaves)])

    def close(self) -> None:
        self._stream.close()

    def _ragged(self, leaves: Sequence[Any]) -> RaggedTensor:
        rows = [to_array(leaf) for leaf in leaves]
        if len({(row.ndim, row.shape[1:], row.dtype) for row in rows}) != 1:
            raise InvalidArgumentError(
                f"ragged_batch() makes rows of different lengths, but elements differ in more than"
                f" their first axis: shapes {[row.shape for row in rows]!r:.100}. Write"
                " `padded_batch(n)`."
            )
        ends = np.cumsum([0, *map(len, rows)])
        return RaggedTensor(np.concatenate(rows), ends.astype(self._node.row_splits_dtype))


@final
@dataclass(frozen=True, eq=False)
class SparseBatchNode(BatchingNode):
    """Batches as one `SparseTensor` that stores every value of the elements."""

    row_shape: Shape

    @property
    def batching(self) -> None:  # type: ignore[override]
        """None: a sparse value cannot be sliced along its first axis."""
        return None

    def check(self) -> None:
        """Raise unless an element is one array with the rank of `row_shape`."""
        structure, specs = flatten(self.input.element_spec)
        if structure.num_leaves != 1 or not isinstance(specs[0], TensorSpec):
            raise ArgumentTypeError(
                f"sparse_batch() needs elements of one array, but these are"
                f" {self.input.element_spec}. Keep one part with `map`."
            )
        shape = specs[0].shape
        if shape is not None and len(shape) != len(self.row_shape):
            raise InvalidArgumentError(
                f"sparse_batch(row_shape={list(self.row_shape)}) has {len(self.row_shape)} axes,"
                f" but elements have the shape {shape}. Give one size, or None, for each axis."
            )

    @property
    def element_spec(self) -> Any:
        """A `SparseTensor` of specs."""
        axes = len(self.row_shape) + 1
        structure, (spec,) = flatten(self.input.element_spec)
        indices: Any = TensorSpec((None, axes), np.int64)
        values: Any = TensorSpec((None,), spec.dtype)
        dense: Any = TensorSpec((axes,), np.int64)
        return structure.unflatten([SparseTensor(indices, values, dense)])

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _SparseStream(self, run)


@final
class _SparseStream(Stream):
    def __init__(self, node: SparseBatchNode, run: Run) -> None:
        self._node = node
        self._structure: Structure | None = None
        self._stream = node.input.open(run)

    def pull(self, limit: int) -> Block | None:
        whole = self._node.gather(self._stream, self._node.size)
        if whole is None:
            return None
        if whole.structure.num_leaves != 1:
            self._node.check()
        element = whole.structure.unflatten([self._sparse([row[0] for row in whole.rows()])])
        if self._structure is None:
            self._structure = flatten(element)[0]
        return RowBlock(self._structure, [tuple(self._structure.leaves_of(element))])

    def close(self) -> None:
        self._stream.close()

    def _sparse(self, leaves: Sequence[Any]) -> SparseTensor:
        """Return the batch of `leaves`; raise if one does not fit in `row_shape`."""
        rows = [to_array(leaf) for leaf in leaves]
        wanted = self._node.row_shape
        for row in rows:
            if row.ndim != len(wanted):
                raise InvalidArgumentError(
                    f"sparse_batch(row_shape={list(wanted)}) got an element of the shape"
                    f" {row.shape}, which has another number of axes."
                )
            pairs = zip(row.shape, wanted, strict=True)
            if any(most is not None and size > most for size, most in pairs):
                raise DataLossError(
                    f"sparse_batch(row_shape={list(wanted)}) got an element of the shape"
                    f" {row.shape}, which is larger. Cut it in a `map`, or use None for the longest"
                    " of each batch."
                )
        longest = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
        shape = [n if most is None else most for n, most in zip(longest, wanted, strict=True)]
        places = [
            np.insert(np.argwhere(np.ones(row.shape, bool)), 0, number, axis=1)
            for number, row in enumerate(rows)
        ]
        return SparseTensor(
            np.concatenate(places).astype(np.int64),
            np.concatenate([row.reshape(-1) for row in rows]),
            np.array([len(rows), *shape], np.int64),
        )
