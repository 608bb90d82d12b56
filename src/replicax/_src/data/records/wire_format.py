"""Byte-level encodings of TFRecord files, in two parts.

- CRC-32C checksums of many slices of a buffer. google-crc32c is used if installed (the extra
  ``replicax[records]``). Otherwise NumPy: a CRC is linear, so the 64-byte segments of all slices
  are processed in lockstep as lanes of one array, and the CRCs of a slice's segments are combined
  pairwise in a tree, by multiplication with powers of x.
- The protocol buffer wire format of `Example` messages, which nest as Example > Features > map
  entries > Feature > one of three lists. All levels are length-delimited, so one loop parses all.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import DataLossError
from replicax._src.data.leaves import Array

_POLYNOMIAL = 0x82F63B78
_SEGMENT = 64
_ONES = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8


def checksums(data: bytes, starts: Array, lengths: Array) -> Array:
    """Return the CRC-32C of each slice of ``data``, as uint32."""
    native = _native()
    if native is None:
        return _checksums_numpy(data, starts, lengths)
    ends = (starts + lengths).tolist()
    values = [native(data[a:b]) for a, b in zip(starts.tolist(), ends, strict=True)]
    return np.array(values, np.uint32)


def checksum(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    return int(checksums(data, np.array([0]), np.array([len(data)]))[0])


def masked(crc: Array) -> Array:
    """Return checksums in the masked form that TFRecord files store."""
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    return rotated + np.uint32(_MASK_DELTA)


@functools.cache
def _native() -> Callable[[bytes], int] | None:
    """Return the CRC function of google-crc32c; None if its C extension is not installed."""
    try:
        module: Any = importlib.import_module("google_crc32c")
    except ImportError:
        return None
    # google-crc32c falls back to pure Python, which is far slower than NumPy.
    return module.value if module.implementation == "c" else None


def _checksums_numpy(data: bytes, starts: Array, lengths: Array) -> Array:
    """Return the CRC-32C of each slice of `data`; see the module's docstring."""
    segment = min(_SEGMENT, max(4, (int(lengths.max(initial=0)) + 3) // 4 * 4))
    counts = np.maximum(1, (lengths + segment - 1) // segment)
    lanes = _segments(_padded(data, starts, lengths, counts * segment), segment)
    result = lanes if len(lanes) == len(lengths) else _combined(lanes, counts)
    result ^= np.uint32(_ONES)
    # Slices under four bytes are too short for inverting the first four bytes, see `_padded`.
    for place in np.flatnonzero(lengths < 4).tolist():
        start = int(starts[place])
        result[place] = _bytewise(data[start : start + int(lengths[place])])
    return result


def _padded(data: bytes, starts: Array, lengths: Array, sizes: Array) -> Array:
    """Return the slices left-padded with zeros to `sizes`, concatenated.

    Leading zeros do not change a CRC whose initial state is zero. CRC-32C starts with all ones
    instead, which is equivalent to inverting the first four bytes of the slice.
    """
    length = int(lengths[0]) if len(lengths) else 0
    if length >= 4 and (lengths == length).all():
        slices = _equal_slices(np.frombuffer(data, np.uint8), starts, length)
        if slices is not None:
            table = np.zeros((len(starts), int(sizes[0])), np.uint8)
            table[:, -length:] = slices
            table[:, -length : 4 - length or None] ^= 0xFF
            return table.reshape(-1)
    rows = zip((sizes - lengths).tolist(), starts.tolist(), lengths.tolist(), strict=True)
    parts = [
        part for pad, start, length in rows for part in (_ZEROS[:pad], data[start : start + length])
    ]
    result = np.frombuffer(bytearray().join(parts), np.uint8)
    heads = (np.cumsum(sizes) - lengths)[lengths >= 4]
    result[heads[:, None] + np.arange(4)] ^= 0xFF
    return result


def _equal_slices(content: Array, starts: Array, length: int) -> Array | None:
    """Return slices of one length as rows: a view if evenly spaced, a copy if short, else None."""
    first = int(starts[0])
    steps = np.diff(starts)
    step = int(steps[0]) if len(steps) else length
    if step > 0 and (steps == step).all():
        windows = np.lib.stride_tricks.sliding_window_view(content[first:], length)
        return windows[::step][: len(starts)]
    return content[starts[:, None] + np.arange(length)] if length <= _SEGMENT else None


def _segments(padded: Array, size: int) -> Array:
    """Return the CRC of each segment with initial state 0: two table lookups per four bytes."""
    low, high = _word_tables()
    words = np.ascontiguousarray(padded.view("<u4").reshape(-1, size // 4).T)
    count = words.shape[1]
    state, first, second = (np.zeros(count, np.uint32) for _ in range(3))
    place = np.empty(count, np.intp)
    for word in words:
        state ^= word
        np.bitwise_and(state, 0xFFFF, out=place, casting="unsafe")
        low.take(place, out=first, mode="clip")
        np.right_shift(state, 16, out=place, casting="unsafe")
        high.take(place, out=second, mode="clip")
        np.bitwise_xor(first, second, out=state)
    return state


def _combined(lanes: Array, counts: Array) -> Array:
    """Return the CRC of each slice from the CRCs of its segments."""
    result = np.empty(len(counts), np.uint32)
    firsts = np.cumsum(counts) - counts
    widths = 1 << np.ceil(np.log2(counts)).astype(np.int64)
    for width in np.unique(widths).tolist():
        group = np.flatnonzero(widths == width)
        result[group] = _reduced(lanes, firsts[group], counts[group], width)
    return result


def _reduced(lanes: Array, firsts: Array, counts: Array, width: int) -> Array:
    """Combine the CRCs of segments, at most ``width`` (a power of 2) per slice, in a tree."""
    columns = np.arange(width)
    is_used = columns >= (width - counts)[:, None]
    sources = firsts[:, None] + columns - (width - counts)[:, None]
    tree = np.where(is_used, lanes[np.where(is_used, sources, 0)], np.uint32(0))
    level = 0
    while tree.shape[1] > 1:
        tree = _shifted(tree[:, 0::2], level) ^ tree[:, 1::2]
        level += 1
    return tree[:, 0]


def _shifted(crc: Array, level: int) -> Array:
    """Return the CRC after appending 64 * 2**level zero bytes."""
    tables = _shift_tables(level)
    result: Array = tables[0].take(crc & 0xFF)
    for number in (1, 2, 3):
        result ^= tables[number].take((crc >> np.uint32(8 * number)) & 0xFF)
    return result


@functools.cache
def _byte_table() -> Array:
    """Return the usual table of CRC updates for one byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> np.uint32(1)) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return table


@functools.cache
def _word_tables() -> tuple[Array, Array]:
    """Return tables of CRC updates for the lower and upper half of a four-byte word."""
    pairs = np.arange(1 << 16, dtype=np.uint32)
    high = _after_byte(_after_byte(pairs))
    return _after_byte(_after_byte(high)), high


def _after_byte(state: Array) -> Array:
    """Return the CRC state after a zero byte."""
    shifted: Array = _byte_table()[state & 0xFF] ^ (state >> np.uint32(8))
    return shifted


@functools.cache
def _shift_columns(level: int) -> Array:
    """Return the matrix of `_shifted` over GF(2): the image of each of the 32 bits."""
    if level:
        before = _shift_columns(level - 1)
        return _combine(before, before)
    state = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(_SEGMENT):
        state = _after_byte(state)
    return state


def _combine(columns: Array, states: Array) -> Array:
    """Multiply the GF(2) matrix with these columns by each state."""
    bits = (states[:, None] >> np.arange(32, dtype=np.uint32)) & 1
    result: Array = np.bitwise_xor.reduce(np.where(bits, columns, np.uint32(0)), axis=1)
    return result


@functools.cache
def _shift_tables(level: int) -> Array:
    """Return the matrix of `_shifted` as lookup tables, one for each byte of a CRC."""
    columns = _shift_columns(level)
    numbers = np.arange(256, dtype=np.uint32)
    return np.stack([_combine(columns, numbers << np.uint32(8 * k)) for k in range(4)])


def _bytewise(data: bytes) -> int:
    """Return the CRC-32C of `data`, byte by byte."""
    table, crc = _byte_table(), _ONES
    for byte in data:
        crc = int(table[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
    return crc ^ _ONES


_ZEROS = bytes(_SEGMENT)


Span = tuple[int, int]
Layout = dict[bytes, tuple[int, list[Span]]]

_LENGTH_DELIMITED = 2


def layout_of(record: bytes) -> Layout:
    """Return the type of each feature and the byte spans of its values.

    A span is one string, or a run of packed numbers.

    Raises:
        DataLossError: The record is not a serialized Example.
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
    """Return the type of a Feature message and the spans of its values."""
    kind, spans = 0, list[Span]()
    for number, span in fields(record, *feature) if feature else ():
        if kind != number:  # the lists are a oneof: the last one wins
            kind, spans = number, []
        spans.extend(inner for n, inner in fields(record, *span) if n == 1)
    return kind, spans


def _parts(record: bytes, start: int, end: int, field: int) -> Iterator[Span]:
    """Yield the spans of all occurrences of a field."""
    return (span for number, span in fields(record, start, end) if number == field)


def fields(  # noqa: C901 - varints are read in place: this is done for every record
    record: bytes, start: int, end: int
) -> list[tuple[int, Span]]:
    """Return the field number and the span of the content of each field of a message.

    Raises:
        ValueError, IndexError: The message is malformed.
    """
    found: list[tuple[int, Span]] = []
    offset = start
    while offset < end:
        tag, offset = record[offset], offset + 1
        if tag > 127:
            tag, offset = varint(record, offset - 1)
        wire = tag & 7
        if wire == _LENGTH_DELIMITED:
            length, offset = record[offset], offset + 1
            if length > 127:
                length, offset = varint(record, offset - 1)
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
        found.append((tag >> 3, (offset, offset + length)))
        offset += length
    return found


def varint(record: bytes, offset: int) -> tuple[int, int]:
    """Return the varint at ``offset`` and the offset after it."""
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
    """Decode packed varints, a uint8 array, as int64."""
    is_last = data < 128
    if is_last.all():
        return data.astype(np.int64)
    if not is_last.any():
        return np.empty(0, np.int64)
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    result = np.zeros(len(ends), np.uint64)
    for step in range(int((ends - starts).max()) + 1):
        reaches = starts + step <= ends
        low = (data[starts[reaches] + step] & 127).astype(np.uint64)
        result[reaches] |= low << np.uint64(7 * step)
    return result.view(np.int64)


def read_int64(record: bytes, start: int, end: int) -> np.int64 | None:
    """Return the single varint that fills the span, as an int64; None if it does not fill it."""
    number = 0
    for place in range(start, end if end - start <= 10 else start):
        byte = record[place]
        number |= (byte & 127) << 7 * (place - start)
        if byte < 128:
            whole = np.uint64(number & 0xFFFF_FFFF_FFFF_FFFF)
            return whole.astype(np.int64) if place + 1 == end else None
    return None


def write_varint(value: int) -> bytes:
    """Encode an int as a varint; negative ones as 64-bit two's complement."""
    value &= (1 << 64) - 1
    parts = bytearray()
    while value > 127:
        parts.append((value & 127) | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def write_field(number: int, content: bytes) -> bytes:
    """Encode a length-delimited field."""
    return write_varint(number << 3 | _LENGTH_DELIMITED) + write_varint(len(content)) + content


def write_feature(kind: int, values: Sequence[Any] | Array) -> bytes:
    """Encode a Feature message with one list of `values`."""
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
    """Encode an Example message from encoded Feature messages."""
    entries = (
        write_field(1, write_field(1, key.encode()) + write_field(2, feature))
        for key, feature in features.items()
    )
    return write_field(1, b"".join(entries))
