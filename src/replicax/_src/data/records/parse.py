"""Parsing of serialized `Example` and `SequenceExample` messages to arrays.

Records of a batch usually differ only in their values and share length and framing bytes. Fixed
length features of such a group are parsed together, as slices of one byte matrix: see
`column_parser`; all other records, and those that must raise, are parsed one by one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import DataLossError, InvalidArgumentError
from replicax._src.data.leaves import Array, to_array
from replicax._src.data.records.column_parser import FixedColumns, check_kind, values_of
from replicax._src.data.records.examples import Example, SequenceExample
from replicax._src.data.records.features import (
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
from replicax._src.data.records.wire_format import Layout, layout_of

_MOST_READERS = 32


def parse_example(
    serialized: Any, features: Mapping[str, Feature], example_names: Any = None, name: Any = None
) -> dict[str, Any]:
    """Parse serialized Examples into one batch.

    Args:
        serialized: An array or list of bytes, one Example each.
        features: For each name, `FixedLenFeature`, `FixedLenSequenceFeature`, `VarLenFeature` or
            `RaggedFeature`.
        example_names: Ignored.
        name: Ignored.

    Returns:
        For each name an array with a leading axis, a `SparseTensor` or a `RaggedTensor`.

    Raises:
        InvalidArgumentError: A feature is missing, or has the wrong type or number of values.
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
    """Parse one serialized Example.

    For an array of Examples it is the same as `parse_example`, so `Dataset.map` may call it on
    whole blocks.

    Args:
        serialized: The bytes.
        features: As for `parse_example`.
        example_names: Ignored.
        name: Ignored.

    Returns:
        For each name an array, or a `SparseTensor` with one axis.

    Raises:
        InvalidArgumentError: A feature is missing, or has the wrong type or number of values.
        DataLossError: The bytes are not an Example.

    Example:
        >>> data = rx.io.serialize_example({"x": 1.5, "name": "a"})
        >>> features = {"name": rx.io.FixedLenFeature([], bytes)}
        >>> rx.io.parse_single_example(data, features)
        {'name': b'a'}
    """
    del example_names, name
    if not isinstance(serialized, bytes) and np.ndim(serialized):
        return parse_example(serialized, features)
    record = _scalar(serialized)
    if features and all([isinstance(f, FixedLenFeature) for f in features.values()]):  # noqa: C419
        return _columns_for(features).read_one(record)  # type: ignore[arg-type]
    batch = parse_example([record], features)
    return {key: _first(value, features[key]) for key, value in batch.items()}


