"""The cache node, which stores the elements of a complete pass in memory or in a file.

The file format, which `Dataset.save` shares: a magic string, then frames. A frame is the length of
its content, the content, and a CRC-32 of all bytes up to here except earlier checksums; the running
checksum detects modified, missing and reordered frames. The first frame is JSON: the structure of
elements and, for a cache, a description of the part of the data that it contains. Each further
frame is a block of columns in NumPy's array format (no pickles), and an empty frame ends the file.
A file is written under a temporary name and renamed when it is complete.
"""

import io
import json
import os
import secrets
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any, Self, final

import numpy as np

from replicax._src.base.tf_errors import DataLossError
from replicax._src.data.element_blocks import Block, ColumnBlock, IndexBlock, RowBlock, join
from replicax._src.data.leaves import Array
from replicax._src.data.node import Node, PassingNode, Stream, walk
from replicax._src.data.nodes.source import ArraySource, SourceStream
from replicax._src.data.nodes.window import BlocksStream, CopyingStream, copy_row
from replicax._src.data.seeds import Run
from replicax._src.data.structure import Structure, flatten, from_json, to_json
from replicax._src.files import storage
from replicax._src.files.paths import is_url, parent

_MAGIC = b"replicax-cache-2\n"
_SIZE = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<QI")  # number of rows and number of arrays in the block


class writing:  # noqa: N801 - reads as a verb: `file = writing(path)`
    """A cache file that is written under a temporary name until `commit`.

    The temporary name is random and opened exclusively, without following links, so another user
    of the folder cannot redirect the write to a different file.

    Args:
        path: The final path.
        part: A description of the part of the data in the file, which readers compare.
    """

    def __init__(self, path: str, part: str | None = None) -> None:
        self._path = path
        self._description = part
        storage.make_folders(parent(path))
        self._temp_path = f"{path}.{secrets.token_hex(8)}.part"
        self.file: IO[bytes] = self._create_file()
        self.file.write(_MAGIC)
        self._checksum = zlib.crc32(_MAGIC)
        self._has_structure = False

    def _create_file(self) -> IO[bytes]:
        if is_url(self._temp_path):
            return storage.open_file(self._temp_path, "wb")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        return os.fdopen(os.open(self._temp_path, flags, 0o666), "wb")

    def add(self, block: Block) -> None:
        """Write one block; elements that differ in shape are written as blocks of one row."""
        if not self._has_structure:
            self._write_structure(to_json(block.structure))
        if block.is_columnar():
            self._write_frame(_content(block.columns(), len(block)))
            return
        for row in block.rows():
            self._write_frame(_content(RowBlock(block.structure, [row]).columns(), 1))

    def commit(self) -> None:
        """Finish the file and rename it to its final path."""
        if not self._has_structure:
            self._write_structure(None)
        self._write_frame(b"")
        if not is_url(self._temp_path):
            # Sync before the rename: after a crash, the final name must not refer to partial data.
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()
        storage.replace(self._temp_path, self._path)

    def abandon(self) -> None:
        """Delete the temporary file."""
        storage.discard(self.file, self._temp_path)

    def _write_structure(self, stored: Any) -> None:
        self._has_structure = True
        header = stored
        if self._description is not None:
            header = {"part": self._description, "structure": stored}
        self._write_frame(json.dumps(header).encode())

    def _write_frame(self, content: bytes) -> None:
        size = _SIZE.pack(len(content))
        self._checksum = zlib.crc32(content, zlib.crc32(size, self._checksum))
        self.file.write(size)
        self.file.write(content)
        self.file.write(_CHECKSUM.pack(self._checksum))


