"""Sharded arrays in checkpoints: which worker writes which shard, and reading any region back.

A part of an array is a box, with a start and an end along each axis; or, for an array stored
flattened, a range of its elements. Each distinct shard is written once, by one of the workers that
hold it, so no worker needs the whole array. Restoring may use a different sharding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.state.cell import Cell
from replicax._src.train.checkpoint_files import CheckedFiles, as_bytes, buffer
from replicax._src.train.orbax_private import chunk
from replicax._src.values.sharded import ShardLayout

# Creating and syncing a file per array costs more than writing its bytes, so arrays smaller than
# this are packed into one file.
_LARGE = 16 << 20
Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A region of an array.

    Attributes:
        box: Start and end along each axis; of a flat part, start and end of the range.
        is_flat: Whether it is a range of the flattened array, in C order.
    """

    box: Box
    is_flat: bool = False

    @property
    def shape(self) -> Shape:
        """The shape of the part."""
        return tuple(end - begin for begin, end in self.box)

    @property
    def size(self) -> int:
        """The number of elements in the part."""
        return prod(self.shape)

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Return the index of this part in the whole array, or in the part with box ``origin``."""
        starts = [begin for begin, _ in origin] if origin else [0] * len(self.box)
        return tuple(slice(b - s, e - s) for (b, e), s in zip(self.box, starts, strict=True))

    def common(self, other: Part) -> Part:
        """Return the intersection with ``other``, which must be flat if and only if this is."""
        pairs = zip(self.box, other.box, strict=True)
        box = ((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
        return Part(tuple((a, max(a, b)) for a, b in box), self.is_flat)

    def flat(self, shape: Shape) -> Part | None:
        """Return this part as a range of the flattened array of ``shape``.

        Return None if its elements are not contiguous there.
        """
        if self.is_flat:
            return self
        cut = [i for i, (n, m) in enumerate(zip(self.shape, shape, strict=True)) if n != m]
        if cut and any(n != 1 for n in self.shape[: cut[-1]]):
            return None
        at = 0
        for (begin, _), length in zip(self.box, shape, strict=True):
            at = at * length + begin
        return Part(((at, at + self.size),), is_flat=True)


def whole(shape: Shape) -> Part:
    """Return the part that covers an array of ``shape``."""
    return Part(tuple((0, n) for n in shape))


@dataclass(frozen=True)
class Value:
    """An array to be saved.

    Attributes:
        array: The array: in host memory, or on devices of one worker or of all.
        shard_layout: How the stored array maps to the logical one, if it is padded or flattened.
        copies_on: If the rows are per-replica copies, the mark of their layout: see
            `replicax._src.train.stored_checkpoint.copies_mark`.
    """

    array: Any
    shard_layout: ShardLayout | None = None
    copies_on: str | None = None

    @property
    def shape(self) -> Shape:
        """The logical shape of the array."""
        return tuple(np.shape(self.array)) if self.shard_layout is None else self.shard_layout.shape

    def holders(self) -> dict[Part, list[int]]:
        """Return the distinct shards, with the indices of the workers that hold each.

        A process-local array is attributed to worker 0: every worker has an array of its own
        under this name, and the first worker's is saved.
        """
        spread = getattr(self.array, "sharding", None)
        if spread is None or len(spread.device_set) == 1:
            return {whole(self.shape): [0]}
        found: dict[Part, set[int]] = {}
        for device, index in spread.devices_indices_map(self.array.shape).items():
            found.setdefault(self._part(index), set()).add(device.process_index)
        is_local = len(set().union(*found.values())) == 1
        return {
            part: [0] if is_local else sorted(found[part])
            for part in sorted(found, key=lambda part: part.box)
        }

    def on_host(self, part: Part) -> np.ndarray:
        """Copy to host memory a part that this process holds."""
        if not isinstance(self.array, jax.Array) or part == whole(self.shape):
            host = np.asarray(_first(self.array))
        else:
            shards = ((self._part(s.index), s) for s in self.array.addressable_shards)
            host = np.asarray(next(s.data for p, s in shards if p == part))
            host = host[: part.size] if part.is_flat else host  # strip the padding
        return np.ascontiguousarray(host).reshape(part.shape)

    def _part(self, index: tuple[slice, ...]) -> Part:
        return part_at(index, self.array.shape, self.shard_layout)


def _first(array: Any) -> Any:
    is_spread = isinstance(array, jax.Array) and not array.is_fully_addressable
    return array.addressable_data(0) if is_spread else array


def part_at(index: tuple[slice, ...], shape: Shape, layout: ShardLayout | None) -> Part:
    """Return the logical part that a shard holds.

    Args:
        index: The shard's index in the stored array.
        shape: The shape of the stored array.
        layout: How the stored array maps to the logical one.
    """
    bounds = (s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    if layout is None or layout.is_plain:
        return Part(tuple(bounds))
    if layout.axis is not None:  # each group of replicas has a copy
        found = list(bounds)
        begin, end = found[layout.axis]
        start = begin % layout.shape[layout.axis]
        found[layout.axis] = (start, start + end - begin)
        return Part(tuple(found))
    ((begin, end),) = bounds
    begin, end = begin % (rows := layout.part_shape[0] * layout.count), begin % rows + end - begin
    last = prod(layout.shape)
    return Part(((min(begin, last), min(end, last)),), is_flat=True)


def local_parts(cell: Cell) -> list[Part]:
    """Return the distinct parts of a variable that this process's devices hold."""
    if cell.topology is None:
        return [whole(cell.shape)]
    at = cell.sharding.addressable_devices_indices_map(cell.stored_shape)
    return list(
        dict.fromkeys(
            part_at(i, cell.stored_shape, cell.shard_layout) for i in at.values() if i is not None
        )
    )


