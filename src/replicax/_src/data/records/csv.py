"""CSV: splitting files into records and records into fields, and parsing fields."""

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.leaves import Array, to_array
from replicax._src.data.records.features import empty_value
from replicax._src.data.records.tfrecord import chunks

_DTYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float64, np.int32, np.int64, object))
_INT = re.compile(rb"[+-]?[0-9]+")
_QUOTE = b'"'
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Column:
    """The dtype and default of a column; a column whose default is None is required."""

    dtype: np.dtype[Any]
    default: Any

    @classmethod
    def of(cls, default: Any, verb: str) -> "Column":
        """Return the column for a user's default: a scalar or list; empty if required."""
        values = to_array(default)
        if values.dtype not in _DTYPES or values.size > 1:
            raise InvalidArgumentError(
                f"{verb}(): a column is described by one default of float32, float64, int32, int64"
                f" or a string, or by an empty array of that dtype if a value is required; got"
                f" {default!r:.60}."
            )
        return cls(values.dtype, values.reshape(-1)[0] if values.size else None)

    def read(self, field: bytes, na_value: bytes, where: str) -> Any:
        """Parse a field; `where` names it in error messages."""
        if field in (b"", na_value):
            if self.default is None:
                raise InvalidArgumentError(
                    f"{where} is required, but it is missing. Give a default for this column."
                )
            return self.default
        if self.dtype.kind == "O":
            return field
        text = field.strip()
        try:
            if self.dtype.kind == "f" and b"_" not in text:
                is_hex = b"x" in text or b"X" in text
                number = float.fromhex(text.decode()) if is_hex else float(text)
                if abs(number) <= _MAX_FLOAT32:
                    return self.dtype.type(number)
                with np.errstate(over="ignore"):  # overflows to infinity as a float32
                    return self.dtype.type(number)
            if _INT.fullmatch(text):
                return self.dtype.type(int(text))
        except (ValueError, OverflowError):
            pass
        raise InvalidArgumentError(f"{where} is not of dtype {self.dtype}: {field[:40]!r}.")


@dataclass(frozen=True)
class CsvRules:
    """How to split records into fields, and which columns to parse."""

    columns: tuple[Column, ...]
    delimiter: bytes = b","
    has_quotes: bool = True
    na_value: bytes = b""
    selected: tuple[int, ...] | None = None

    @classmethod
    def of(cls, defaults: Sequence[Any], verb: str, **options: Any) -> "CsvRules":
        """Return the rules for a user's arguments; raise `InvalidArgumentError` if invalid."""
        delimiter = options.pop("field_delim").encode()
        if len(delimiter) != 1:
            raise InvalidArgumentError(f"{verb}(field_delim={delimiter!r}): give one byte.")
        selected = options.pop("selected")
        chosen = None if selected is None else tuple(int(place) for place in selected)
        if chosen is not None and list(chosen) != sorted(set(chosen)):
            raise InvalidArgumentError(
                f"{verb}(): the indices of the chosen columns must increase, got {list(chosen)}."
            )
        columns = tuple(Column.of(default, verb) for default in defaults)
        if chosen is not None and len(chosen) != len(columns):
            raise InvalidArgumentError(
                f"{verb}(): {len(chosen)} columns are chosen, and {len(columns)} are described in"
                " record_defaults."
            )
        has_quotes, na_value = options["use_quote_delim"], options["na_value"].encode()
        return cls(columns, delimiter, has_quotes, na_value, chosen)

    def values(self, record: bytes | None, number: int) -> list[Any]:
        """Parse record `number`; None means a record of one empty field, from an empty line."""
        fields = [b""] if record is None else self.fields(record, number)
        if self.selected is not None:
            fields = [fields[place] for place in self.selected if place < len(fields)]
        if len(fields) != len(self.columns):
            raise InvalidArgumentError(
                f"Expected {len(self.columns)} fields, but record {number} has {len(fields)}:"
                f" {(record or b'')[:60]!r}."
            )
        pairs = enumerate(zip(self.columns, fields, strict=True))
        return [
            column.read(field, self.na_value, f"Field {place} of record {number}")
            for place, (column, field) in pairs
        ]

    def fields(self, record: bytes, number: int) -> list[bytes]:
        """Split record `number` into fields."""
        if not record:
            return []
        if not self.has_quotes:
            return record.split(self.delimiter)
        if _QUOTE not in record and b"\n" not in record and b"\r" not in record:
            return record.split(self.delimiter)
        found: list[bytes] = []
        place = 0
        while place <= len(record):
            is_quoted = record[place : place + 1] == _QUOTE
            field, place = (self._quoted if is_quoted else self._plain)(record, place, number)
            found.append(field)
        return found

    def _plain(self, record: bytes, start: int, number: int) -> tuple[bytes, int]:
        """Return the unquoted field at `start` and the start of the next field."""
        end = record.find(self.delimiter, start)
        end = len(record) if end < 0 else end
        field = record[start:end]
        if any(sign in field for sign in (_QUOTE, b"\n", b"\r")):
            raise InvalidArgumentError(
                f"Record {number} has a quote or the end of a line in a field without quotes around"
                f" it: {field[:40]!r}."
            )
        return field, end + 1

    def _quoted(self, record: bytes, start: int, number: int) -> tuple[bytes, int]:
        """Return the quoted field at `start`, unescaped, and the start of the next field."""
        end = start + 1
        while True:
            end = record.find(_QUOTE, end)
            if end < 0:
                raise InvalidArgumentError(
                    f"Record {number} has a quoted field without its closing quote:"
                    f" {record[start:][:40]!r}."
                )
            if record[end + 1 : end + 2] != _QUOTE:
                break
            end += 2
        if record[end + 1 : end + 2] not in (b"", self.delimiter):
            raise InvalidArgumentError(
                f"Record {number} has a quote inside of a field, which is written twice there:"
                f" {record[start:][:40]!r}."
            )
        return record[start + 1 : end].replace(_QUOTE * 2, _QUOTE), end + 2


