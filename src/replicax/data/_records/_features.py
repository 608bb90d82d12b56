"""What to expect in an `Example`: one description for each feature, and the sparse results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import Array


class FixedLenFeature(NamedTuple):
    """A feature with the same number of values in every example.

    Attributes:
        shape: The shape of the values.
        dtype: float32, int64, or bytes (also ``str`` and ``object``).
        default_value: What to use where the feature is missing; an error if None.

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
        default_value: What to pad with; zero or an empty string if None.

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
    """A feature with any number of values; the result is a `RaggedTensor`, for one example a row.

    Attributes:
        dtype: float32, int64, or bytes.
        value_key: The name in the example, if it is not the name in the result.
        partitions: Refused: a row is not divided further.
        row_splits_dtype: Accepted for TensorFlow's sake; where rows end is counted in int64.
        validate: Accepted.

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
    """Values and where they stand in a larger array.

    Attributes:
        indices: One row of coordinates for each value.
        values: The values.
        dense_shape: The shape of the larger array.

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
        """That it is no array: batches of it would mean something else."""
        return True

    def to_dense(self, default_value: Any = None) -> Array:
        """The larger array.

        Args:
            default_value: What stands elsewhere; zero or an empty string if None.

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
    """Rows of different lengths, one after the other.

    Attributes:
        values: The values of all rows.
        row_splits: Where each row starts, and the end of the last.

    Example:
        >>> ragged = rx.io.RaggedTensor(np.array([1, 2, 3]), np.array([0, 2, 3]))
        >>> ragged.to_list()
        [[1, 2], [3]]
    """

    values: Array
    row_splits: Array

    @property
    def is_uneven(self) -> bool:
        """That it is no array: batches of it would mean something else."""
        return True

    def to_list(self) -> list[Any]:
        """The rows as lists.

        Returns:
            A list of lists.

        Example:
            >>> rx.io.RaggedTensor(np.array([1, 2]), np.array([0, 0, 2])).to_list()
            [[], [1, 2]]
        """
        return [row.tolist() for row in self._rows()]

    def to_tensor(self, default_value: Any = None) -> Array:
        """The rows as one array, padded to the longest.

        Args:
            default_value: What to pad with; zero or an empty string if None.

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
    """The number of a feature's type in the wire format."""
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
    """The NumPy dtype for a type of the wire format."""
    return _DTYPES[kind]


def empty_value(dtype: np.dtype[Any]) -> Any:
    """What to pad with."""
    return b"" if dtype.kind == "O" else 0