def put_parts(cell: Cell, parts: Mapping[Part, np.ndarray]) -> None:
    """Replace the value of a variable.

    Args:
        cell: The variable's cell.
        parts: The new value of each of `local_parts`. JAX may alias these buffers, so the caller
            must not use them again.
    """
    if cell.topology is None:
        (array,) = parts.values()
        cell.put(jax.device_put(array))
        return
    shape, layout = cell.stored_shape, cell.shard_layout

    def at(index: Any) -> np.ndarray:
        array = parts[part_at(index, shape, layout)]
        if layout is None or not layout.is_flat:
            return array
        return np.pad(array, (0, layout.part_shape[0] - array.size))

    cell.put(jax.make_array_from_callback(shape, cell.sharding, at))


@dataclass(frozen=True)
class Piece:
    """The location of a part of an array in a checkpoint's files.

    Attributes:
        part: The part.
        file: The name of the file.
        at: The byte offset of the part in the file.
    """

    part: Part
    file: str
    at: int

    def to_json(self) -> list[Any]:
        """Return the manifest's representation of the piece."""
        return [self.part.box, self.part.is_flat, self.file, self.at]

    @classmethod
    def from_json(cls, entry: Any) -> Piece:
        """Return the piece that a manifest describes as ``entry``."""
        box, is_flat, file, at = entry
        return cls(Part(tuple((int(a), int(b)) for a, b in box), bool(is_flat)), str(file), int(at))


@dataclass(frozen=True)
class Saved:
    """An array in a checkpoint.

    Attributes:
        shape: The shape of the array.
        dtype: The dtype of the array.
        key_impl: If the array is the data of random keys, their implementation; else None.
        pieces: The pieces, which together cover the array.
        copies_on: If the rows are per-replica copies, the mark of their layout.
    """

    shape: Shape
    dtype: np.dtype[Any]
    key_impl: str | None
    pieces: Sequence[Piece]
    copies_on: str | None = None

    def check(self, files: CheckedFiles) -> None:
        """Check that the pieces lie inside the array and their files, and add up to its size.

        Raises:
            ValueError: They do not.
        """
        if self.dtype.hasobject or any(n < 0 for n in self.shape):
            raise ValueError(f"an array cannot be {self.dtype}{list(self.shape)}")
        for piece in self.pieces:
            limits = (prod(self.shape),) if piece.part.is_flat else self.shape
            inside = (0 <= a <= b <= n for (a, b), n in zip(piece.part.box, limits, strict=True))
            end = piece.at + piece.part.size * self.dtype.itemsize
            if not all(inside) or not 0 <= piece.at <= end <= files.size(piece.file):
                raise ValueError(f"a piece {piece.to_json()} is not in its array or its file")
        if sum(piece.part.size for piece in self.pieces) != prod(self.shape):
            raise ValueError(f"the pieces do not make up an array of {list(self.shape)}")

    def read(self, files: CheckedFiles, part: Part, into: np.ndarray | None = None) -> np.ndarray:
        """Read one part into memory that is not shared, and return it.

        Args:
            files: The files of the checkpoint.
            part: The part.
            into: A buffer from `empty` to read into; by default a new one.

        Raises:
            DataLossError: A file is damaged.
        """
        found = self.empty(part) if into is None else into
        wanted = part.flat(self.shape)
        ranges = [piece.part.flat(self.shape) for piece in self.pieces]
        # Contiguous everywhere: read exactly the bytes that are needed, straight into place.
        if wanted is not None and all(r is not None for r in ranges):
            self._read_range(files, wanted, ranges, found.reshape(-1))
            return found
        # A box and a range of the flattened array have no simple intersection: read everything.
        if part.is_flat or any(piece.part.is_flat for piece in self.pieces):
            everything = self.read(files, whole(self.shape))
            found[...] = (everything.ravel() if part.is_flat else everything)[part.slices()]
            return found
        for piece in self.pieces:
            common = part.common(piece.part)
            if common.size:
                data = self.empty(piece.part)
                files.read(piece.file, piece.at, as_bytes(data))
                found[common.slices(part.box)] = data[common.slices(piece.part.box)]
        return found

    def _read_range(
        self, files: CheckedFiles, wanted: Part, ranges: Sequence[Part | None], found: np.ndarray
    ) -> None:
        for piece, stored in zip(self.pieces, ranges, strict=True):
            common = wanted.common(stored)  # type: ignore[arg-type]
            if common.size:
                skipped = common.box[0][0] - stored.box[0][0]  # type: ignore[union-attr]
                into = as_bytes(found[common.slices(wanted.box)])
                files.read(piece.file, piece.at + skipped * self.dtype.itemsize, into)

    def empty(self, part: Part) -> np.ndarray:
        """Allocate an uninitialized array for a part."""
        return buffer(part.size * self.dtype.itemsize).view(self.dtype).reshape(part.shape)