def read_blocks(path: str, node: Node) -> Iterator[Block]:
    """Yield the blocks of the file at `path`; raise if it is damaged or not the data of `node`."""
    with storage.open_file(path) as file:
        frames = _frames(file, path)
        first = next(frames)
        try:
            header = json.loads(first)
            if header is not None and "part" in header:
                _check_part(path, header["part"], describe_part(node))
                header = header["structure"]
            # JSON cannot represent named tuple types; take them from the pipeline.
            structure = from_json(header) or flatten(node.element_spec)[0]
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
                f"The cache file {path!r} is intact, but this version of replicax cannot read its"
                f" format ({error}). Delete it; the next pass writes it again."
            ) from error


def describe_part(node: Node) -> str:
    """Describe the part of the data that the graph of `node` reads."""
    return " of ".join(part.part for part in walk(node) if part.part)


def _check_part(path: str, stored: str, wanted: str) -> None:
    if stored != wanted:
        raise DataLossError(
            f"The cache file {path!r} holds {stored:.200}, but this dataset is {wanted:.200}: it"
            " was written by another pipeline, or by another worker. Delete it, or choose a name"
            " for each."
        )


def _frames(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Yield the content of each frame after its checksum has been verified."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
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
    if rows == 1:  # shapes may differ between blocks, and only row blocks join with any shape
        return RowBlock(structure, [tuple(column[0] for column in columns)])
    return ColumnBlock(structure, columns, rows)


def _content(columns: list[Array], rows: int) -> bytes:
    """Serialize the columns of a block."""
    file = io.BytesIO()
    file.write(_HEADER.pack(rows, len(columns)))
    for column in columns:
        if column.dtype == object:
            # Strings: the shape, the length of each string, and all bytes joined.
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
    """Append an array to `file` in NumPy's format, after the name of a dtype that it lacks."""
    # NumPy's format cannot name ml_dtypes such as bfloat16: store their bytes and the name.
    is_native = array.dtype.kind != "V" and array.dtype.isbuiltin == 1
    name = b"" if is_native else array.dtype.name.encode()
    file.write(struct.pack("<B", len(name)) + name)
    data = array if is_native else np.ascontiguousarray(array)[..., None].view(np.uint8)
    np.lib.format.write_array(file, np.ascontiguousarray(data), allow_pickle=False)


def _columns(file: io.BytesIO) -> tuple[int, list[Array]]:
    """Deserialize a block: return its number of rows and its columns."""
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
    """Read an array that `_save` has written."""
    (length,) = struct.unpack("<B", file.read(1))
    name = file.read(length).decode()
    array: Array = np.lib.format.read_array(file, allow_pickle=False)
    if not name:
        return array
    dtype: np.dtype[Any] = np.dtype(name)
    return array.view(dtype).reshape(array.shape[:-1])


def _read(file: IO[bytes], size: int, path: str, end: int) -> bytes:
    """Read exactly `size` bytes; raise if the file ends before."""
    offset = file.tell()
    data = file.read(size) if size <= end - offset else b""
    if len(data) < size:
        raise DataLossError(
            f"The cache file {path!r} ends at byte {end}, where {size} bytes were expected from"
            f" byte {offset} on. Delete it; the next pass writes it again."
        )
    return data


class CacheMemory:
    """The elements of an in-memory cache, shared by all passes; `blocks` is None until filled."""

    def __init__(self) -> None:
        self.blocks: list[Block] | None = None
        self.lock = threading.Lock()

    def fill(self, blocks: list[Block]) -> None:
        """Store a complete pass, as one array source if all elements have the same shapes."""
        whole = join(blocks) if blocks else None
        if isinstance(whole, ColumnBlock):
            source = ArraySource(whole.structure, whole.columns())
            whole = IndexBlock(source, 0, len(whole))
        with self.lock:
            if self.blocks is None:
                self.blocks = [] if whole is None else [whole]


@final
@dataclass(frozen=True, eq=False)
class CacheNode(PassingNode):
    """The input in the first complete pass, and its stored elements in later ones.

    The cache is always filled in the order of the first pass, whichever pass fills it, so a
    restored iterator finds the same elements in a cache that a new process has to fill again.
    """

    filename: str
    memory: CacheMemory = field(default_factory=CacheMemory)

    def with_inputs(self, *inputs: Node) -> Self:
        """Return an empty cache over another input."""
        (node,) = inputs
        return replace(self, input=node, memory=CacheMemory())

    def of_worker(self, worker: int, workers: int) -> "CacheNode":
        """Return the cache of one of several workers that read different data: one file each."""
        if workers == 1 or not self.filename:
            return self
        return replace(self, filename=f"{self.filename}.{worker}-of-{workers}")

    @property
    def yields_indices(self) -> bool:
        """Always False: only some filled caches are random-access sources."""
        return False

    @property
    def calls_user_code(self) -> bool:
        """Whether reading calls user code: never once the cache is filled."""
        return not self._is_filled() and self.input.calls_user_code

    @property
    def peeked(self) -> Node:
        """The cache if it is filled, otherwise the input."""
        return self if self._is_filled() else self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass over the stored elements, or over the input to store them."""
        if self.filename:
            if self._is_filled():
                return FileStream(self.filename, self.input)
            target = _FileTarget(self.filename, self.input)
            return _FillingStream(self.input.open(run.fixed()), target)
        blocks = self.memory.blocks
        if blocks is None:
            return _FillingStream(self.input.open(run.fixed()), _MemoryTarget(self.memory))
        if len(blocks) == 1 and isinstance(blocks[0], IndexBlock):
            return SourceStream(blocks[0].source, len(blocks[0]))
        return CopyingStream(BlocksStream(blocks))

    def _is_filled(self) -> bool:
        return storage.exists(self.filename) if self.filename else self.memory.blocks is not None


class _MemoryTarget:
    """Collects a pass in memory."""

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._blocks: list[Block] = []

    def add(self, block: Block) -> Block:
        if isinstance(block, RowBlock):
            # The consumer may modify the rows that it receives: store copies.
            self._blocks.append(RowBlock(block.structure, [copy_row(row) for row in block.rows()]))
            return block
        columns = block.columns()
        copies = [column.copy() for column in columns]
        self._blocks.append(ColumnBlock(block.structure, copies, len(block)))
        return ColumnBlock(block.structure, columns, len(block))

    def commit(self) -> None:
        self._memory.fill(self._blocks)

    def abandon(self) -> None:
        self._blocks = []


class _FileTarget:
    """Writes a pass to a file."""

    def __init__(self, path: str, node: Node) -> None:
        self._file = writing(path, describe_part(node))

    def add(self, block: Block) -> Block:
        if not isinstance(block, RowBlock):
            block = ColumnBlock(block.structure, block.columns(), len(block))
        self._file.add(block)
        return block

    def commit(self) -> None:
        self._file.commit()

    def abandon(self) -> None:
        self._file.abandon()


@final
class _FillingStream(Stream):
    """The input, copied to `target`, which is committed only at the end of a complete pass."""

    def __init__(self, stream: Stream, target: _MemoryTarget | _FileTarget) -> None:
        self._stream = stream
        self._target = target
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        if self._is_done:
            return None
        block = self._stream.pull(limit)
        if block is None:
            self._is_done = True
            self._target.commit()
            return None
        return self._target.add(block)

    def close(self) -> None:
        if not self._is_done:
            self._target.abandon()
        self._stream.close()


@final
class FileStream(Stream):
    """A pass over the blocks of a file that was written from `node`."""

    def __init__(self, path: str, node: Node) -> None:
        self._path = path
        self._node = node
        self._blocks: Iterator[Block] | None = None
        self._left: Block | None = None

    def pull(self, limit: int) -> Block | None:
        if self._blocks is None:
            self._blocks = read_blocks(self._path, self._node)
        block = self._left if self._left is not None else next(self._blocks, None)
        if block is None:
            return None
        self._left = block.slice(limit, len(block)) if len(block) > limit else None
        return block.slice(0, limit) if len(block) > limit else block
