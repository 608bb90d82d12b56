"""File formats of records: TFRecord, lines of text and fixed-length records.

Files are read in large chunks and decompressed. A TFRecord file stores for each record its length,
a checksum of the length, the data, and a checksum of the data.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import DataLossError, InvalidArgumentError
from replicax._src.data.leaves import Array
from replicax._src.data.records.wire_format import checksums, masked
from replicax._src.files import storage
from replicax._src.files.paths import is_url

_CHUNK = 1 << 20
_ANY_HEADER = 47  # zlib's wbits for a window of up to 32 KB and a gzip or zlib header

COMPRESSIONS = ("", "GZIP", "ZLIB")


def to_compression(value: Any, verb: str) -> str:
    """Return a validated compression type; "" for None, no compression."""
    name = "" if value is None else str(value)
    if name not in COMPRESSIONS:
        raise InvalidArgumentError(
            f"{verb}(compression_type={value!r}): must be '' (or None), 'GZIP' or 'ZLIB'."
        )
    return name


def chunks(path: str, compression: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file in chunks."""
    with storage.open_file(path) if is_url(path) else open(path, "rb", buffering=0) as file:
        raw = iter(lambda: file.read(_CHUNK), b"")
        yield from _decompressed(raw, path, compression) if compression else raw


def _decompressed(raw: Iterator[bytes], path: str, compression: str) -> Iterator[bytes]:
    """Yield decompressed chunks of at most `_CHUNK` bytes, whatever the compression ratio."""
    worker = zlib.decompressobj(_ANY_HEADER)
    offset = 0
    is_incomplete = False
    for chunk in raw:
        data, has_more = chunk, True
        while data or has_more:
            if worker.eof:  # a file may consist of several concatenated streams
                worker = zlib.decompressobj(_ANY_HEADER)
            try:
                content = worker.decompress(data, _CHUNK)
            except zlib.error as error:
                raise DataLossError(
                    f"{path!r} is corrupt: its {compression} stream breaks between byte {offset}"
                    f" and {offset + len(chunk)} of the compressed file ({error})."
                ) from None
            if content:
                yield content
            data = worker.unused_data if worker.eof else worker.unconsumed_tail
            has_more = not worker.eof and len(content) == _CHUNK
        is_incomplete = not worker.eof
        offset += len(chunk)
    if is_incomplete:
        raise DataLossError(
            f"{path!r} is cut off: its {compression} stream has no end at byte {offset}, the end"
            " of the compressed file."
        )


