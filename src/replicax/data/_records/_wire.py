"""The wire format of `Example` messages, read and written.

An Example is nested: Example > Features > entries of a map > Feature > one of three lists. All
levels are length-delimited, so one small loop reads them all.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from replicax.data._errors import DataLossError
from replicax.data._leaves import Array

Span = tuple[int, int]
Layout = dict[bytes, tuple[int, list[Span]]]

_LENGTH_DELIMITED = 2


def layout_of(record: bytes) -> Layout:
    """Where the values of each feature stand: its type, and spans of bytes.

    A span is one string, or a run of packed numbers.
    """
    layout: Layout = {}
    try:
        for features in _parts(record, 0, len(record), 1):
            for entry in _parts(record, *features, 1):
                key, feature = b"", None
                for number, span in fields(record, *entry):
                    if number == 1:
                        key = record[span[0] : span[1]]
                    elif number == 2:
                        feature = span
                layout[key] = _values(record, feature)
    except (IndexError, ValueError) as error:
        raise DataLossError(
            f"These {len(record)} bytes are not a serialized Example ({error}): {record[:40]!r}."
            " Is the file one of Examples, and is `compression_type` right?"
        ) from None
    return layout


def _values(record: bytes, feature: Span | None) -> tuple[int, list[Span]]:
    kind, spans = 0, list[Span]()
    for number, span in fields(record, *feature) if feature else ():
        if kind != number:
            kind, spans = number, []
        spans.extend(inner for n, inner in fields(record, *span) if n == 1)
    return kind, spans


def _parts(record: bytes, start: int, end: int, wanted: int) -> Iterator[Span]:
    return (span for number, span in fields(record, start, end) if number == wanted)


def fields(record: bytes, start: int, end: int) -> Iterator[tuple[int, Span]]:
    """The number and the bytes of each field."""
    offset = start
    while offset < end:
        tag, offset = varint(record, offset)
        wire = tag & 7
        if wire == _LENGTH_DELIMITED:
            length, offset = varint(record, offset)
        elif wire == 5:
            length = 4
        elif wire == 1:
            length = 8
        elif wire == 0:
            length = varint(record, offset)[1] - offset
        else:
            raise ValueError(f"wire type {wire} at byte {offset}")
        if offset + length > end:
            raise ValueError(f"a field at byte {offset} reaches beyond its message")
        yield tag >> 3, (offset, offset + length)
        offset += length


def varint(record: bytes, offset: int) -> tuple[int, int]:
    """The number at ``offset``, and where it ends."""
    byte = record[offset]
    if byte < 128:
        return byte, offset + 1
    result, shift = byte & 127, 7
    while True:
        offset += 1
        byte = record[offset]
        result |= (byte & 127) << shift
        if byte < 128:
            return result, offset + 1
        shift += 7
        if shift > 63:
            raise ValueError(f"a number without end at byte {offset}")


def read_varints(data: Array) -> Array:
    """Packed numbers -> int64; ``data`` is uint8."""
    is_last = data < 128
    if is_last.all():
        return data.astype(np.int64)
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    result = np.zeros(len(ends), np.uint64)
    for step in range(int((ends - starts).max()) + 1):
        reaches = starts + step <= ends
        low = (data[starts[reaches] + step] & 127).astype(np.uint64)
        result[reaches] |= low << np.uint64(7 * step)
    return result.view(np.int64)


def write_varint(value: int) -> bytes:
    """One number; negative ones as 64-bit two's complement."""
    value &= (1 << 64) - 1
    parts = bytearray()
    while value > 127:
        parts.append((value & 127) | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def write_field(number: int, content: bytes) -> bytes:
    """One length-delimited field."""
    return write_varint(number << 3 | _LENGTH_DELIMITED) + write_varint(len(content)) + content


def write_feature(kind: int, values: Sequence[Any] | Array) -> bytes:
    """A Feature message."""
    if kind == 1:
        content = b"".join(write_field(1, value) for value in values)
    elif not len(values):
        content = b""
    elif kind == 2:
        content = write_field(1, np.asarray(values, "<f4").tobytes())
    else:
        packed = b"".join(write_varint(int(value)) for value in values)
        content = write_field(1, packed)
    return write_field(kind, content)


def write_example(features: dict[str, bytes]) -> bytes:
    """An Example message from Feature messages."""
    entries = (
        write_field(1, write_field(1, key.encode()) + write_field(2, feature))
        for key, feature in features.items()
    )
    return write_field(1, b"".join(entries))
