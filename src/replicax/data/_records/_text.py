"""Text files, line by line, and files of pieces of a fixed length."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from replicax.data._errors import InvalidArgumentError
from replicax.data._records._chunks import chunks


@final
@dataclass(frozen=True)
class TextFormat:
    """Lines without their ends; carriage returns are left out, as TensorFlow does."""

    compression: str = ""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Lists of lines."""
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
    """Records of ``record_bytes``, between a header and a footer to leave out."""

    record_bytes: int
    header_bytes: int = 0
    footer_bytes: int = 0
    compression: str = ""

    def read(self, path: str) -> Iterator[list[bytes]]:
        """Lists of records."""
        size, skip = self.record_bytes, self.header_bytes
        data, total = b"", 0
        for chunk in chunks(path, self.compression):
            data, total = data + chunk, total + len(chunk)
            dropped = min(skip, len(data))
            skip, data = skip - dropped, data[dropped:]
            whole = max(0, (len(data) - self.footer_bytes) // size * size)
            if whole:
                yield [data[i : i + size] for i in range(0, whole, size)]
                data = data[whole:]
        if skip or len(data) != self.footer_bytes:
            body = total - self.header_bytes - self.footer_bytes
            raise InvalidArgumentError(
                f"{path!r} has {total} bytes; without its header of {self.header_bytes} and footer"
                f" of {self.footer_bytes} there are {body}, which is not a multiple of the record"
                f" length {size}."
            )
