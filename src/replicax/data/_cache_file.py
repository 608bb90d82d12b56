"""The file of a cache: blocks of columns, each array in NumPy's own format; no pickles.

A file appears under its name only when it is complete, by renaming. It is a row of frames: the
length of the content, the content, and a checksum of all frames so far, so that no frame can be
changed, lost or exchanged unnoticed. The first frame says how elements are built, an empty one ends
the file.
"""

import io
import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from replicax.data._blocks import Block, ColumnBlock, RowBlock
from replicax.data._errors import DataLossError
from replicax.data._leaves import Array
from replicax.data._node import Node
from replicax.data._structure import Structure, flatten, from_json, to_json

_MAGIC = b"replicax-cache-2\n"
_SIZE = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<QI")  # rows of the block, arrays of the block


class writing:  # noqa: N801 - reads as a verb: `file = writing(path)`
    """A file that is being written beside its final name.

    The name until then cannot be foreseen, and nothing that stands there already is opened: nobody
    can make us write elsewhere.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        self._part = f"{path}.{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        self.file: IO[bytes] = os.fdopen(os.open(self._part, flags, 0o666), "wb")
        self.file.write(_MAGIC)
        self._checksum = zlib.crc32(_MAGIC)
        self._has_structure = False

    def add(self, block: Block) -> None:
        """Add one block; elements that differ in shape become blocks of one."""
        if not self._has_structure:
            self._write_structure(to_json(block.structure))
        if block.is_columnar():
            self._write_frame(_content(block.columns(), len(block)))
            return
        for row in block.rows():
            self._write_frame(_content(RowBlock(block.structure, [row]).columns(), 1))

    def commit(self) -> None:
        """Give the file its name."""
        if not self._has_structure:
            self._write_structure(None)
        self._write_frame(b"")
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self._part, self._path)

    def abandon(self) -> None:
        """Throw the file away."""
        self.file.close()
        if os.path.lexists(self._part):
            os.remove(self._part)

    def _write_structure(self, stored: Any) -> None:
        self._has_structure = True
        self._write_frame(json.dumps(stored).encode())

    def _write_frame(self, content: bytes) -> None:
        size = _SIZE.pack(len(content))
        self._checksum = zlib.crc32(content, zlib.crc32(size, self._checksum))
        self.file.write(size)
        self.file.write(content)
        self.file.write(_CHECKSUM.pack(self._checksum))


def read_blocks(path: str, node: Node) -> Iterator[Block]:
    """The blocks of a file; ``node`` is what was kept."""
    with open(path, "rb") as file:
        frames = _frames(file, path)
        first = next(frames)
        try:
            # Types of named tuples cannot be stored; the pipeline itself knows them.
            structure = from_json(json.loads(first)) or flatten(node.element_spec)[0]
            for content in frames:
                rows, columns = _columns(io.BytesIO(content))
                if len(columns) != structure.num_leaves:
                    raise DataLossError(
                        f"The cache file {path!r} holds elements of {len(columns)} parts, but this"
                        f" dataset has {structure.num_leaves}: it was written by another pipeline."
                        " Delete it, or choose another name."
                    )
                yield _as_block(structure, columns, rows)
        except (ValueError, TypeError, LookupError, struct.error) as error:
            raise DataLossError(
                f"The cache file {path!r} is whole, but not one that this version of replicax can"
                f" read ({error}). Delete it; the next pass writes it again."
            ) from error


def _frames(file: IO[bytes], path: str) -> Iterator[bytes]:
    """The contents of all frames, each checked before it is given."""
    end = os.fstat(file.fileno()).st_size
    if file.read(len(_MAGIC)) != _MAGIC:
        raise DataLossError(
            f"{path!r} is not a cache file of this version of replicax. Delete it, or choose"
            " another name for `cache(filename)`."
        )
    checksum = zlib.crc32(_MAGIC)
    content: bytes | None = None
    while content != b"":
        start = file.tell()
        size = _read(file, _SIZE.size, path, end)
        content = _read(file, _SIZE.unpack(size)[0], path, end)
        checksum = zlib.crc32(content, zlib.crc32(size, checksum))
        if _CHECKSUM.unpack(_read(file, _CHECKSUM.size, path, end))[0] != checksum:
            raise DataLossError(
                f"The cache file {path!r} is damaged: the checksum of the part that begins at byte"
                f" {start} is wrong. Delete it; the next pass writes it again."
            )
        if content:
            yield content
    if file.tell() != end:
        raise DataLossError(
            f"The cache file {path!r} is damaged: {end - file.tell()} bytes follow its end at byte"
            f" {file.tell()}. Delete it; the next pass writes it again."
        )


def _as_block(structure: Structure, columns: list[Array], rows: int) -> Block:
    if rows == 1:  # may be one of many shapes; rows join with anything
        return RowBlock(structure, [tuple(column[0] for column in columns)])
    return ColumnBlock(structure, columns, rows)


def _content(columns: list[Array], rows: int) -> bytes:
    file = io.BytesIO()
    file.write(_HEADER.pack(rows, len(columns)))
    for column in columns:
        if column.dtype == object:
            file.write(b"S")
            items = column.reshape(-1).tolist()
            _save(file, np.array(column.shape, np.int64))
            _save(file, np.array([len(item) for item in items], np.int64))
            file.write(b"".join(items))
        else:
            file.write(b"N")
            _save(file, column)
    return file.getvalue()


def _save(file: IO[bytes], array: Array) -> None:
    # ml_dtypes (bfloat16 and kin) have no name in NumPy's format: keep their bytes and the name.
    is_native = array.dtype.kind != "V" and array.dtype.isbuiltin == 1
    name = b"" if is_native else array.dtype.name.encode()
    file.write(struct.pack("<B", len(name)) + name)
    data = array if is_native else np.ascontiguousarray(array)[..., None].view(np.uint8)
    np.lib.format.write_array(file, np.ascontiguousarray(data), allow_pickle=False)


def _columns(file: io.BytesIO) -> tuple[int, list[Array]]:
    rows, count = _HEADER.unpack(file.read(_HEADER.size))
    return rows, [_load_column(file) for _ in range(count)]


def _load_column(file: io.BytesIO) -> Array:
    if file.read(1) == b"N":
        return _load(file)
    shape, lengths = _load(file), _load(file)
    result = np.empty(len(lengths), object)
    for place, length in enumerate(lengths.tolist()):
        result[place] = file.read(length)
    return result.reshape(shape.tolist())


def _load(file: io.BytesIO) -> Array:
    (length,) = struct.unpack("<B", file.read(1))
    name = file.read(length).decode()
    array: Array = np.lib.format.read_array(file, allow_pickle=False)
    if not name:
        return array
    dtype: np.dtype[Any] = np.dtype(name)
    return array.view(dtype).reshape(array.shape[:-1])


def _read(file: IO[bytes], size: int, path: str, end: int) -> bytes:
    offset = file.tell()
    data = file.read(size) if size <= end - offset else b""
    if len(data) < size:
        raise DataLossError(
            f"The cache file {path!r} ends at byte {end}, where {size} bytes were expected from"
            f" byte {offset} on. Delete it; the next pass writes it again."
        )
    return data