def decode_csv(  # noqa: PLR0913
    records: Any,
    record_defaults: Sequence[Any],
    field_delim: str = ",",
    use_quote_delim: bool = True,  # noqa: FBT001, FBT002
    na_value: str = "",
    select_cols: Sequence[int] | None = None,
    name: str | None = None,
) -> list[Any]:
    """Parse CSV records into one array per column.

    Args:
        records: One record, or an array of records.
        record_defaults: For each column its default, which also determines its dtype; an empty
            array for a required column.
        field_delim: The delimiter between fields.
        use_quote_delim: Whether fields may be enclosed in double quotes.
        na_value: A string that means a missing value, in addition to the empty string.
        select_cols: Indices of the columns to parse; all if None.
        name: Ignored.

    Returns:
        A list of arrays, each shaped like ``records``.

    Raises:
        InvalidArgumentError: A record has the wrong number of fields, or a field is invalid.

    Example:
        >>> rx.io.decode_csv(["1,2.5,a", "3,,b"], [[0], [0.0], [""]])[:2]
        [array([1, 3], dtype=int32), array([2.5, 0. ], dtype=float32)]
    """
    del name
    rules = CsvRules.of(
        record_defaults,
        "decode_csv",
        field_delim=field_delim,
        use_quote_delim=use_quote_delim,
        na_value=na_value,
        selected=select_cols,
    )
    lines = to_array(records)
    rows = [rules.values(record, k) for k, record in enumerate(lines.reshape(-1).tolist())]
    results: list[Any] = []
    for place, column in enumerate(rules.columns):
        result: Array = np.full(len(rows), empty_value(column.dtype), column.dtype)
        result[:] = [row[place] for row in rows]
        results.append(result.reshape(lines.shape)[()])
    return results


@final
@dataclass(frozen=True)
class CsvFormat:
    r"""The file format of CSV files: splits them into records, keeping quotes.

    A line ends with ``\n``, ``\r`` or both. A field that begins with a quote ends with a quote that
    is followed by a delimiter or the end of a line; line breaks before that belong to the field. A
    stray quote elsewhere invalidates only its record.
    """

    has_header: bool
    has_quotes: bool
    delimiter: bytes = b","
    compression: str = ""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Yield lists of records without the header; a malformed header stays, as a bad record."""
        is_header = self.has_header
        for records in self._records(path):
            yield records[1:] if is_header and self._is_well_formed(records[0]) else records
            is_header = False
        if is_header:
            raise InvalidArgumentError(
                f"{path!r} is empty, where a line with the names of its columns was expected. Leave"
                " the file out, or pass header=False."
            )

    def _is_well_formed(self, record: bytes) -> bool:
        try:
            CsvRules((), self.delimiter, self.has_quotes).fields(record, 0)
        except InvalidArgumentError:
            return False
        return True

    def _records(self, path: str) -> Iterator[list[bytes]]:
        """Yield lists of records, the header included."""
        pending: list[bytes] = []  # the start of a record whose end has not been read yet
        size, enough = 0, 0
        for chunk in chunks(path, self.compression):
            pending.append(chunk)
            size += len(chunk)
            if size < enough:
                continue
            records, rest = self._split(b"".join(pending))
            # Wait until the text has doubled: searching an unclosed quoted field again with every
            # chunk would take quadratic time.
            pending, size, enough = [rest], len(rest), 2 * len(rest)
            if records:
                yield records
        records, rest = self._split(b"".join(pending), is_last=True)
        if records:
            yield records

    def _split(self, text: bytes, *, is_last: bool = False) -> tuple[list[bytes], bytes]:
        """Return the complete records in ``text`` and the rest, which is used up at the end."""
        if self.has_quotes and _QUOTE in text:
            return self._split_quoted(text, is_last=is_last)
        # A final \r may be the first half of a \r\n that the next chunk completes.
        carry = b"" if is_last or text[-1:] != b"\r" else b"\r"
        if b"\r" in text:
            text = text[: len(text) - len(carry)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *records, rest = text.split(b"\n")
        if is_last and rest:
            records.append(rest)
        return records, rest + carry

    def _split_quoted(self, text: bytes, *, is_last: bool) -> tuple[list[bytes], bytes]:
        records: list[bytes] = []
        place = 0
        for match in _record_pattern(self.delimiter).finditer(text):
            end = match.end()
            if not is_last and (not match["end"] or (match["end"] == b"\r" and end == len(text))):
                break
            if end == match.start():  # the empty match after the last line
                break
            records.append(match["record"])
            place = end
        return records, text[place:]


@functools.cache
def _record_pattern(delimiter: bytes) -> re.Pattern[bytes]:
    """Return a pattern that matches a record and its line ending, which may be missing."""
    # Possessive quantifiers (*+) prevent backtracking, which would be slow on long fields.
    others = b"[^\r\n" + re.escape(delimiter) + b"]"
    quoted = b'"[^"]*+(?:"' + others + b'[^"]*+)*+"?+'
    plain = b'(?!")' + others + b"*+"
    field = b"(?:" + quoted + b"|" + plain + b")"
    fields = field + b"(?:" + re.escape(delimiter) + field + b")*+"
    return re.compile(b"(?P<record>" + fields + b")(?P<end>\\r\\n|\\n|\\r|)")
