"""Pieces: an array as devices hold it -> what each worker writes of it -> any part of it again.

A part of an array is a box, with a beginning and an end along each axis; or, of an array that is
held as a flat one, a range of its entries. Every box that devices hold is written once, by one of
the workers that hold it, and no worker needs the whole. What is read again may be cut otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.state._cell import Cell
from replicax.train._files import CheckedFiles, as_bytes, buffer
from replicax.train._orbax_private import chunk
from replicax.values._cut import Cut

# A file for each array, and a wait for the disk for each file, take longer than the bytes: what is
# smaller goes into one file.
_LARGE = 16 << 20
Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A part of an array.

    Attributes:
        box: Where it begins and ends along each axis.
        is_flat: Whether it is a range of the entries, in the order of the last axis first.
    """

    box: Box
    is_flat: bool = False

    @property
    def shape(self) -> Shape:
        """Its own shape."""
        return tuple(end - begin for begin, end in self.box)

    @property
    def size(self) -> int:
        """How many entries it has."""
        return prod(self.shape)

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """How to take it out of the whole, or out of the part that begins at ``origin``."""
        starts = [begin for begin, _ in origin] if origin else [0] * len(self.box)
        return tuple(slice(b - s, e - s) for (b, e), s in zip(self.box, starts, strict=True))

    def common(self, other: Part) -> Part:
        """What it has in common with another part of the same kind."""
        pairs = zip(self.box, other.box, strict=True)
        box = ((max(a, c), min(b, d)) for (a, b), (c, d) in pairs)
        return Part(tuple((a, max(a, b)) for a, b in box), self.is_flat)

    def flat(self, shape: Shape) -> Part | None:
        """The same as a range of the entries of an array of that shape; None if it is none."""
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
    """All of an array."""
    return Part(tuple((0, n) for n in shape))


@dataclass(frozen=True)
class Value:
    """An array to be saved, wherever it is.

    Attributes:
        array: The array: NumPy's, or on devices of one or of all workers.
        cut: How it is held in parts that are not of its own shape.
        copies_on: If its rows are the copies of replicas, of which; any text.
    """

    array: Any
    cut: Cut | None = None
    copies_on: str | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the whole."""
        return tuple(np.shape(self.array)) if self.cut is None else self.cut.shape

    def holders(self) -> dict[Part, list[int]]:
        """The parts that devices hold, with the workers that have each.

        What only one worker knows of is the first one's: the others have values of their own.
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
        """A part that this process holds."""
        if not isinstance(self.array, jax.Array) or part == whole(self.shape):
            host = np.asarray(_first(self.array))
        else:
            shards = ((self._part(s.index), s) for s in self.array.addressable_shards)
            host = np.asarray(next(s.data for p, s in shards if p == part))
            host = host[: part.size] if part.is_flat else host  # without what fills it up
        return np.ascontiguousarray(host).reshape(part.shape)

    def _part(self, index: tuple[slice, ...]) -> Part:
        return part_at(index, self.array.shape, self.cut)


def _first(array: Any) -> Any:
    is_spread = isinstance(array, jax.Array) and not array.is_fully_addressable
    return array.addressable_data(0) if is_spread else array


