"""Vectorized parsing of fixed-length features over records of the same byte layout.

The values of a feature have the same byte offsets in all records that share a template, so a group
of such records is viewed as one byte matrix, and each feature is a slice of its columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import DataLossError, InvalidArgumentError
from replicax._src.data.leaves import Array, to_array
from replicax._src.data.records.features import KIND_NAMES, FixedLenFeature, dtype_of, kind_of
from replicax._src.data.records.wire_format import Layout, Span, layout_of, read_int64, read_varints

_MOST_TEMPLATES = 64


@dataclass(frozen=True)
class _FixedFeature:
    """The key, type and shape of a `FixedLenFeature`, and its flattened default."""

    key: str
    kind: int
    shape: tuple[int, ...]
    size: int
    default: Array | None


@dataclass(frozen=True)
class _Template:
    """A byte layout of records: the framing bytes between values, and the spans of values."""

    framing: list[tuple[int, int, bytes]]  # start, end and content of runs between values
    spans: list[list[Span]]  # for each feature

    def fits(self, record: bytes) -> bool:
        """Whether a record of the right length has this layout."""
        for start, end, content in self.framing:  # noqa: SIM110 - done for every record
            if record[start:end] != content:
                return False
        return True

    @cached_property
    def framing_offsets(self) -> Array:
        """The offsets of all framing bytes."""
        return np.concatenate([np.arange(start, end) for start, end, _ in self.framing])

    @cached_property
    def framing_bytes(self) -> Array:
        """The bytes at `framing_offsets`."""
        return np.frombuffer(b"".join(content for _, _, content in self.framing), np.uint8)


class FixedColumns:
    """A parser of `FixedLenFeature`s, which caches the templates of records it has seen."""

    def __init__(self, features: Mapping[str, FixedLenFeature]) -> None:
        self._features = [_to_fixed(key, feature) for key, feature in features.items()]
        self._templates: dict[int, _Template | None] = {}

    def read(self, records: Sequence[bytes]) -> dict[str, Array]:
        """Return one array for each feature."""
        count = len(records)
        columns = [np.empty((count, f.size), dtype_of(f.kind)) for f in self._features]
        lengths = np.array([len(record) for record in records], np.int64)
        unread: list[int] = []
        for length in np.unique(lengths).tolist():
            indices = np.flatnonzero(lengths == length)
            unread.extend(self._read_group(records, indices, columns))
        for index in unread:
            self._read_single(records[index], index, columns)
        pairs = zip(self._features, columns, strict=True)
        return {f.key: column.reshape(count, *f.shape) for f, column in pairs}

    def read_one(self, record: bytes) -> dict[str, Any]:
        """Return the values of each feature in one record."""
        template = self._template_for(record)
        values: dict[str, Any] = {}
        for feature, spans in zip(self._features, template.spans if template else (), strict=False):
            value = _read_value(feature, record, spans)
            if value is not None:
                values[feature.key] = value
        if len(values) == len(self._features):
            return values
        return {key: column[0] for key, column in self.read([record]).items()}

    def _read_group(
        self, records: Sequence[bytes], indices: Array, columns: list[Array]
    ) -> list[int]:
        """Parse the records at `indices` that share the first one's template into `columns`.

        All of them have the same length. Return the indices of the records that were not parsed.
        """
        group = [records[index] for index in indices.tolist()]
        if len(group) == 1:
            return indices.tolist()  # type: ignore[no-any-return]
        template = self._template_for(group[0])
        if template is None:
            return indices.tolist()  # type: ignore[no-any-return]
        matrix = np.frombuffer(b"".join(group), np.uint8).reshape(len(group), -1)
        fits = (matrix[:, template.framing_offsets] == template.framing_bytes).all(axis=1)
        if not fits.all():
            matrix = matrix[fits]
            group = [record for record, ok in zip(group, fits, strict=True) if ok]
        rows = indices[fits]
        parts = list(zip(self._features, columns, template.spans, strict=True))
        if all(_read_column(f, c, spans, matrix, group, rows) for f, c, spans in parts):
            return indices[~fits].tolist()  # type: ignore[no-any-return]
        return indices.tolist()  # type: ignore[no-any-return]

    def _template_for(self, record: bytes) -> _Template | None:
        """Return a template that fits `record`: the cached one of its length, or a new one.

        None if a feature is missing or has the wrong type or number of values.
        """
        length = len(record)
        template = self._templates.get(length)
        if template is None or not template.fits(record):
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[length] = self._new_template(record)
        return template

    def _new_template(self, record: bytes) -> _Template | None:
        layout = layout_of(record)
        feature_spans: list[list[Span]] = []
        for feature in self._features:
            kind, spans = layout.get(feature.key.encode(), (0, []))
            if kind != feature.kind or len(spans) != (feature.size if kind == 1 else 1):
                return None
            feature_spans.append(spans)
        value_spans = sorted(span for _, spans in layout.values() for span in spans)
        borders = pairwise([(0, 0), *value_spans, (len(record), len(record))])
        framing = [(end, start, record[end:start]) for (_, end), (start, _) in borders]
        return _Template([run for run in framing if run[2]], feature_spans)

    def _read_single(self, record: bytes, index: int, columns: list[Array]) -> None:
        """Parse one record into row `index` of `columns`; raise if a feature does not match."""
        layout = layout_of(record)
        for feature, column in zip(self._features, columns, strict=True):
            column[index] = _values(record, layout, feature)


def _read_column(  # noqa: PLR0913 - one row of a table
    feature: _FixedFeature,
    column: Array,
    spans: list[Span],
    matrix: Array,
    group: Sequence[bytes],
    rows: Array,
) -> bool:
    """Parse one feature of a group into `rows` of `column`.

    False if a packed list has the wrong number of values, which the template does not check.
    """
    if feature.kind == 1:
        for k, (start, end) in enumerate(spans):
            values = np.empty(len(group), object)
            values[:] = [record[start:end] for record in group]
            column[rows, k] = values
        return True
    ((start, end),) = spans
    data = np.ascontiguousarray(matrix[:, start:end])
    if feature.kind == 2:
        numbers = data.view("<f4")
    elif (data < 128).all():
        numbers = data
    else:
        # The last byte of a varint is below 128. Each row must end with one and have `size` of
        # them, or else a varint would reach into the next row.
        is_last = data < 128
        if not is_last[:, -1].all() or (is_last.sum(axis=1) != feature.size).any():
            return False
        numbers = read_varints(data.reshape(-1)).reshape(len(data), -1)
    if numbers.shape[1] != feature.size:
        return False
    column[rows] = numbers
    return True


def _read_value(feature: _FixedFeature, record: bytes, spans: list[Span]) -> Any:
    """Return the values of one feature of one record; None if their number is wrong."""
    if feature.kind == 1:
        values = [record[start:end] for start, end in spans]
        if not feature.shape:
            return values[0]
        column = np.empty(feature.size, object)
        column[:] = values
        return column.reshape(feature.shape)
    ((start, end),) = spans
    if feature.kind == 3 and not feature.shape:
        return read_int64(record, start, end)
    if feature.kind == 2:
        found = np.frombuffer(record, "<f4", (end - start) // 4, start).astype(np.float32)
        is_complete = not (end - start) % 4
    else:
        found = read_varints(np.frombuffer(record, np.uint8, end - start, start))
        is_complete = record[end - 1] < 128
    if not is_complete or len(found) != feature.size:
        return None
    return found.reshape(feature.shape) if feature.shape else found[0]


def _values(record: bytes, layout: Layout, feature: _FixedFeature) -> Array:
    """Return the values of one feature of one record, or its default; raise on a mismatch."""
    found, spans = layout.get(feature.key.encode(), (0, []))
    if not found:
        if feature.default is not None:
            return feature.default
        raise InvalidArgumentError(
            f"The feature {feature.key!r} ({KIND_NAMES[feature.kind]}) is missing from an Example,"
            f" which has {sorted(key.decode(errors='replace') for key in layout)}. Give it a"
            " default_value, or correct its name."
        )
    check_kind(feature.key, found, feature.kind)
    values = values_of(record, feature.kind, spans)
    if len(values) != feature.size:
        raise InvalidArgumentError(
            f"The feature {feature.key!r} has {len(values)} values in an Example, but its shape"
            f" {list(feature.shape)} needs {feature.size}. Use `VarLenFeature` or `RaggedFeature`"
            " for features of different length."
        )
    return values


def _to_fixed(key: str, feature: FixedLenFeature) -> _FixedFeature:
    shape = (feature.shape,) if isinstance(feature.shape, int) else tuple(feature.shape)
    size = int(np.prod(shape, dtype=np.int64))
    kind = kind_of(feature.dtype, key)
    default: Array | None = None
    if feature.default_value is not None:
        value = to_array(feature.default_value).astype(dtype_of(kind))
        default = np.broadcast_to(value, shape).reshape(-1)
    return _FixedFeature(key, kind, shape, size, default)


def check_kind(key: str, found: int, kind: int) -> None:
    """Raise `InvalidArgumentError` if a feature's type differs from the declared one."""
    if found != kind:
        raise InvalidArgumentError(
            f"The feature {key!r} is declared as {KIND_NAMES[kind]}, but the Example holds"
            f" {KIND_NAMES.get(found, 'an unknown type')} values for it."
        )


def values_of(record: bytes, kind: int, spans: Sequence[Span]) -> Array:
    """Return the values in `spans` of a record, as an array of the dtype of `kind`."""
    if kind == 1:
        result = np.empty(len(spans), object)
        result[:] = [record[start:end] for start, end in spans]
        return result
    data = b"".join(record[start:end] for start, end in spans)
    if kind == 2:
        if len(data) % 4:
            raise DataLossError(
                f"An Example has {len(data)} bytes for a list of floats, which take 4 each: it is"
                " damaged. Restore the file, or leave the record out."
            )
        return np.frombuffer(data, "<f4").astype(np.float32)
    return read_varints(np.frombuffer(data, np.uint8))