def parse_single_sequence_example(
    serialized: Any,
    context_features: Mapping[str, Feature] | None = None,
    sequence_features: Mapping[str, Feature] | None = None,
    example_name: Any = None,
    name: Any = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse one serialized SequenceExample.

    Args:
        serialized: The bytes.
        context_features: The features of the context, as for `parse_single_example`.
        sequence_features: The features of the steps: for each name a `FixedLenSequenceFeature`,
            whose result has the steps as its first axis, a `VarLenFeature` or a `RaggedFeature`.
        example_name: Ignored.
        name: Ignored.

    Returns:
        A dict of context features and a dict of sequence features.

    Raises:
        InvalidArgumentError: A feature is missing, or has the wrong type or number of values, or
            the bytes are not a SequenceExample.

    Example:
        >>> sequence = rx.train.SequenceExample()
        >>> for k in range(2):
        ...     step = rx.train.Feature(int64_list=rx.train.Int64List(value=[k, 10 * k]))
        ...     sequence.feature_lists.feature_list["x"].feature.append(step)
        >>> steps = {"x": rx.io.FixedLenSequenceFeature([2], np.int64)}
        >>> rx.io.parse_single_sequence_example(sequence.SerializeToString(), None, steps)
        ({}, {'x': array([[ 0,  0], [ 1, 10]])})
    """
    del example_name, name
    _require_features(context_features, sequence_features)
    message = _sequence_example(_scalar(serialized))
    # The context has the wire format of an Example's features.
    example = Example(features=message.context).SerializeToString()
    context = parse_single_example(example, context_features or {})
    return context, {k: _steps(message, k, f) for k, f in (sequence_features or {}).items()}


def parse_sequence_example(
    serialized: Any,
    context_features: Mapping[str, Feature] | None = None,
    sequence_features: Mapping[str, Feature] | None = None,
    example_names: Any = None,
    name: Any = None,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Parse serialized SequenceExamples into one batch.

    Args:
        serialized: A list or array of bytes; or one, as for `parse_single_sequence_example`.
        context_features: The features of the context, as for `parse_example`.
        sequence_features: The features of the steps: for each name a `FixedLenSequenceFeature`,
            padded to the longest sequence, or a `VarLenFeature`.
        example_names: Ignored.
        name: Ignored.

    Returns:
        Dicts of context features, of sequence features, and of the number of steps for each
        `FixedLenSequenceFeature`.

    Raises:
        InvalidArgumentError: As for `parse_single_sequence_example`.
        NotImplementedError: For a `RaggedFeature` of the steps.

    Example:
        >>> one, two = (rx.train.SequenceExample() for _ in range(2))
        >>> for sequence, k in ((one, 1), (two, 2), (two, 3)):
        ...     step = rx.train.Feature(int64_list=rx.train.Int64List(value=[k]))
        ...     sequence.feature_lists.feature_list["x"].feature.append(step)
        >>> data = [one.SerializeToString(), two.SerializeToString()]
        >>> steps = {"x": rx.io.FixedLenSequenceFeature([], np.int64)}
        >>> rx.io.parse_sequence_example(data, None, steps)
        ({}, {'x': array([[1, 0], [2, 3]])}, {'x': array([1, 2])})
    """
    del example_names, name
    _require_features(context_features, sequence_features)
    features = sequence_features or {}
    fixed = [k for k, f in features.items() if isinstance(f, FixedLenSequenceFeature)]
    if not np.ndim(serialized):
        context, steps = parse_single_sequence_example(serialized, context_features, features)
        return context, steps, {key: np.int64(len(steps[key])) for key in fixed}
    messages = [_sequence_example(record) for record in _records(serialized)]
    examples = [Example(features=message.context).SerializeToString() for message in messages]
    context = parse_example(examples, context_features) if context_features else {}
    lists = {k: [_steps(message, k, f) for message in messages] for k, f in features.items()}
    lengths = {key: np.array([len(rows) for rows in lists[key]], np.int64) for key in fixed}
    return context, {key: _batch_steps(lists[key], key, f) for key, f in features.items()}, lengths


def _batch_steps(parts: Sequence[Any], key: str, feature: Feature) -> Any:
    """Batch the steps of several sequences: padded, or sparse."""
    if isinstance(feature, RaggedFeature):
        raise NotImplementedError(
            f"The feature {key!r} of several sequences is declared as a RaggedFeature, and rows"
            " within rows are not parsed. Write `VarLenFeature`, or `parse_single_sequence_example`"
            " in `Dataset.map`."
        )
    if isinstance(feature, FixedLenSequenceFeature):
        longest = max(map(len, parts), default=0)
        dtype = dtype_of(kind_of(feature.dtype, key))
        result = np.full((len(parts), longest, *feature.shape), empty_value(dtype), dtype)
        for place, rows in enumerate(parts):
            result[place, : len(rows)] = rows
        return result
    places = [np.insert(part.indices, 0, i, axis=1) for i, part in enumerate(parts)]
    shape = np.max([part.dense_shape for part in parts], axis=0, initial=0)
    values = np.concatenate([part.values for part in parts])
    return SparseTensor(np.concatenate(places), values, np.insert(shape, 0, len(parts)))


def _require_features(context: Any, sequence: Any) -> None:
    if not context and not sequence:
        raise InvalidArgumentError(
            "Parsing a SequenceExample needs context_features or sequence_features: without them"
            " there is nothing to parse."
        )


def _sequence_example(data: bytes) -> SequenceExample:
    try:
        return SequenceExample.FromString(data)
    except DataLossError as error:
        raise InvalidArgumentError(str(error)) from None


_readers: dict[Any, FixedColumns] = {}


def _columns_for(features: Mapping[str, FixedLenFeature]) -> FixedColumns:
    """Return a parser of `features`, cached if possible."""
    # A reader caches the layouts of records it has seen, so it is reused for equal features.
    # Defaults that are arrays make no reliable cache key.
    defaults = [f.default_value for f in features.values() if f.default_value is not None]
    if any(map(np.ndim, defaults)):
        return FixedColumns(features)
    key = repr(dict(features)) if defaults else _plain_key(features)
    reader = _readers.get(key)
    if reader is None:
        if len(_readers) >= _MOST_READERS:
            _readers.clear()
        reader = _readers[key] = FixedColumns(features)
    return reader


def _plain_key(features: Mapping[str, FixedLenFeature]) -> Any:
    """Return a cache key for features without defaults; their repr if they are not hashable."""
    try:
        key = tuple([(key, f.dtype, tuple(f.shape)) for key, f in features.items()])
        hash(key)
    except TypeError:
        return repr(dict(features))
    return key


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
    item = serialized if type(serialized) is bytes else to_array(serialized)[()]
    if not isinstance(item, bytes):
        raise InvalidArgumentError(f"A serialized Example is bytes, got {type(item).__name__}.")
    return item


def _first(value: Any, feature: Feature) -> Any:
    """Return the only example of a parsed batch of one."""
    if isinstance(value, SparseTensor):
        return SparseTensor(value.indices[:, 1:], value.values, value.dense_shape[1:])
    if isinstance(value, RaggedTensor):
        return value.values
    return value[0]


def _variable(
    records: Sequence[bytes], layouts: Sequence[Layout], key: str, feature: Feature
) -> Any:
    """Parse a feature of variable length from all records."""
    kind = kind_of(feature.dtype, key)
    source = (feature.value_key if isinstance(feature, RaggedFeature) else None) or key
    rows = [
        _row(record, layout, source, kind) for record, layout in zip(records, layouts, strict=True)
    ]
    if isinstance(feature, FixedLenSequenceFeature):
        return _sequences(rows, key, feature, kind)
    values = np.concatenate(rows) if rows else np.empty(0, dtype_of(kind))
    lengths = np.array([len(row) for row in rows], np.int64)
    return _sparse_or_ragged(values, lengths, feature)


def _sparse_or_ragged(values: Array, lengths: Array, feature: Feature) -> Any:
    """Return concatenated rows of different lengths as the tensor that `feature` asks for."""
    if isinstance(feature, VarLenFeature):
        columns = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        shape = np.array([len(lengths), lengths.max(initial=0)], np.int64)
        return SparseTensor(np.stack([rows, columns], axis=1), values, shape)
    return RaggedTensor(values, np.concatenate([[0], np.cumsum(lengths)]))


def _row(record: bytes, layout: Layout, key: str, kind: int) -> Array:
    """Return the values of a feature in one record; empty if it is missing."""
    found, spans = layout.get(key.encode(), (0, []))
    if not found:
        return np.empty(0, dtype_of(kind))
    check_kind(key, found, kind)
    return values_of(record, kind, spans)


def _sequences(
    rows: Sequence[Array], key: str, feature: FixedLenSequenceFeature, kind: int
) -> Array:
    """Batch rows of a `FixedLenSequenceFeature`, padded to the longest."""
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


def _steps(message: SequenceExample, key: str, feature: Feature) -> Any:
    """Return the values of one feature in all steps of a sequence."""
    lists = message.feature_lists.feature_list
    steps = lists[key].feature if key in lists else None
    if isinstance(feature, FixedLenFeature):
        raise InvalidArgumentError(
            f"The feature {key!r} of a sequence is declared as a FixedLenFeature; its steps may be"
            " many. Write `FixedLenSequenceFeature(shape, dtype)`."
        )
    kind = kind_of(feature.dtype, key)
    rows = [_step(step, key, kind) for step in steps or ()]
    if isinstance(feature, FixedLenSequenceFeature):
        return _fixed_steps(rows, key, feature, is_missing=steps is None)
    values = np.concatenate(rows) if rows else np.empty(0, dtype_of(kind))
    lengths = np.array([len(row) for row in rows], np.int64)
    return _sparse_or_ragged(values, lengths, feature)


def _step(step: Any, key: str, kind: int) -> Array:
    name = step.WhichOneof("kind")
    if name is None:
        return np.empty(0, dtype_of(kind))
    found = {"bytes_list": 1, "float_list": 2, "int64_list": 3}[name]
    check_kind(key, found, kind)
    row: Array = np.empty(len(getattr(step, name).value), dtype_of(kind))
    row[:] = getattr(step, name).value
    return row


def _fixed_steps(
    rows: Sequence[Array], key: str, feature: FixedLenSequenceFeature, *, is_missing: bool
) -> Array:
    """Stack the values of all steps, each of which must have the shape of `feature`."""
    shape = tuple(feature.shape)
    size = int(np.prod(shape, dtype=np.int64))
    if is_missing and not feature.allow_missing:
        raise InvalidArgumentError(
            f"The feature {key!r} is not in the SequenceExample. Correct the name, or declare it"
            " with allow_missing=True to have no steps."
        )
    if any(len(row) != size for row in rows):
        raise InvalidArgumentError(
            f"The feature {key!r} has steps of shape {list(shape)}, {size} values each, but a step"
            f" holds {next(len(row) for row in rows if len(row) != size)} values."
        )
    dtype = dtype_of(kind_of(feature.dtype, key))
    values: Array = np.concatenate(rows) if rows else np.empty(0, dtype)
    return values.reshape(len(rows), *shape)