def part_at(index: tuple[slice, ...], shape: Shape, cut: Cut | None) -> Part:
    """The part at an index of the array that devices hold, whose shape is ``shape``."""
    bounds = (s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    if cut is None or not cut.is_flat:
        return Part(tuple(bounds))
    ((begin, end),) = bounds
    last = prod(cut.shape)
    return Part(((min(begin, last), min(end, last)),), is_flat=True)


def own_parts(cell: Cell) -> list[Part]:
    """The parts of a variable that this process's devices hold."""
    if cell.topology is None:
        return [whole(cell.shape)]
    at = cell.sharding.addressable_devices_indices_map(cell.stored_shape)
    return list(
        dict.fromkeys(part_at(i, cell.stored_shape, cell.cut) for i in at.values() if i is not None)
    )


def put_parts(cell: Cell, own: Mapping[Part, np.ndarray]) -> None:
    """Replace the value of a variable.

    Args:
        cell: The variable's.
        own: The new value of each of `own_parts`, in memory that nobody else has.
    """
    if cell.topology is None:
        (array,) = own.values()
        cell.put(jax.device_put(array))
        return
    shape, cut = cell.stored_shape, cell.cut

    def at(index: Any) -> np.ndarray:
        array = own[part_at(index, shape, cut)]
        if cut is None or not cut.is_flat:
            return array
        return np.pad(array, (0, cut.part_shape[0] - array.size))

    cell.put(jax.make_array_from_callback(shape, cell.sharding, at))


@dataclass(frozen=True)
class Piece:
    """A part of an array that is in a file.

    Attributes:
        part: Which part.
        file: The file.
        at: Where in the file it begins.
    """

    part: Part
    file: str
    at: int

    def to_json(self) -> list[Any]:
        """The piece for a manifest."""
        return [self.part.box, self.part.is_flat, self.file, self.at]

    @classmethod
    def from_json(cls, told: Any) -> Piece:
        """The piece of a manifest."""
        box, is_flat, file, at = told
        return cls(Part(tuple((int(a), int(b)) for a, b in box), bool(is_flat)), str(file), int(at))


@dataclass(frozen=True)
class Saved:
    """An array that is saved, in pieces.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        key_impl: The kind of random keys that it is the numbers of; None if it is of no keys.
        pieces: Where it is.
        copies_on: If its rows are the copies of replicas, of which.
    """

    shape: Shape
    dtype: np.dtype[Any]
    key_impl: str | None
    pieces: Sequence[Piece]
    copies_on: str | None = None

    def check(self, files: CheckedFiles) -> None:
        """See that the pieces make up the array, and lie in their files.

        Raises:
            ValueError: If they do not.
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
        """One part, of no more than the files that it is in; in memory of its own.

        Args:
            files: Where it is.
            part: Which part.
            into: Memory for it, which `empty` gave.

        Raises:
            DataLossError: If a file is damaged.
        """
        found = self.empty(part) if into is None else into
        wanted = part.flat(self.shape)
        held = [piece.part.flat(self.shape) for piece in self.pieces]
        if wanted is not None and all(h is not None for h in held):
            self._read_range(files, wanted, held, found.reshape(-1))
            return found
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
        self, files: CheckedFiles, wanted: Part, held: Sequence[Part | None], found: np.ndarray
    ) -> None:
        for piece, has in zip(self.pieces, held, strict=True):
            common = wanted.common(has)  # type: ignore[arg-type]
            if common.size:
                skipped = common.box[0][0] - has.box[0][0]  # type: ignore[union-attr]
                into = as_bytes(found[common.slices(wanted.box)])
                files.read(piece.file, piece.at + skipped * self.dtype.itemsize, into)

    def empty(self, part: Part) -> np.ndarray:
        """New memory for a part."""
        return buffer(part.size * self.dtype.itemsize).view(self.dtype).reshape(part.shape)


def saved_arrays(body: dict[str, Any]) -> dict[str, Saved]:
    """The arrays of a manifest, by key."""
    found = {}
    for key, entry in body["arrays"].items():
        shape = tuple(map(int, entry["shape"]))
        pieces = [Piece.from_json(told) for told in entry.get("pieces", ())]
        if "name" in entry:  # in format 1 each array has a file
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


def shared_out(
    values: Mapping[str, Value], workers: Sequence[int]
) -> tuple[dict[int, list[Task]], list[str]]:
    """What each worker writes: every part once, and all workers about as much.

    Args:
        values: What to write; the same on all workers.
        workers: Who can write.

    Returns:
        What each has to write; and the keys of which a part is held only by who cannot.
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
    """Arrays that are written one after the other, and that Orbax takes for one of NumPy's."""

    def __init__(self, parts: list[np.ndarray], shape: Sequence[int], dtype: Any) -> None:
        self.parts, self.shape, self.dtype = parts, tuple(shape), np.dtype(dtype)
        self.size = prod(self.shape)


def packed(
    tasks: Sequence[Task], folder: str
) -> tuple[dict[str, Packed], list[tuple[str, list[Any]]]]:
    """The arrays that are written, small ones joined; and in which file each part is, and where."""
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