def saved_arrays(body: dict[str, Any]) -> dict[str, Saved]:
    """Return the arrays that the manifest ``body`` describes, by key."""
    found = {}
    for key, entry in body["arrays"].items():
        shape = tuple(map(int, entry["shape"]))
        pieces = [Piece.from_json(piece) for piece in entry.get("pieces", ())]
        if "name" in entry:  # format 1 has one file per array
            file = chunk(f"arrays/{entry['name']}", len(shape))
            pieces = [Piece(whole(shape), file, 0)]
        dtype = np.dtype(jnp.dtype(entry["dtype"]))
        found[key] = Saved(shape, dtype, entry.get("key"), pieces, entry.get("copies_on"))
    return found


@dataclass(frozen=True)
class Task:
    """A part of a value that one worker writes."""

    key: str
    value: Value
    part: Part


def assign_tasks(
    values: Mapping[str, Value], workers: Sequence[int]
) -> tuple[dict[int, list[Task]], list[str]]:
    """Assign every part to one worker that holds it, balancing the bytes written.

    Args:
        values: The values to write, in the same order on all workers.
        workers: The indices of the workers that can write.

    Returns:
        The tasks of each worker; and the keys of values with a part that none of ``workers`` holds.
    """
    tasks: dict[int, list[Task]] = {worker: [] for worker in workers}
    loads = dict.fromkeys(workers, 0)
    lost = []
    for key, value in values.items():
        for part, holders in value.holders().items():
            if not part.size:
                continue
            able = [worker for worker in holders if worker in loads]
            if not able:
                lost.append(key)
                continue
            chosen = min(able, key=lambda worker: (loads[worker], worker))
            loads[chosen] += part.size * value.array.dtype.itemsize
            tasks[chosen].append(Task(key, value, part))
    return tasks, lost


class Packed:
    """Byte arrays to be written back to back, passed to Orbax as if they were one NumPy array."""

    def __init__(self, parts: list[np.ndarray], shape: Sequence[int], dtype: Any) -> None:
        self.parts, self.shape, self.dtype = parts, tuple(shape), np.dtype(dtype)
        self.size = prod(self.shape)


def packed(
    tasks: Sequence[Task], folder: str
) -> tuple[dict[str, Packed], list[tuple[str, list[Any]]]]:
    """Copy the parts of ``tasks`` to the host, and pack the small ones together.

    Returns:
        The arrays to write, by name; and ``(key, piece as JSON)`` of each task.
    """
    tree: dict[str, Packed] = {}
    rows: list[tuple[str, list[Any]]] = []
    small: list[np.ndarray] = []
    filled = 0
    for number, task in enumerate(tasks):
        host = task.value.on_host(task.part)
        if host.nbytes >= _LARGE:
            tree[f"a{number}"] = Packed([as_bytes(host)], host.shape, host.dtype)
            piece = Piece(task.part, chunk(f"{folder}/a{number}", host.ndim), 0)
        else:
            piece = Piece(task.part, chunk(f"{folder}/small", 1), filled)
            small.append(as_bytes(host))
            filled += host.nbytes
        rows.append((task.key, piece.to_json()))
    if small:
        tree["small"] = Packed(small, [filled], np.uint8)
    return tree, rows
