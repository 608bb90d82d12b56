"""Serialized `Example` messages -> arrays.

Records of a batch mostly differ only in their values: same length, same bytes around the values.
Such a group is read as one matrix of bytes, a column slice for each feature. Everything else, and
everything that must raise, goes record by record.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import Array, to_array
from replicax.data._records._features import (
    Feature,
    FixedLenFeature,
    FixedLenSequenceFeature,
    RaggedFeature,
    RaggedTensor,
    SparseTensor,
    VarLenFeature,
    dtype_of,
    empty_value,
    kind_of,
)
from replicax.data._records._template import FixedColumns, check_kind, values_of
from replicax.data._records._wire import Layout, layout_of

_MOST_READERS = 32


def parse_example(
    serialized: Any, features: Mapping[str, Feature], example_names: Any = None, name: Any = None
) -> dict[str, Any]:
    """Many serialized Examples -> one batch.

    Args:
        serialized: An array or list of bytes, one Example each.
        features: For each name, `FixedLenFeature`, `FixedLenSequenceFeature`, `VarLenFeature` or
            `RaggedFeature`.
        example_names: Ignored.
        name: Ignored.

    Returns:
        For each name an array with a leading axis, a `SparseTensor` or a `RaggedTensor`.

    Raises:
        InvalidArgumentError: A feature is missing, or has another type or number of values.
        DataLossError: The bytes are not an Example.

    Example:
        >>> records = [rx.io.serialize_example({"x": [k, k + 1]}) for k in range(2)]
        >>> rx.io.parse_example(records, {"x": rx.io.FixedLenFeature([2], np.int64)})
        {'x': array([[0, 1],
                     [1, 2]])}
    """
    del example_names, name
    records = _records(serialized)
    fixed = {key: f for key, f in features.items() if isinstance(f, FixedLenFeature)}
    result: dict[str, Any] = _columns_for(fixed).read(records) if fixed else {}
    others = [key for key in features if key not in fixed]
    if others:
        layouts = [layout_of(record) for record in records]
        for key in others:
            result[key] = _variable(records, layouts, key, features[key])
    return {key: result[key] for key in features}


def parse_single_example(
    serialized: Any, features: Mapping[str, Feature], example_names: Any = None, name: Any = None
) -> dict[str, Any]:
    """One serialized Example -> its values.

    Given an array of them it is `parse_example`, so that `Dataset.map` may call it on whole blocks.

    Args:
        serialized: The bytes.
        features: As for `parse_example`.
        example_names: Ignored.
        name: Ignored.

    Returns:
        For each name an array, or a `SparseTensor` with one axis.

    Raises:
        InvalidArgumentError: A feature is missing, or has another type or number of values.
        DataLossError: The bytes are not an Example.

    Example:
        >>> data = rx.io.serialize_example({"x": 1.5, "name": "a"})
        >>> features = {"name": rx.io.FixedLenFeature([], bytes)}
        >>> rx.io.parse_single_example(data, features)
        {'name': b'a'}
    """
    del example_names, name
    if np.ndim(serialized):
        return parse_example(serialized, features)
    batch = parse_example([_scalar(serialized)], features)
    return {key: _first(value, features[key]) for key, value in batch.items()}


def decode_raw(input_bytes: Any, out_type: Any, little_endian: bool = True) -> Array:  # noqa: FBT001, FBT002
    r"""The bytes of strings as numbers.

    Args:
        input_bytes: One string, or an array of strings of equal length.
        out_type: The dtype of the numbers.
        little_endian: The order of bytes in ``input_bytes``.

    Returns:
        An array with one axis more than ``input_bytes``.

    Example:
        >>> rx.io.decode_raw(b"\x01\x00\x02\x00", np.int16)
        array([1, 2], dtype=int16)
    """
    dtype = np.dtype(out_type).newbyteorder("<" if little_endian else ">")
    strings = to_array(input_bytes)
    flat = strings.reshape(-1).tolist()
    lengths = {len(item) for item in flat}
    if len(lengths) > 1 or any(length % dtype.itemsize for length in lengths):
        raise InvalidArgumentError(
            f"decode_raw() needs strings of one length, a multiple of {dtype.itemsize} for"
            f" {np.dtype(out_type)}; got lengths {sorted(lengths)[:10]}."
        )
    numbers = np.frombuffer(bytearray().join(flat), dtype).astype(np.dtype(out_type), copy=False)
    return numbers.reshape(*strings.shape, -1)


_readers: dict[str, FixedColumns] = {}


def _columns_for(features: dict[str, FixedLenFeature]) -> FixedColumns:
    # A reader remembers the forms of records it has seen, so one is kept for each description.
    if any(np.ndim(feature.default_value) for feature in features.values()):
        return FixedColumns(features)
    key = repr(features)
    reader = _readers.get(key)
    if reader is None:
        if len(_readers) >= _MOST_READERS:
            _readers.clear()
        reader = _readers[key] = FixedColumns(features)
    return reader


def _records(serialized: Any) -> list[bytes]:
    array = to_array(serialized)
    if array.ndim != 1:
        raise InvalidArgumentError(
            f"parse_example() needs a list or array of serialized Examples with one axis, got"
            f" shape {array.shape}. Use `parse_single_example` for one."
        )
    records: list[bytes] = array.tolist()
    return records


def _scalar(serialized: Any) -> bytes:
    item = to_array(serialized)[()]
    if not isinstance(item, bytes):
        raise InvalidArgumentError(f"A serialized Example is bytes, got {type(item).__name__}.")
    return item


def _first(value: Any, feature: Feature) -> Any:
    if isinstance(value, SparseTensor):
        return SparseTensor(value.indices[:, 1:], value.values, value.dense_shape[1:])
    if isinstance(value, RaggedTensor):
        return value.values
    return value[0]


def _variable(
    records: Sequence[bytes], layouts: Sequence[Layout], key: str, feature: Feature
) -> Any:
    kind = kind_of(feature.dtype, key)
    source = (feature.value_key if isinstance(feature, RaggedFeature) else None) or key
    rows = [
        _row(record, layout, source, kind) for record, layout in zip(records, layouts, strict=True)
    ]
    if isinstance(feature, FixedLenSequenceFeature):
        return _sequences(rows, key, feature, kind)
    values = np.concatenate(rows) if rows else np.empty(0, dtype_of(kind))
    lengths = np.array([len(row) for row in rows], np.int64)
    if isinstance(feature, VarLenFeature):
        places = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        owners = np.repeat(np.arange(len(rows)), lengths)
        shape = np.array([len(rows), lengths.max(initial=0)], np.int64)
        return SparseTensor(np.stack([owners, places], axis=1), values, shape)
    return RaggedTensor(values, np.concatenate([[0], np.cumsum(lengths)]))


def _row(record: bytes, layout: Layout, key: str, kind: int) -> Array:
    found, spans = layout.get(key.encode(), (0, []))
    if not found:
        return np.empty(0, dtype_of(kind))
    check_kind(key, found, kind)
    return values_of(record, kind, spans)


def _sequences(
    rows: Sequence[Array], key: str, feature: FixedLenSequenceFeature, kind: int
) -> Array:
    shape = tuple(feature.shape)
    size = int(np.prod(shape, dtype=np.int64))
    if any(len(row) % size for row in rows):
        raise InvalidArgumentError(
            f"The feature {key!r} has rows of shape {list(shape)}, {size} values each, but an"
            f" Example holds {next(len(row) for row in rows if len(row) % size)} values."
        )
    dtype = dtype_of(kind)
    fill = empty_value(dtype) if feature.default_value is None else feature.default_value
    longest = max((len(row) // size for row in rows), default=0)
    result = np.full((len(rows), longest, *shape), fill, dtype)
    for place, row in enumerate(rows):
        result[place, : len(row) // size] = row.reshape(-1, *shape)
    return result
