"""The bytes of a file in large pieces, decompressed."""

import zlib
from collections.abc import Iterator
from typing import Any

from replicax.data._errors import DataLossError, InvalidArgumentError

_CHUNK = 1 << 20
_ANY_HEADER = 47  # zlib's code for: up to 32 KB window, gzip or zlib header

COMPRESSIONS = ("", "GZIP", "ZLIB")


def to_compression(value: Any, verb: str) -> str:
    """A compression type as its name; None is no compression."""
    name = "" if value is None else str(value)
    if name not in COMPRESSIONS:
        raise InvalidArgumentError(
            f"{verb}(compression_type={value!r}): must be '' (or None), 'GZIP' or 'ZLIB'."
        )
    return name


def chunks(path: str, compression: str) -> Iterator[bytes]:
    """The content of a file, piece by piece."""
    with open(path, "rb", buffering=0) as file:
        raw = iter(lambda: file.read(_CHUNK), b"")
        yield from _decompressed(raw, path, compression) if compression else raw


def _decompressed(raw: Iterator[bytes], path: str, compression: str) -> Iterator[bytes]:
    """Pieces of at most `_CHUNK` bytes, however much a piece of the file stands for."""
    worker = zlib.decompressobj(_ANY_HEADER)
    offset = 0
    is_open = False
    for chunk in raw:
        data, has_more = chunk, True
        while data or has_more:
            if worker.eof:  # several compressed streams may follow each other in one file
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
        is_open = not worker.eof
        offset += len(chunk)
    if is_open:
        raise DataLossError(
            f"{path!r} is cut off: its {compression} stream has no end at byte {offset}, the end"
            " of the compressed file."
        )
