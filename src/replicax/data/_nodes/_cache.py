"""Elements kept after the first complete pass: in memory, or in a file.

The file of a cache: blocks of columns, each array in NumPy's own format; no pickles.

A file appears under its name only when it is complete, by renaming. It is a row of frames: the
length of the content, the content, and a checksum of all frames so far, so that no frame can be
changed, lost or exchanged unnoticed. The first frame says how elements are built, and for a cache
which part of the data they are; an empty one ends the file.
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

from replicax.data import _storage
from replicax.data._blocks import Block, ColumnBlock, PlaceBlock, RowBlock, join
from replicax.data._errors import DataLossError
from replicax.data._leaves import Array
from replicax.data._node import Node, PassingNode, Stream, walk
from replicax.data._nodes._source import ArraySource, SourceStream
from replicax.data._nodes._window import BlocksStream, Copies, copied
from replicax.data._paths import is_url, parent
from replicax.data._seeds import Run
from replicax.data._structure import Structure, flatten, from_json, to_json

_MAGIC = b"replicax-cache-2\n"
_SIZE = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<QI")  # rows of the block, arrays of the block


class writing:  # noqa: N801 - reads as a verb: `file = writing(path)`
    """A file that is being written beside its final name.

    The name until then cannot be foreseen, and nothing that stands there already is opened: nobody
    can make us write elsewhere.

    Args:
        path: The final name.
        part: Which part of the data is written, in words, for readers to compare.
    """

    def __init__(self, path: str, part: str | None = None) -> None:
        self._path = path
        self._told = part
        _storage.make_folders(parent(path))
        self._part = f"{path}.{secrets.token_hex(8)}.part"
        self.file: IO[bytes] = self._opened()
        self.file.write(_MAGIC)
        self._checksum = zlib.crc32(_MAGIC)
        self._has_structure = False

    def _opened(self) -> IO[bytes]:
        if is_url(self._part):
            return _storage.open_file(self._part, "wb")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        return os.fdopen(os.open(self._part, flags, 0o666), "wb")

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
        if not is_url(self._part):
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()
        _storage.replace(self._part, self._path)

    def abandon(self) -> None:
        """Throw the file away."""
        _storage.discard(self.file, self._part)

    def _write_structure(self, stored: Any) -> None:
        self._has_structure = True
        told = stored if self._told is None else {"part": self._told, "structure": stored}
        self._write_frame(json.dumps(told).encode())

    def _write_frame(self, content: bytes) -> None:
        size = _SIZE.pack(len(content))
        self._checksum = zlib.crc32(content, zlib.crc32(size, self._checksum))
        self.file.write(size)
        self.file.write(content)
        self.file.write(_CHECKSUM.pack(self._checksum))


def read_blocks(path: str, node: Node) -> Iterator[Block]:
    """The blocks of a file; ``node`` is what was kept."""
    with _storage.open_file(path) as file:
        frames = _frames(file, path)
        first = next(frames)
        try:
            told = json.loads(first)
            if told is not None and "part" in told:
                _require_part(path, told["part"], part_of(node))
                told = told["structure"]
            # Types of named tuples cannot be stored; the pipeline itself knows them.
            structure = from_json(told) or flatten(node.element_spec)[0]
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


def part_of(node: Node) -> str:
    """Which part of the data a graph reads, in words."""
    return " of ".join(part.part for part in walk(node) if part.part)


def _require_part(path: str, kept: str, wanted: str) -> None:
    if kept != wanted:
        raise DataLossError(
            f"The cache file {path!r} holds {kept:.200}, but this dataset is {wanted:.200}: it was"
            " written by another pipeline, or by another worker. Delete it, or choose a name for"
            " each."
        )


def _frames(file: IO[bytes], path: str) -> Iterator[bytes]:
    """The contents of all frames, each checked before it is given."""
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


class CacheMemory:
    """What a cache in memory holds, shared by all passes."""

    def __init__(self) -> None:
        self.blocks: list[Block] | None = None
        self.lock = threading.Lock()

    def fill(self, blocks: list[Block]) -> None:
        """Keep a complete pass, as one source of arrays if elements are alike."""
        whole = join(blocks) if blocks else None
        if isinstance(whole, ColumnBlock):
            source = ArraySource(whole.structure, whole.columns())
            whole = PlaceBlock(source, 0, len(whole))
        with self.lock:
            if self.blocks is None:
                self.blocks = [] if whole is None else [whole]


@final
@dataclass(frozen=True, eq=False)
class CacheNode(PassingNode):
    """The input once, then what was kept.

    The input is always read in its first order, whichever pass fills the cache: so a restored
    iterator finds the same elements in a cache that a new process has to fill again.
    """

    filename: str
    memory: CacheMemory = field(default_factory=CacheMemory)

    def with_inputs(self, *inputs: Node) -> Self:
        """A cache of another input, which holds nothing yet."""
        (node,) = inputs
        return replace(self, input=node, memory=CacheMemory())

    def of_worker(self, worker: int, workers: int) -> "CacheNode":
        """The cache of one of several workers that read different data: each has its own file."""
        if workers == 1 or not self.filename:
            return self
        return replace(self, filename=f"{self.filename}.{worker}-of-{workers}")

    @property
    def gives_places(self) -> bool:
        """Only once it is filled, and not always."""
        return False

    @property
    def calls_user_code(self) -> bool:
        """Not once it is filled."""
        return not self._is_filled() and self.input.calls_user_code

    @property
    def peeked(self) -> Node:
        """The cache if it is filled, else the input."""
        return self if self._is_filled() else self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass over the cache, or over the input."""
        if self.filename:
            if self._is_filled():
                return FileStream(self.filename, self.input)
            return _Filling(self.input.open(run.fixed()), _ToFile(self.filename, self.input))
        blocks = self.memory.blocks
        if blocks is None:
            return _Filling(self.input.open(run.fixed()), _ToMemory(self.memory))
        if len(blocks) == 1 and isinstance(blocks[0], PlaceBlock):
            return SourceStream(blocks[0].source, len(blocks[0]))
        return Copies(BlocksStream(blocks))

    def _is_filled(self) -> bool:
        return _storage.exists(self.filename) if self.filename else self.memory.blocks is not None


class _ToMemory:
    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._blocks: list[Block] = []

    def add(self, block: Block) -> Block:
        if isinstance(block, RowBlock):
            # The consumer may write into what it was given; rows kept must be copies.
            self._blocks.append(RowBlock(block.structure, [copied(row) for row in block.rows()]))
            return block
        columns = block.columns()
        copies = [column.copy() for column in columns]
        self._blocks.append(ColumnBlock(block.structure, copies, len(block)))
        return ColumnBlock(block.structure, columns, len(block))

    def commit(self) -> None:
        self._memory.fill(self._blocks)

    def abandon(self) -> None:
        self._blocks = []


class _ToFile:
    def __init__(self, path: str, node: Node) -> None:
        self._file = writing(path, part_of(node))

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
class _Filling(Stream):
    """The input, kept on the side; only a complete pass counts."""

    def __init__(self, stream: Stream, target: _ToMemory | _ToFile) -> None:
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
