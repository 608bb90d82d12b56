"""Where a shuffle keeps its elements: by place in a source, as columns, or as rows.

A store hands out a number for each element put into it, and gives elements back by number, once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import numpy as np

from replicax.data._blocks import (
    Block,
    ColumnBlock,
    PlaceBlock,
    Row,
    RowBlock,
    Source,
    as_structure,
)
from replicax.data._leaves import Array
from replicax.data._structure import Structure

_TAG_BITS = 48
_LOCAL = (1 << _TAG_BITS) - 1


class Store(ABC):
    """Elements by number."""

    @abstractmethod
    def accepts(self, block: Block) -> bool:
        """Whether elements of this form can be kept here."""

    @abstractmethod
    def put(self, block: Block) -> Array:
        """Keep elements; their numbers."""

    @abstractmethod
    def get(self, handles: Array) -> Block:
        """Hand out elements and forget them."""

    @abstractmethod
    def drop(self, handles: Array) -> None:
        """Forget elements."""


@final
class MixedStore(Store):
    """As many stores as there are forms of elements: one, nearly always."""

    def __init__(self) -> None:
        self._stores: list[Store] = []
        self._structure: Structure | None = None

    def accepts(self, block: Block) -> bool:
        """Everything."""
        return True

    def put(self, block: Block) -> Array:
        """Keep elements in the store for their form."""
        if self._structure is None:
            self._structure = block.structure
        block = as_structure(block, self._structure)
        for tag, store in enumerate(self._stores):
            if store.accepts(block):
                return store.put(block) + (tag << _TAG_BITS) if tag else store.put(block)
        self._stores.append(_new_store(block))
        return self._stores[-1].put(block) + ((len(self._stores) - 1) << _TAG_BITS)

    def get(self, handles: Array) -> Block:
        """Hand out elements, as rows if they come from several stores."""
        if len(self._stores) == 1:
            return self._stores[0].get(handles)
        tags = handles >> _TAG_BITS
        rows: list[Row] = [()] * len(handles)
        for tag in np.unique(tags).tolist():
            where = np.flatnonzero(tags == tag)
            block: Block = self._stores[tag].get(handles[where] & _LOCAL)
            for position, row in zip(where.tolist(), block.rows(), strict=True):
                rows[position] = row
        structure = self._structure
        assert structure is not None
        return RowBlock(structure, rows)

    def drop(self, handles: Array) -> None:
        """Forget elements."""
        tags = handles >> _TAG_BITS
        for tag, store in enumerate(self._stores):
            store.drop(handles[tags == tag] & _LOCAL)


@final
class _PlaceStore(Store):
    """Places in one source: the number is the place, and nothing is kept."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def accepts(self, block: Block) -> bool:
        return isinstance(block, PlaceBlock) and block.source is self._source

    def put(self, block: Block) -> Array:
        assert isinstance(block, PlaceBlock)
        return block.all_places()

    def get(self, handles: Array) -> Block:
        return PlaceBlock.of(self._source, handles)

    def drop(self, handles: Array) -> None:
        """Nothing to forget."""


class _PoolStore(Store):
    """Numbered slots that are used again after their element has gone."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._size = 0

    def _slots_for(self, count: int) -> Array:
        if len(self._free) < count:
            grown = max(2 * self._size, self._size + count, 64)
            self._grow(grown)
            self._free.extend(range(grown - 1, self._size - 1, -1))
            self._size = grown
        slots = self._free[-count:]
        del self._free[-count:]
        return np.array(slots, np.int64)

    @abstractmethod
    def _grow(self, size: int) -> None:
        """Make room."""

    def drop(self, handles: Array) -> None:
        self._free.extend(handles.tolist())


@final
class _ColumnStore(_PoolStore):
    """Elements of one shape and dtype, as rows of large arrays."""

    def __init__(self, structure: Structure, columns: Sequence[Array]) -> None:
        super().__init__()
        self._structure = structure
        self._forms = [(c.shape[1:], c.dtype) for c in columns]
        self._pools = [np.empty((0, *c.shape[1:]), c.dtype) for c in columns]

    def accepts(self, block: Block) -> bool:
        if isinstance(block, RowBlock):
            return False
        return [(c.shape[1:], c.dtype) for c in block.columns()] == self._forms

    def put(self, block: Block) -> Array:
        slots = self._slots_for(len(block))
        for pool, column in zip(self._pools, block.columns(), strict=True):
            pool[slots] = column
        return slots

    def get(self, handles: Array) -> Block:
        columns = [pool.take(handles, 0) for pool in self._pools]
        self.drop(handles)
        return ColumnBlock(self._structure, columns, len(handles))

    def _grow(self, size: int) -> None:
        for position, old in enumerate(self._pools):
            new = np.empty((size, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            self._pools[position] = new


@final
class _RowStore(_PoolStore):
    """Elements of any form."""

    def __init__(self, structure: Structure) -> None:
        super().__init__()
        self._structure = structure
        self._rows: list[Row] = []

    def accepts(self, block: Block) -> bool:
        return isinstance(block, RowBlock)

    def put(self, block: Block) -> Array:
        slots = self._slots_for(len(block))
        for slot, row in zip(slots.tolist(), block.rows(), strict=True):
            self._rows[slot] = row
        return slots

    def get(self, handles: Array) -> Block:
        rows = [self._rows[slot] for slot in handles.tolist()]
        self.drop(handles)
        return RowBlock(self._structure, rows)

    def drop(self, handles: Array) -> None:
        slots = handles.tolist()
        for slot in slots:
            self._rows[slot] = ()
        self._free.extend(slots)

    def _grow(self, size: int) -> None:
        self._rows.extend([()] * (size - len(self._rows)))


def _new_store(block: Block) -> Store:
    if isinstance(block, PlaceBlock):
        return _PlaceStore(block.source)
    if isinstance(block, RowBlock) or not block.structure.num_leaves:
        return _RowStore(block.structure)
    return _ColumnStore(block.structure, block.columns())
