"""A reader of TensorFlow's checkpoint files that does not need TensorFlow.

A checkpoint ``x`` is an index file ``x.index`` and data files ``x.data-00000-of-00001``. The index
is a sorted table of blocks; each entry has the dtype and shape of one tensor, the location of its
bytes, and their checksum. The tensor ``_CHECKPOINTABLE_OBJECT_GRAPH`` describes the saved objects:
their children by name, and which tensor is the value of which variable.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from replicax._src.base.tf_errors import DataLossError, NotFoundError
from replicax._src.data.records.wire_format import checksum, fields, masked, varint
from replicax._src.files import storage
from replicax._src.train.object_graph import ObjectNode, TensorFlowNames

OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"

_MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = 5  # after each block: 1 byte of compression type and 4 of checksum
_STRING = 7
_DTYPES: dict[int, Any] = {
    1: np.float32,
    2: np.float64,
    3: np.int32,
    4: np.uint8,
    5: np.int16,
    6: np.int8,
    _STRING: np.object_,
    8: np.complex64,
    9: np.int64,
    10: np.bool_,
    14: ml_dtypes.bfloat16,
    17: np.uint16,
    18: np.complex128,
    19: np.float16,
    22: np.uint32,
    23: np.uint64,
    24: ml_dtypes.float8_e5m2,
    25: ml_dtypes.float8_e4m3fn,
}


def is_bundle(prefix: str) -> bool:
    """Whether ``prefix`` names a checkpoint that TensorFlow wrote."""
    return storage.is_file(f"{prefix}.index")


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor that was saved in parts: its start and length along each axis."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """The index entry of one tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    parts: tuple[TensorSlice, ...]


class TensorBundle:
    """A checkpoint written by TensorFlow.

    Args:
        prefix: Its path, without ``.index``.

    Raises:
        NotFoundError: There is no checkpoint.
        DataLossError: The index is damaged.
    """

    names = TensorFlowNames()

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        index = f"{prefix}.index"
        try:
            table = storage.read_bytes(index)
        except FileNotFoundError:
            raise NotFoundError(
                f"There is no checkpoint {prefix!r}: it would have a file {index!r}."
            ) from None
        self.identity = hashlib.sha256(table).hexdigest()
        self._entries: dict[str, Entry] = {}
        self._nodes: list[ObjectNode] = []
        self._num_shards = 1
        try:
            for key, value in _rows(table, index):
                if key:
                    self._entries[_name(key)] = _entry(value)
                else:
                    self._num_shards = _header(value)
        except (IndexError, ValueError, struct.error) as error:
            raise DataLossError(f"{index!r} is damaged: {error}.") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        whole = (name for name in self._entries if not name.startswith("\0"))
        return {name: self._entries[name].shape for name in sorted(whole)}

    def dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype of one tensor; strings have dtype ``object``.

        Raises:
            TypeError: NumPy has no such dtype.
        """
        number = self._entries[key].dtype
        if number not in _DTYPES:
            raise TypeError(
                f"Tensor {key!r} of {self._prefix!r} has TensorFlow's dtype number {number}, for"
                " which NumPy has none."
            )
        found: np.dtype[Any] = np.dtype(_DTYPES[number])
        return found

    def read(self, key: str) -> np.ndarray[Any, Any]:
        """Return the value of one tensor.

        Raises:
            NotFoundError: The checkpoint has no tensor ``key``.
            DataLossError: Its bytes are damaged.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise NotFoundError(
                f"Checkpoint {self._prefix!r} has no tensor {key!r}; it has"
                f" {', '.join(map(repr, list(self.shapes())[:20]))}."
            )
        if entry.parts:
            return self._joined(key, entry)
        data = self._bytes(entry)
        if self.dtype(key) == np.object_:
            return _strings(data, entry, f"tensor {key!r} of {self._prefix!r}")
        if _masked(data) != entry.crc:
            raise DataLossError(f"The checksum of tensor {key!r} of {self._prefix!r} is wrong.")
        wanted = self.dtype(key).itemsize * math.prod(entry.shape)
        if len(data) != wanted:
            raise DataLossError(
                f"Tensor {key!r} of {self._prefix!r} has {len(data)} bytes; its shape"
                f" {entry.shape} and dtype {self.dtype(key)} need {wanted}."
            )
        little = self.dtype(key).newbyteorder("<")
        return np.frombuffer(data, little).astype(self.dtype(key)).reshape(entry.shape)

    @property
    def nodes(self) -> list[ObjectNode]:
        """The graph of the saved objects, root first."""
        if OBJECT_GRAPH not in self._entries:
            raise NotFoundError(
                f"Checkpoint {self._prefix!r} was written by a v1 Saver: it has variable names but"
                " no object graph. Read its values with"
                " `rx.train.load_checkpoint(path).get_tensor(name)`."
            )
        if not self._nodes:
            self._nodes = _graph(self.read(OBJECT_GRAPH).item())
        return self._nodes

    def _joined(self, name: str, entry: Entry) -> np.ndarray[Any, Any]:
        whole = np.zeros(entry.shape, self.dtype(name))
        for part in entry.parts:
            place = tuple(
                slice(start, start + (size if length < 0 else length))
                for start, length, size in zip(part.starts, part.lengths, entry.shape, strict=True)
            )
            whole[place] = self.read(_part_key(name, part))
        return whole

    def _bytes(self, entry: Entry) -> bytes:
        path = f"{self._prefix}.data-{entry.shard:05d}-of-{self._num_shards:05d}"
        try:
            with storage.open_file(path) as file:
                file.seek(entry.offset)
                data: bytes = file.read(entry.size)
        except FileNotFoundError:
            raise DataLossError(
                f"Checkpoint {self._prefix!r} lacks its file {path!r}; copy it next to the index."
            ) from None
        if len(data) != entry.size:
            raise DataLossError(
                f"{path!r} is cut off: expected {entry.size} bytes at {entry.offset}, found"
                f" {len(data)}."
            )
        return data


