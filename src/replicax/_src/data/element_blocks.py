"""Blocks: runs of consecutive elements that move through a pipeline together.

Three representations: indices into a random-access source (nothing is copied until the data is
read), columns (one array per leaf with a leading axis), and rows (elements that may differ in
shape).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from replicax._src.data.leaves import Array, is_stackable, stack
from replicax._src.data.structure import Structure

Row = tuple[Any, ...]
NewArray = Callable[[tuple[int, ...], np.dtype[Any]], Array]  # like np.empty: (shape, dtype)


class IndexedSource(Protocol):
    """A source with random access to its elements."""

    structure: Structure

    def span(self, start: int, stop: int, new: NewArray | None = None) -> list[Array]:
        """Return columns of the elements ``start`` to ``stop``.

        Arrays that have to be allocated come from `new` if it is given.
        """
        ...

    def gather(self, places: Array, new: NewArray | None = None) -> list[Array]:
        """Return columns of the elements at the indices ``places``, allocated with `new`."""
        ...


class Block(ABC):
    """One or more consecutive elements."""

    __slots__ = ()
    structure: Structure

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def columns(self) -> list[Array]:
        """Return one array per leaf with a leading axis; raise if elements differ in shape."""

    def columns_in(self, new: NewArray | None) -> list[Array]:
        """Return the columns, allocating with ``new`` the arrays that do not exist yet."""
        return self.columns()

    @abstractmethod
    def slice(self, start: int, stop: int) -> "Block":
        """Return the elements ``start`` to ``stop`` as a block."""

    @abstractmethod
    def take(self, places: Array) -> "Block":
        """Return the elements at the indices ``places`` as a block."""

    def rows(self) -> Sequence[Row]:
        """Return one tuple of leaves per element."""
        return list(zip(*self.columns(), strict=True))

    def elements(self) -> list[Any]:
        """Return the elements in the nested structure that the user sees."""
        structure = self.structure
        if structure.kind == "leaf":
            return list(self.columns()[0])
        rows = self.rows()
        if structure.is_flat_tuple:
            return list(rows)
        return [structure.unflatten(row) for row in rows]

    def is_columnar(self) -> bool:
        """Whether the block can be represented as columns."""
        return self.structure.num_leaves > 0


@final
class IndexBlock(Block):
    """Indices of elements in a source: a range, or the array `places`."""

    __slots__ = ("places", "source", "start", "stop", "structure")

    def __init__(
        self, source: IndexedSource, start: int, stop: int, *, places: Array | None = None
    ) -> None:
        self.source = source
        self.start = start
        self.stop = stop
        self.places = places
        self.structure = source.structure

    @classmethod
    def of(cls, source: IndexedSource, places: Array) -> "IndexBlock":
        """Return a block of the elements at the indices `places`."""
        return cls(source, 0, len(places), places=places)

    def __len__(self) -> int:
        return self.stop - self.start

    def all_indices(self) -> Array:
        """Return the indices as one array."""
        return np.arange(self.start, self.stop) if self.places is None else self.places

    def columns(self) -> list[Array]:
        """Fetch the elements, with one gather per leaf."""
        return self.columns_in(None)

    def columns_in(self, new: NewArray | None) -> list[Array]:
        """Fetch the elements into arrays allocated with `new`."""
        if self.places is None:
            return self.source.span(self.start, self.stop, new)
        return self.source.gather(self.places, new)

    def slice(self, start: int, stop: int) -> "IndexBlock":
        """Return the block of indices ``start`` to ``stop``; fetches nothing."""
        if self.places is None:
            return IndexBlock(self.source, self.start + start, self.start + stop)
        return IndexBlock.of(self.source, self.places[start:stop])

    def take(self, places: Array) -> "IndexBlock":
        """Return the block of indices at positions `places`; fetches nothing."""
        return IndexBlock.of(self.source, self.all_indices()[places])


@final
class ColumnBlock(Block):
    """One array per leaf."""

    __slots__ = ("_columns", "_size", "structure")

    def __init__(self, structure: Structure, columns: list[Array], size: int) -> None:
        self.structure = structure
        self._columns = columns
        self._size = size

    def __len__(self) -> int:
        return self._size

    def columns(self) -> list[Array]:
        """Return the arrays, without copying."""
        return self._columns

    def slice(self, start: int, stop: int) -> "ColumnBlock":
        """Return a range of rows as views."""
        return ColumnBlock(self.structure, [c[start:stop] for c in self._columns], stop - start)

    def take(self, places: Array) -> "ColumnBlock":
        """Return the rows at `places` as copies."""
        return ColumnBlock(self.structure, [c[places] for c in self._columns], len(places))


@final
class RowBlock(Block):
    """Elements stored one by one: batches, or elements of different shapes."""

    __slots__ = ("_rows", "structure")

    def __init__(self, structure: Structure, rows: Sequence[Row]) -> None:
        self.structure = structure
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> Sequence[Row]:
        """Return the tuples of leaves."""
        return self._rows

    def elements(self) -> list[Any]:
        """Return the elements in the nested structure that the user sees."""
        structure = self.structure
        if structure.is_flat_tuple:
            return list(self._rows)
        if structure.kind == "leaf":
            return [row[0] for row in self._rows]
        return [structure.unflatten(row) for row in self._rows]

    def columns(self) -> list[Array]:
        """Stack the leaves; raise if shapes or dtypes differ."""
        return [stack(leaves) for leaves in zip(*self._rows, strict=True)]

    def slice(self, start: int, stop: int) -> "RowBlock":
        """Return the rows ``start`` to ``stop``."""
        return RowBlock(self.structure, self._rows[start:stop])

    def take(self, places: Array) -> "RowBlock":
        """Return the rows at the indices `places`, in that order."""
        indices: list[int] = places.tolist()
        return RowBlock(self.structure, [self._rows[index] for index in indices])

    def is_columnar(self) -> bool:
        """Whether all shapes and dtypes are equal."""
        if not self.structure.num_leaves:
            return False
        return all(is_stackable(leaves) for leaves in zip(*self._rows, strict=True))


def join(blocks: Sequence[Block]) -> Block:
    """Concatenate blocks, keeping the cheapest representation that all of them allow."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if isinstance(first, IndexBlock) and all(
        isinstance(block, IndexBlock) and block.source is first.source for block in blocks
    ):
        places = [block.all_indices() for block in blocks]  # type: ignore[attr-defined]
        return IndexBlock.of(first.source, np.concatenate(places))
    blocks = [as_structure(block, first.structure) for block in blocks]
    if any(isinstance(block, RowBlock) for block in blocks):
        return RowBlock(first.structure, [row for block in blocks for row in block.rows()])
    columns = [block.columns() for block in blocks]
    parts = list(zip(*columns, strict=True))
    if all(_are_concatenable(part) for part in parts):
        size = sum(len(block) for block in blocks)
        return ColumnBlock(first.structure, [np.concatenate(part) for part in parts], size)
    return RowBlock(first.structure, [row for block in blocks for row in block.rows()])


def as_structure(block: Block, structure: Structure) -> Block:
    """Return `block` with its leaves reordered to match `structure`."""
    if block.structure == structure:
        return block
    return RowBlock(structure, [tuple(structure.leaves_of(e)) for e in block.elements()])


def one_row(structure: Structure, leaves: Sequence[Any]) -> RowBlock:
    """Return a block of one element with these leaves."""
    return RowBlock(structure, [tuple(leaves)])


def _are_concatenable(columns: Sequence[Array]) -> bool:
    first = columns[0]
    return all(c.shape[1:] == first.shape[1:] and c.dtype == first.dtype for c in columns)
