"""Blocks: several consecutive elements that move through a pipeline together.

Three forms: places in a random-access source (nothing is copied until somebody looks), columns
(one array per leaf with a leading axis), and rows (elements that need not be alike).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import numpy as np

from replicax.data._leaves import Array, is_stackable, stack
from replicax.data._structure import Structure

Row = tuple[Any, ...]
NewArray = Callable[[tuple[int, ...], np.dtype[Any]], Array]  # of a shape and a dtype, to be filled


class IndexedSource(Protocol):
    """Elements that can be fetched by number."""

    structure: Structure

    def span(self, start: int, stop: int, new: NewArray | None = None) -> list[Array]:
        """Columns of the elements ``start`` to ``stop``; new memory, where there is some."""
        ...

    def gather(self, places: Array, new: NewArray | None = None) -> list[Array]:
        """Columns of the elements at ``places``; new memory, where there is some."""
        ...


class Block(ABC):
    """One or more consecutive elements."""

    __slots__ = ()
    structure: Structure

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def columns(self) -> list[Array]:
        """One array per leaf, with a leading axis; an error if elements differ in shape."""

    def columns_in(self, new: NewArray | None) -> list[Array]:
        """The same, in arrays that ``new`` makes, as far as they are made now."""
        return self.columns()

    @abstractmethod
    def slice(self, start: int, stop: int) -> "Block":
        """The elements ``start`` to ``stop``."""

    @abstractmethod
    def take(self, places: Array) -> "Block":
        """The elements at ``places``."""

    def rows(self) -> Sequence[Row]:
        """One tuple of leaves per element."""
        return list(zip(*self.columns(), strict=True))

    def elements(self) -> list[Any]:
        """The elements as the user sees them."""
        structure = self.structure
        if structure.kind == "leaf":
            return list(self.columns()[0])
        rows = self.rows()
        if structure.is_flat_tuple:
            return list(rows)
        return [structure.unflatten(row) for row in rows]

    def is_columnar(self) -> bool:
        """Whether `columns` works."""
        return self.structure.num_leaves > 0


@final
class PlaceBlock(Block):
    """Numbers of elements in a source: a span, or an array of places."""

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
    def of(cls, source: IndexedSource, places: Array) -> "PlaceBlock":
        """A block of scattered places."""
        return cls(source, 0, len(places), places=places)

    def __len__(self) -> int:
        return self.stop - self.start

    def all_places(self) -> Array:
        """The places as one array."""
        return np.arange(self.start, self.stop) if self.places is None else self.places

    def columns(self) -> list[Array]:
        """Fetch the elements: one gather per leaf."""
        return self.columns_in(None)

    def columns_in(self, new: NewArray | None) -> list[Array]:
        """Fetch the elements."""
        if self.places is None:
            return self.source.span(self.start, self.stop, new)
        return self.source.gather(self.places, new)

    def slice(self, start: int, stop: int) -> "PlaceBlock":
        """Some of the places."""
        if self.places is None:
            return PlaceBlock(self.source, self.start + start, self.start + stop)
        return PlaceBlock.of(self.source, self.places[start:stop])

    def take(self, places: Array) -> "PlaceBlock":
        """Places of places."""
        return PlaceBlock.of(self.source, self.all_places()[places])


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
        """The arrays as they are."""
        return self._columns

    def slice(self, start: int, stop: int) -> "ColumnBlock":
        """Rows of the block, as views."""
        return ColumnBlock(self.structure, [c[start:stop] for c in self._columns], stop - start)

    def take(self, places: Array) -> "ColumnBlock":
        """Rows at these places, as copies."""
        return ColumnBlock(self.structure, [c[places] for c in self._columns], len(places))


@final
class RowBlock(Block):
    """Elements one by one: batches, or elements of different shapes."""

    __slots__ = ("_rows", "structure")

    def __init__(self, structure: Structure, rows: Sequence[Row]) -> None:
        self.structure = structure
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> Sequence[Row]:
        """The tuples of leaves."""
        return self._rows

    def elements(self) -> list[Any]:
        """The elements as the user sees them."""
        structure = self.structure
        if structure.is_flat_tuple:
            return list(self._rows)
        if structure.kind == "leaf":
            return [row[0] for row in self._rows]
        return [structure.unflatten(row) for row in self._rows]

    def columns(self) -> list[Array]:
        """Stack; an error if shapes differ."""
        return [stack(leaves) for leaves in zip(*self._rows, strict=True)]

    def slice(self, start: int, stop: int) -> "RowBlock":
        """Some of the rows."""
        return RowBlock(self.structure, self._rows[start:stop])

    def take(self, places: Array) -> "RowBlock":
        """Some of the rows, in another order."""
        numbers: list[int] = places.tolist()
        return RowBlock(self.structure, [self._rows[number] for number in numbers])

    def is_columnar(self) -> bool:
        """Whether all shapes and dtypes are equal."""
        if not self.structure.num_leaves:
            return False
        return all(is_stackable(leaves) for leaves in zip(*self._rows, strict=True))


def join(blocks: Sequence[Block]) -> Block:
    """Consecutive blocks -> one block."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    if isinstance(first, PlaceBlock) and all(
        isinstance(block, PlaceBlock) and block.source is first.source for block in blocks
    ):
        places = [block.all_places() for block in blocks]  # type: ignore[attr-defined]
        return PlaceBlock.of(first.source, np.concatenate(places))
    blocks = [as_structure(block, first.structure) for block in blocks]
    if any(isinstance(block, RowBlock) for block in blocks):
        return RowBlock(first.structure, [row for block in blocks for row in block.rows()])
    columns = [block.columns() for block in blocks]
    parts = list(zip(*columns, strict=True))
    if all(_same_form(part) for part in parts):
        size = sum(len(block) for block in blocks)
        return ColumnBlock(first.structure, [np.concatenate(part) for part in parts], size)
    return RowBlock(first.structure, [row for block in blocks for row in block.rows()])


def as_structure(block: Block, structure: Structure) -> Block:
    """The same elements with their leaves in the order of ``structure``."""
    if block.structure == structure:
        return block
    return RowBlock(structure, [tuple(structure.leaves_of(e)) for e in block.elements()])


def one_row(structure: Structure, leaves: Sequence[Any]) -> RowBlock:
    """A block of a single element."""
    return RowBlock(structure, [tuple(leaves)])


def _same_form(columns: Sequence[Array]) -> bool:
    first = columns[0]
    return all(c.shape[1:] == first.shape[1:] and c.dtype == first.dtype for c in columns)
