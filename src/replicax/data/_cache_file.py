"""The file of a cache: blocks of columns, each array in NumPy's own format; no pickles.

A file appears under its name only when it is complete, by renaming.
"""

import io
import json
import os
import struct
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from replicax.data._blocks import Block, ColumnBlock, RowBlock
from replicax.data._errors import DataLossError
from replicax.data._leaves import Array
from replicax.data._node import Node
from replicax.data._structure import Structure, flatten, from_json, to_json

_MAGIC = b"replicax-cache-1\n"
_SIZE = struct.Struct("<Q")
_HEADER = struct.Struct("<QI")  # rows of the block, arrays of the block; 0 rows end the file


class writing:  # noqa: N801 - reads as a verb: `file = writing(path)`
    """A file that is being written beside its final name."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._part = f"{path}.{os.getpid()}.part"
        self.file: IO[bytes] = open(self._part, "wb")  # noqa: SIM115 - closed by commit or abandon
        self.file.write(_MAGIC)
        self._has_structure = False

    def add(self, block: Block) -> None:
        """Add one block; elements that differ in shape become blocks of one."""
        if not self._has_structure:
            self._has_structure = True
            self._write_structure(json.dumps(to_json(block.structure)))
        if block.is_columnar():
            _write(self.file, block.columns(), len(block))
            return
        for row in block.rows():
            _write(self.file, RowBlock(block.structure, [row]).columns(), 1)

    def commit(self) -> None:
        """Give the file its name."""
        if not self._has_structure:
            self._write_structure("null")
        self.file.write(_HEADER.pack(0, 0))
        self.file.close()
        os.replace(self._part, self._path)

    def abandon(self) -> None:
        """Throw the file away."""
        self.file.close()
        if os.path.exists(self._part):
            os.remove(self._part)

    def _write_structure(self, text: str) -> None:
        self.file.write(_SIZE.pack(len(text)) + text.encode())


def read_blocks(path: str, node: Node) -> Iterator[Block]:
    """The blocks of a file; ``node`` is what was kept."""
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DataLossError(
                f"{path!r} is not a cache file of replicax. Delete it, or choose another name for"
                " `cache(filename)`."
            )
        (size,) = _SIZE.unpack(_read(file, _SIZE.size, path))
        stored = json.loads(_read(file, size, path))
        # Types of named tuples cannot be stored; the pipeline itself knows them.
        structure = from_json(stored) or flatten(node.element_spec)[0]
        while True:
            rows, arrays = _HEADER.unpack(_read(file, _HEADER.size, path))
            if not rows:
                return
            columns = [_read_array(file, path) for _ in range(arrays)]
            if len(columns) != structure.num_leaves:
                raise DataLossError(
                    f"The cache file {path!r} holds elements of {len(columns)} parts, but this"
                    f" dataset has {structure.num_leaves}: it was written by another pipeline."
                    " Delete it, or choose another name."
                )
            yield _as_block(structure, columns, rows)


def _as_block(structure: Structure, columns: list[Array], rows: int) -> Block:
    if rows == 1:  # may be one of many shapes; rows join with anything
        return RowBlock(structure, [tuple(column[0] for column in columns)])
    return ColumnBlock(structure, columns, rows)


def _write(file: IO[bytes], columns: list[Array], rows: int) -> None:
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


def _save(file: IO[bytes], array: Array) -> None:
    # ml_dtypes (bfloat16 and kin) have no name in NumPy's format: keep their bytes and the name.
    is_native = array.dtype.kind != "V" and array.dtype.isbuiltin == 1
    name = b"" if is_native else array.dtype.name.encode()
    file.write(struct.pack("<B", len(name)) + name)
    data = array if is_native else np.ascontiguousarray(array)[..., None].view(np.uint8)
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(data), allow_pickle=False)
    file.write(struct.pack("<Q", buffer.tell()) + buffer.getvalue())


def _read_array(file: IO[bytes], path: str) -> Array:
    kind = _read(file, 1, path)
    if kind == b"N":
        return _load(file, path)
    shape, lengths = _load(file, path), _load(file, path)
    result = np.empty(len(lengths), object)
    for place, length in enumerate(lengths.tolist()):
        result[place] = _read(file, length, path)
    return result.reshape(shape.tolist())


def _load(file: IO[bytes], path: str) -> Array:
    (length,) = struct.unpack("<B", _read(file, 1, path))
    name = _read(file, length, path).decode()
    (size,) = struct.unpack("<Q", _read(file, 8, path))
    array: Array = np.lib.format.read_array(io.BytesIO(_read(file, size, path)), allow_pickle=False)
    if not name:
        return array
    dtype: np.dtype[Any] = np.dtype(name)
    return array.view(dtype).reshape(array.shape[:-1])


def _read(file: IO[bytes], size: int, path: str) -> bytes:
    offset = file.tell()
    data = file.read(size)
    if len(data) < size:
        raise DataLossError(
            f"The cache file {path!r} ends at byte {offset + len(data)}, where {size} bytes were"
            f" expected from byte {offset} on. Delete it; the next pass writes it again."
        )
    return data