def _rows(table: bytes, path: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the entries of a table in key order."""
    if len(table) < _FOOTER or struct.unpack("<Q", table[-8:])[0] != _MAGIC:
        raise DataLossError(
            f"{path!r} is not the index of a TensorFlow checkpoint, or it is cut off."
        )
    footer = len(table) - _FOOTER
    _, at = _handle(table, footer)
    index, _ = _handle(table, at)
    for _, handle in _block(table, index, path):
        place, _ = _handle(handle, 0)
        yield from _block(table, place, path)


def _handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = varint(data, at)
    size, at = varint(data, at)
    return (offset, size), at


def _block(table: bytes, place: tuple[int, int], path: str) -> Iterator[tuple[bytes, bytes]]:
    offset, size = place
    end = offset + size
    if end + _TRAILER > len(table):
        raise DataLossError(f"{path!r} is cut off: a block reaches to byte {end}.")
    kind, crc = table[end], struct.unpack("<I", table[end + 1 : end + _TRAILER])[0]
    if _masked(table[offset : end + 1]) != crc:
        raise DataLossError(f"The checksum of the block at byte {offset} of {path!r} is wrong.")
    if kind != 0:
        raise DataLossError(f"The block at byte {offset} of {path!r} is compressed.")
    data = table[offset:end]
    restarts = struct.unpack("<I", data[-4:])[0]
    stop = len(data) - 4 * (restarts + 1)
    at, key = 0, b""
    while at < stop:
        shared, at = varint(data, at)
        unshared, at = varint(data, at)
        length, at = varint(data, at)
        key = key[:shared] + data[at : at + unshared]
        at += unshared
        yield key, data[at : at + length]
        at += length


def _masked(data: bytes) -> int:
    return int(masked(np.array([checksum(data)], np.uint32))[0])


def _signed(message: bytes, span: tuple[int, int]) -> int:
    value = varint(message, span[0])[0]
    return value - (1 << 64) if value >= 1 << 63 else value


def _header(message: bytes) -> int:
    shards = 1
    for number, span in fields(message, 0, len(message)):
        if number == 1:
            shards = _signed(message, span)
        elif number == 2 and _signed(message, span) != 0:
            raise ValueError("it was written by a big-endian machine")
    return shards


def _entry(message: bytes) -> Entry:
    found = {"dtype": 0, "shard": 0, "offset": 0, "size": 0}
    names = {1: "dtype", 3: "shard", 4: "offset", 5: "size"}
    shape: tuple[int, ...] = ()
    crc, parts = 0, []
    for number, span in fields(message, 0, len(message)):
        if number in names:
            found[names[number]] = _signed(message, span)
        elif number == 2:
            shape = _shape(message, span)
        elif number == 6:
            crc = struct.unpack("<I", message[span[0] : span[1]])[0]
        elif number == 7:
            parts.append(_part(message, span))
    return Entry(shape=shape, crc=crc, parts=tuple(parts), **found)


def _shape(message: bytes, span: tuple[int, int]) -> tuple[int, ...]:
    sizes = []
    for number, dim in fields(message, *span):
        if number == 2:
            inner = [_signed(message, s) for n, s in fields(message, *dim) if n == 1]
            sizes.append(inner[0] if inner else 0)
    return tuple(sizes)


def _part(message: bytes, span: tuple[int, int]) -> TensorSlice:
    starts, lengths = [], []
    for number, extent in fields(message, *span):
        if number == 1:
            inner = {n: _signed(message, s) for n, s in fields(message, *extent)}
            starts.append(inner.get(1, 0))
            lengths.append(inner.get(2, -1))
    return TensorSlice(tuple(starts), tuple(lengths))


def _part_key(name: str, part: TensorSlice) -> str:
    """Return the key of a slice of a tensor, in TensorFlow's ordered-code encoding."""
    code = b"\0" + name.encode().replace(b"\0", b"\0\xff").replace(b"\xff", b"\xff\0") + b"\0\1"
    code += bytes([1, len(part.starts)])
    for extent in zip(part.starts, part.lengths, strict=True):
        code += b"".join(map(_ordered, extent))
    return _name(code)


def _ordered(number: int) -> bytes:
    """Encode a signed number in a variable number of bytes, given by the count of leading ones."""
    size = next(n for n in range(1, 11) if -(1 << (7 * n - 1)) <= number < 1 << (7 * n - 1))
    code = bytearray(number.to_bytes(max(size, 2), "big", signed=True))[-size:]
    header = (0xFFFF << (16 - size)) & 0xFFFF
    code[0] ^= header >> 8
    if size > 1:
        code[1] ^= header & 0xFF
    return bytes(code)


def _name(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def _strings(data: bytes, entry: Entry, what: str) -> np.ndarray[Any, Any]:
    """Decode an array of byte strings: varint lengths, their checksum, then the bytes."""
    lengths, at = [], 0
    for _ in range(math.prod(entry.shape)):
        length, at = varint(data, at)
        lengths.append(length)
    counted = b"".join(struct.pack("<I" if n < 1 << 32 else "<Q", n) for n in lengths)
    stored = data[at : at + 4]
    text = data[at + 4 :]
    whole = counted + stored + text
    if (
        struct.pack("<I", _masked(counted)) != stored
        or _masked(whole) != entry.crc
        or sum(lengths) != len(text)
    ):
        raise DataLossError(f"The checksum of {what} is wrong.")
    result = np.empty(len(lengths), np.object_)
    at = 0
    for i, length in enumerate(lengths):
        result[i] = text[at : at + length]
        at += length
    return result.reshape(entry.shape)


def _graph(message: bytes) -> list[ObjectNode]:
    nodes = []
    for number, span in fields(message, 0, len(message)):
        if number == 1:
            nodes.append(_node(message, span))
    return nodes


def _node(message: bytes, span: tuple[int, int]) -> ObjectNode:
    node = ObjectNode()
    for number, inner in fields(message, *span):
        found = dict(fields(message, *inner))
        if number == 1:
            node.children[_text(message, found.get(2))] = _number(message, found.get(1))
        elif number == 2:
            node.values[_text(message, found.get(1))] = _text(message, found.get(3))
        elif number == 3:
            key = _number(message, found.get(1)), _text(message, found.get(2))
            node.slots[key] = _number(message, found.get(3))
    return node


def _text(message: bytes, span: tuple[int, int] | None) -> str:
    return message[span[0] : span[1]].decode() if span else ""


def _number(message: bytes, span: tuple[int, int] | None) -> int:
    return _signed(message, span) if span else 0
