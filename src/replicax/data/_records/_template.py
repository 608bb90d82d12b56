"""Features with a fixed number of values, read in columns over records that look alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from replicax.data._errors import DataLossError, InvalidArgumentError
from replicax.data._leaves import Array, to_array
from replicax.data._records._features import KIND_NAMES, FixedLenFeature, dtype_of, kind_of
from replicax.data._records._wire import Layout, Span, layout_of, read_int64, read_varints

_MOST_TEMPLATES = 64


@dataclass(frozen=True)
class _Wanted:
    """One feature: what is expected."""

    key: str
    kind: int
    shape: tuple[int, ...]
    size: int
    default: Array | None


@dataclass(frozen=True)
class _Template:
    """One form of record: the bytes around the values, and where the values are."""

    around: list[tuple[int, int, bytes]]  # runs of bytes that are the same in all such records
    spans: list[list[Span]]  # for each feature

    def fits(self, record: bytes) -> bool:
        """Whether a record of the right length has this form."""
        for start, end, same in self.around:  # noqa: SIM110 - done for every record
            if record[start:end] != same:
                return False
        return True

    @cached_property
    def places(self) -> Array:
        """The places of the bytes around the values."""
        return np.concatenate([np.arange(start, end) for start, end, _ in self.around])

    @cached_property
    def skeleton(self) -> Array:
        """Those bytes."""
        return np.frombuffer(b"".join(same for _, _, same in self.around), np.uint8)


class FixedColumns:
    """Reads `FixedLenFeature`s of many records."""

    def __init__(self, features: Mapping[str, FixedLenFeature]) -> None:
        self._wanted = [_to_wanted(key, feature) for key, feature in features.items()]
        self._templates: dict[int, _Template | None] = {}

    def read(self, records: Sequence[bytes]) -> dict[str, Array]:
        """One array for each feature."""
        count = len(records)
        columns = [np.empty((count, w.size), dtype_of(w.kind)) for w in self._wanted]
        lengths = np.array([len(record) for record in records], np.int64)
        alone: list[int] = []
        for length in np.unique(lengths).tolist():
            places = np.flatnonzero(lengths == length)
            alone.extend(self._read_alike(records, places, columns))
        for place in alone:
            self._read_one(records[place], place, columns)
        pairs = zip(self._wanted, columns, strict=True)
        return {w.key: column.reshape(count, *w.shape) for w, column in pairs}

    def read_one(self, record: bytes) -> dict[str, Any]:
        """The values of each feature in one record."""
        template = self._template_for(record)
        values: dict[str, Any] = {}
        for wanted, spans in zip(self._wanted, template.spans if template else (), strict=False):
            value = _read_value(wanted, record, spans)
            if value is not None:
                values[wanted.key] = value
        if len(values) == len(self._wanted):
            return values
        return {key: column[0] for key, column in self.read([record]).items()}

    def _read_alike(
        self, records: Sequence[bytes], places: Array, columns: list[Array]
    ) -> list[int]:
        """Read the records that look like the first; which ones are left."""
        group = [records[place] for place in places.tolist()]
        if len(group) == 1:
            return places.tolist()  # type: ignore[no-any-return]
        template = self._template_for(group[0])
        if template is None:
            return places.tolist()  # type: ignore[no-any-return]
        matrix = np.frombuffer(b"".join(group), np.uint8).reshape(len(group), -1)
        is_alike = (matrix[:, template.places] == template.skeleton).all(axis=1)
        if not is_alike.all():
            matrix = matrix[is_alike]
            group = [record for record, ok in zip(group, is_alike, strict=True) if ok]
        where = places[is_alike]
        parts = list(zip(self._wanted, columns, template.spans, strict=True))
        if all(_read_column(w, c, spans, matrix, group, where) for w, c, spans in parts):
            return places[~is_alike].tolist()  # type: ignore[no-any-return]
        return places.tolist()  # type: ignore[no-any-return]

    def _template_for(self, record: bytes) -> _Template | None:
        """The form of records of this length; learnt from one, used until a group has none."""
        length = len(record)
        template = self._templates.get(length)
        if template is None or not template.fits(record):
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[length] = self._template(record)
        return template

    def _template(self, record: bytes) -> _Template | None:
        layout = layout_of(record)
        spans_of: list[list[Span]] = []
        for wanted in self._wanted:
            kind, spans = layout.get(wanted.key.encode(), (0, []))
            if kind != wanted.kind or len(spans) != (wanted.size if kind == 1 else 1):
                return None
            spans_of.append(spans)
        of_values = sorted(span for _, spans in layout.values() for span in spans)
        borders = pairwise([(0, 0), *of_values, (len(record), len(record))])
        around = [(end, start, record[end:start]) for (_, end), (start, _) in borders]
        return _Template([run for run in around if run[2]], spans_of)

    def _read_one(self, record: bytes, place: int, columns: list[Array]) -> None:
        layout = layout_of(record)
        for wanted, column in zip(self._wanted, columns, strict=True):
            column[place] = _values(record, layout, wanted)


def _read_column(  # noqa: PLR0913 - one row of a table
    wanted: _Wanted,
    column: Array,
    spans: list[Span],
    matrix: Array,
    group: Sequence[bytes],
    where: Array,
) -> bool:
    """Fill in one feature of a group; False if its values do not fit after all."""
    if wanted.kind == 1:
        for k, (start, end) in enumerate(spans):
            values = np.empty(len(group), object)
            values[:] = [record[start:end] for record in group]
            column[where, k] = values
        return True
    ((start, end),) = spans
    data = np.ascontiguousarray(matrix[:, start:end])
    if wanted.kind == 2:
        numbers = data.view("<f4")
    elif (data < 128).all():
        numbers = data
    else:
        # The last byte of a number is below 128; each row must end with one, and have its count.
        is_last = data < 128
        if not is_last[:, -1].all() or (is_last.sum(axis=1) != wanted.size).any():
            return False
        numbers = read_varints(data.reshape(-1)).reshape(len(data), -1)
    if numbers.shape[1] != wanted.size:
        return False
    column[where] = numbers
    return True


def _read_value(wanted: _Wanted, record: bytes, spans: list[Span]) -> Any:
    """The values of one feature of one record; None if they do not fit after all."""
    if wanted.kind == 1:
        values = [record[start:end] for start, end in spans]
        if not wanted.shape:
            return values[0]
        column = np.empty(wanted.size, object)
        column[:] = values
        return column.reshape(wanted.shape)
    ((start, end),) = spans
    if wanted.kind == 3 and not wanted.shape:
        return read_int64(record, start, end)
    if wanted.kind == 2:
        found = np.frombuffer(record, "<f4", (end - start) // 4, start).astype(np.float32)
        is_whole = not (end - start) % 4
    else:
        found = read_varints(np.frombuffer(record, np.uint8, end - start, start))
        is_whole = record[end - 1] < 128
    if not is_whole or len(found) != wanted.size:
        return None
    return found.reshape(wanted.shape) if wanted.shape else found[0]


def _values(record: bytes, layout: Layout, wanted: _Wanted) -> Array:
    found, spans = layout.get(wanted.key.encode(), (0, []))
    if not found:
        if wanted.default is not None:
            return wanted.default
        raise InvalidArgumentError(
            f"The feature {wanted.key!r} ({KIND_NAMES[wanted.kind]}) is missing from an Example,"
            f" which has {sorted(key.decode(errors='replace') for key in layout)}. Give it a"
            " default_value, or correct its name."
        )
    check_kind(wanted.key, found, wanted.kind)
    values = values_of(record, wanted.kind, spans)
    if len(values) != wanted.size:
        raise InvalidArgumentError(
            f"The feature {wanted.key!r} has {len(values)} values in an Example, but its shape"
            f" {list(wanted.shape)} needs {wanted.size}. Use `VarLenFeature` or `RaggedFeature`"
            " for features of different length."
        )
    return values


def _to_wanted(key: str, feature: FixedLenFeature) -> _Wanted:
    shape = (feature.shape,) if isinstance(feature.shape, int) else tuple(feature.shape)
    size = int(np.prod(shape, dtype=np.int64))
    kind = kind_of(feature.dtype, key)
    default: Array | None = None
    if feature.default_value is not None:
        value = to_array(feature.default_value).astype(dtype_of(kind))
        default = np.broadcast_to(value, shape).reshape(-1)
    return _Wanted(key, kind, shape, size, default)


def check_kind(key: str, found: int, kind: int) -> None:
    """Raise if a feature has another type than declared."""
    if found != kind:
        raise InvalidArgumentError(
            f"The feature {key!r} is declared as {KIND_NAMES[kind]}, but the Example holds"
            f" {KIND_NAMES.get(found, 'an unknown type')} values for it."
        )


def values_of(record: bytes, kind: int, spans: Sequence[Span]) -> Array:
    """The values of one feature of one record."""
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
