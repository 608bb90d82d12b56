"""Feature descriptions for parsing an `Example`, and the sparse and ragged results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.leaves import Array


class FixedLenFeature(NamedTuple):
    """A feature with the same number of values in every example.

    Attributes:
        shape: The shape of the values.
        dtype: float32, int64, or bytes (also ``str`` and ``object``).
        default_value: The value of a missing feature, which raises if None.

    Example:
        >>> data = rx.io.serialize_example({"x": [1, 2]})
        >>> rx.io.parse_single_example(data, {"x": rx.io.FixedLenFeature([2], np.int64)})
        {'x': array([1, 2])}
    """

    shape: Sequence[int]
    dtype: DTypeLike
    default_value: Any = None


class FixedLenSequenceFeature(NamedTuple):
    """A feature with any number of rows of one shape; batches are padded to the longest.

    Attributes:
        shape: The shape of a row.
        dtype: float32, int64, or bytes.
        allow_missing: Must be True: a missing feature has no rows.
        default_value: The padding value; zero or an empty string if None.

    Example:
        >>> feature = rx.io.FixedLenSequenceFeature([], np.int64, allow_missing=True)
        >>> records = [rx.io.serialize_example({"x": [1, 2]}), rx.io.serialize_example({"x": [3]})]
        >>> rx.io.parse_example(records, {"x": feature})["x"]
        array([[1, 2],
               [3, 0]])
    """

    shape: Sequence[int]
    dtype: DTypeLike
    allow_missing: bool = False
    default_value: Any = None


class VarLenFeature(NamedTuple):
    """A feature with any number of values; the result is a `SparseTensor`.

    Attributes:
        dtype: float32, int64, or bytes.

    Example:
        >>> data = rx.io.serialize_example({"x": [1, 2]})
        >>> rx.io.parse_single_example(data, {"x": rx.io.VarLenFeature(np.int64)})["x"].values
        array([1, 2])
    """

    dtype: DTypeLike


@dataclass(frozen=True)
class RaggedFeature:
    """A feature with any number of values; the result is a `RaggedTensor` with a row per example.

    For a single example the result is one row, an array.

    Attributes:
        dtype: float32, int64, or bytes.
        value_key: The name in the example, if it differs from the name in the result.
        partitions: Not supported; must be empty.
        row_splits_dtype: Accepted for compatibility with TensorFlow; row splits are int64.
        validate: Accepted for compatibility and ignored.

    Raises:
        NotImplementedError: If there are partitions.

    Example:
        >>> data = rx.io.serialize_example({"x": [1, 2]})
        >>> rx.io.parse_single_example(data, {"x": rx.io.RaggedFeature(np.int64)})
        {'x': array([1, 2])}
    """

    dtype: DTypeLike
    value_key: str | None = None
    partitions: Sequence[Any] = ()
    row_splits_dtype: DTypeLike = np.int32
    validate: bool = False

    def __post_init__(self) -> None:
        if self.partitions:
            raise NotImplementedError(
                f"RaggedFeature(partitions={self.partitions!r}): rows within rows are not parsed."
                " Parse the values and the lengths as two features, and use `np.split`."
            )


Feature = FixedLenFeature | FixedLenSequenceFeature | VarLenFeature | RaggedFeature


class SparseTensor(NamedTuple):
    """A sparse array: values and their coordinates.

    Attributes:
        indices: One row of coordinates for each value.
        values: The values.
        dense_shape: The shape of the dense array.

    Example:
        >>> sparse = rx.io.SparseTensor(np.array([[0, 1]]), np.array([5]), np.array([1, 3]))
        >>> sparse.to_dense()
        array([[0, 5, 0]])
    """

    indices: Array
    values: Array
    dense_shape: Array

    @property
    def is_uneven(self) -> bool:
        """True: its components cannot be stacked to a batch."""
        return True

    def to_dense(self, default_value: Any = None) -> Array:
        """Return the dense array.

        Args:
            default_value: The value of all other entries; zero or an empty string if None.

        Returns:
            An array of ``dense_shape``.

        Example:
            >>> sparse = rx.io.SparseTensor(np.array([[1]]), np.array([5]), np.array([3]))
            >>> sparse.to_dense(-1)
            array([-1,  5, -1])
        """
        fill = empty_value(self.values.dtype) if default_value is None else default_value
        result = np.full(self.dense_shape.tolist(), fill, self.values.dtype)
        result[tuple(self.indices.T)] = self.values
        return result


class RaggedTensor(NamedTuple):
    """Rows of different lengths.

    Attributes:
        values: The concatenated values of all rows.
        row_splits: The start of each row in ``values``, and the end of the last row.

    Example:
        >>> ragged = rx.io.RaggedTensor(np.array([1, 2, 3]), np.array([0, 2, 3]))
        >>> ragged.to_list()
        [[1, 2], [3]]
    """

    values: Array
    row_splits: Array

    @property
    def is_uneven(self) -> bool:
        """True: its components cannot be stacked to a batch."""
        return True

    def to_list(self) -> list[Any]:
        """Return the rows as lists.

        Returns:
            A list of lists.

        Example:
            >>> rx.io.RaggedTensor(np.array([1, 2]), np.array([0, 0, 2])).to_list()
            [[], [1, 2]]
        """
        return [row.tolist() for row in self._rows()]

    def to_tensor(self, default_value: Any = None) -> Array:
        """Return the rows as one array, padded to the longest.

        Args:
            default_value: The padding value; zero or an empty string if None.

        Returns:
            An array with two axes, or more if the values are rows themselves.

        Example:
            >>> rx.io.RaggedTensor(np.array([1, 2, 3]), np.array([0, 2, 3])).to_tensor()
            array([[1, 2],
                   [3, 0]])
        """
        fill = empty_value(self.values.dtype) if default_value is None else default_value
        rows = self._rows()
        width = max((len(row) for row in rows), default=0)
        result = np.full((len(rows), width, *self.values.shape[1:]), fill, self.values.dtype)
        for place, row in enumerate(rows):
            result[place, : len(row)] = row
        return result

    def _rows(self) -> list[Array]:
        return np.split(self.values, self.row_splits[1:-1]) if len(self.row_splits) > 1 else []


_KINDS = {"bytes": 1, "float": 2, "int64": 3}
_DTYPES = {1: np.dtype(object), 2: np.dtype(np.float32), 3: np.dtype(np.int64)}
KIND_NAMES = {number: name for name, number in _KINDS.items()}


def kind_of(dtype: DTypeLike, key: str) -> int:
    """Return the field number of the list that stores `dtype` in a `Feature` message.

    Raises:
        InvalidArgumentError: No list stores it; the message names the feature `key`.
    """
    if dtype in (bytes, str) or np.dtype(dtype).kind in "OSU":
        return _KINDS["bytes"]
    if np.dtype(dtype) == np.float32:
        return _KINDS["float"]
    if np.dtype(dtype) == np.int64:
        return _KINDS["int64"]
    raise InvalidArgumentError(
        f"The feature {key!r} is declared as {np.dtype(dtype)}, but an Example holds only float32,"
        " int64 and bytes. Declare one of these and convert after parsing."
    )


def dtype_of(kind: int) -> np.dtype[Any]:
    """Return the NumPy dtype for a field number from `kind_of`."""
    return _DTYPES[kind]


def empty_value(dtype: np.dtype[Any]) -> Any:
    """Return the default padding value: b"" for strings, 0 for numbers."""
    return b"" if dtype.kind == "O" else 0