@final
@dataclass(frozen=True)
class TextFormat:
    """Lines without line endings; all carriage returns are removed, as in TensorFlow."""

    compression: str = ""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Yield the lines of the file, in lists of one chunk each."""
        rest: list[bytes] = []
        for chunk in chunks(path, self.compression):
            lines = chunk.split(b"\n")
            if len(lines) == 1:
                rest.append(chunk)
                continue
            lines[0] = b"".join(rest) + lines[0]
            rest = [lines.pop()]
            yield _without_returns(lines) if b"\r" in chunk or b"\r" in lines[0] else lines
        last = b"".join(rest)
        if last:
            yield _without_returns([last])


def _without_returns(lines: list[bytes]) -> list[bytes]:
    return [line.replace(b"\r", b"") for line in lines]


@final
@dataclass(frozen=True)
class FixedLengthFormat:
    """Records of ``record_bytes`` bytes, between a header and a footer that are skipped."""

    record_bytes: int
    header_bytes: int = 0
    footer_bytes: int = 0
    compression: str = ""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Yield lists of records."""
        size, skip = self.record_bytes, self.header_bytes
        data, total = b"", 0
        for chunk in chunks(path, self.compression):
            data, total = data + chunk, total + len(chunk)
            dropped = min(skip, len(data))
            skip, data = skip - dropped, data[dropped:]
            # The last bytes read so far may be the footer: keep that many back.
            complete = max(0, (len(data) - self.footer_bytes) // size * size)
            if complete:
                yield [data[i : i + size] for i in range(0, complete, size)]
                data = data[complete:]
        if skip or len(data) != self.footer_bytes:
            body = total - self.header_bytes - self.footer_bytes
            raise InvalidArgumentError(
                f"{path!r} has {total} bytes; without its header of {self.header_bytes} and footer"
                f" of {self.footer_bytes} there are {body}, which is not a multiple of the record"
                f" length {size}."
            )


_LENGTH = struct.Struct("<Q")
_HEADER = 12  # the length and its checksum
_FOOTER = 4  # the checksum of the data


@final
@dataclass(frozen=True)
class TFRecordFormat:
    """The TFRecord format; every checksum is verified."""

    compression: str = ""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Yield lists of records; intact records before a corrupt one are yielded first."""
        parts: list[bytes] = []
        # Bytes buffered, bytes needed for the next record, and file offset of the buffer.
        have, need, base = 0, _HEADER, 0
        for chunk in chunks(path, self.compression):
            parts.append(chunk)
            have += len(chunk)
            if have < need:
                continue
            data = b"".join(parts)
            frames = _frames(data)
            yield from _verified(data, frames, path, base)
            used = int(frames[-1].sum()) + _HEADER + _FOOTER if len(frames) else 0
            rest = data[used:]
            base += used
            need = _needed(rest, path, base)
            parts, have = [rest], len(rest)
        if have:
            raise _cut_off(b"".join(parts), path, base)


def _frames(data: bytes) -> Array:
    """Return the offset and data length of each complete record, one per row."""
    frames: list[tuple[int, int]] = []
    offset, size = 0, len(data)
    unpack = _LENGTH.unpack_from
    while size - offset >= _HEADER:
        (length,) = unpack(data, offset)
        end = offset + length + _HEADER + _FOOTER
        if end > size:
            break
        frames.append((offset, length))
        offset = end
    return np.array(frames, np.int64).reshape(-1, 2)


def _verified(data: bytes, frames: Array, path: str, base: int) -> Iterator[list[bytes]]:
    """Yield the records up to the first corrupt one, for which `DataLossError` is raised."""
    if not len(frames):
        return
    starts, lengths = frames[:, 0], frames[:, 1]
    content = np.frombuffer(data, np.uint8)
    is_good_length = _good_lengths(data, content, starts)
    bodies = starts + _HEADER
    stored = _stored(content, bodies + lengths)
    is_good_data = masked(checksums(data, bodies, lengths)) == stored
    bad = np.flatnonzero(~(is_good_length & is_good_data))
    good = int(bad[0]) if len(bad) else len(frames)
    ends = bodies + lengths
    if good:
        pairs = zip(bodies[:good].tolist(), ends[:good].tolist(), strict=True)
        yield [data[start:end] for start, end in pairs]
    if len(bad):
        what = "data" if is_good_length[good] else "length"
        raise _corrupt(path, base + int(starts[good]), what, int(lengths[good]))


def _needed(rest: bytes, path: str, base: int) -> int:
    """Return how many bytes the next record needs.

    The checksum of the length is verified first: a corrupt length could make us wait for, and
    buffer, the rest of the file.
    """
    if len(rest) < _HEADER:
        return _HEADER
    (length,) = _LENGTH.unpack_from(rest, 0)
    if not _good_lengths(rest, np.frombuffer(rest, np.uint8), np.array([0]))[0]:
        raise _corrupt(path, base, "length", length)
    return int(length) + _HEADER + _FOOTER


def _good_lengths(data: bytes, content: Array, starts: Array) -> Array:
    """Return for each record whether the checksum of its length is right."""
    found = masked(checksums(data, starts, np.full(len(starts), _LENGTH.size)))
    result: Array = found == _stored(content, starts + _LENGTH.size)
    return result


def _stored(content: Array, offsets: Array) -> Array:
    """Return the little-endian uint32 at each offset."""
    return np.ascontiguousarray(content[offsets[:, None] + np.arange(4)]).view("<u4")[:, 0]


def _corrupt(path: str, offset: int, what: str, length: int) -> DataLossError:
    return DataLossError(
        f"{path!r} is corrupt: the checksum of the {what} of the record at byte {offset} is wrong"
        f" (its stored length is {length} bytes). The records before it were delivered; write the"
        " file again, or check `compression_type`."
    )


def _cut_off(rest: bytes, path: str, offset: int) -> DataLossError:
    if len(rest) < _HEADER:
        expected = f"its header needs {_HEADER}"
    else:
        (length,) = _LENGTH.unpack_from(rest, 0)
        expected = f"it needs {length + _HEADER + _FOOTER}"
    return DataLossError(
        f"{path!r} is cut off: the record at byte {offset} has {len(rest)} bytes, but {expected}."
        " The records before it were delivered; copy or write the file again."
    )
