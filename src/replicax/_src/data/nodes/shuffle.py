"""The shuffle node, and the stores for its buffered elements.

A store returns an integer handle for each element put into it, and returns the element for that
handle once. There are three kinds: indices into a random-access source, columns, and rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from replicax._src.data.element_blocks import (
    Block,
    ColumnBlock,
    IndexBlock,
    IndexedSource,
    Row,
    RowBlock,
    as_structure,
)
from replicax._src.data.leaves import Array
from replicax._src.data.node import Node, PassingNode, Stream
from replicax._src.data.seeds import Run, Seeds
from replicax._src.data.structure import Structure

# A handle of `MixedStore` is the index of a store in the high bits, and its handle in the others.
_TAG_BITS = 48
_LOCAL = (1 << _TAG_BITS) - 1


class Store(ABC):
    """Elements by handle."""

    @abstractmethod
    def accepts(self, block: Block) -> bool:
        """Whether elements in the form of `block` can be stored here."""

    @abstractmethod
    def put(self, block: Block) -> Array:
        """Store the elements of `block` and return their handles."""

    @abstractmethod
    def get(self, handles: Array) -> Block:
        """Return the elements of `handles` and remove them."""

    @abstractmethod
    def drop(self, handles: Array) -> None:
        """Remove the elements of `handles`."""


@final
class MixedStore(Store):
    """One store for each form of elements; nearly always there is only one."""

    def __init__(self) -> None:
        self._stores: list[Store] = []
        self._structure: Structure | None = None

    def accepts(self, block: Block) -> bool:
        """True: elements of any form are accepted."""
        return True

    def put(self, block: Block) -> Array:
        """Store elements in the store for their form, which is created if needed."""
        if self._structure is None:
            self._structure = block.structure
        block = as_structure(block, self._structure)
        for tag, store in enumerate(self._stores):
            if store.accepts(block):
                return store.put(block) + (tag << _TAG_BITS) if tag else store.put(block)
        self._stores.append(_new_store(block))
        return self._stores[-1].put(block) + ((len(self._stores) - 1) << _TAG_BITS)

    def get(self, handles: Array) -> Block:
        """Return and remove elements, as rows if there are several stores."""
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
        """Remove the elements of `handles`."""
        tags = handles >> _TAG_BITS
        for tag, store in enumerate(self._stores):
            store.drop(handles[tags == tag] & _LOCAL)


@final
class _IndexStore(Store):
    """Indices into one source: the handle is the index, and nothing is stored."""

    def __init__(self, source: IndexedSource) -> None:
        self._source = source

    def accepts(self, block: Block) -> bool:
        return isinstance(block, IndexBlock) and block.source is self._source

    def put(self, block: Block) -> Array:
        assert isinstance(block, IndexBlock)
        return block.all_indices()

    def get(self, handles: Array) -> Block:
        return IndexBlock.of(self._source, handles)

    def drop(self, handles: Array) -> None:
        """Do nothing: no element is stored."""


class _PoolStore(Store):
    """A pool of slots that are reused after their element is removed."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._size = 0

    def _slots_for(self, count: int) -> Array:
        """Return `count` free slots, growing the pool if necessary."""
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
        """Extend the pool to `size` slots."""

    def drop(self, handles: Array) -> None:
        self._free.extend(handles.tolist())


@final
class _ColumnStore(_PoolStore):
    """Elements of fixed shapes and dtypes, as rows of large arrays."""

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
            new: Array = np.empty((size, *old.shape[1:]), old.dtype)
            new[: len(old)] = old
            self._pools[position] = new


@final
class _RowStore(_PoolStore):
    """Elements of any shape, as tuples of leaves."""

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
    if isinstance(block, IndexBlock):
        return _IndexStore(block.source)
    if isinstance(block, RowBlock) or not block.structure.num_leaves:
        return _RowStore(block.structure)
    return _ColumnStore(block.structure, block.columns())


_DRAWS = 1024  # random numbers drawn at once; fixed, so the order does not depend on pull sizes
_AHEAD = 1024  # elements to read and swap at once
_FILL = 1 << 16  # elements to read at once while the buffer fills


@final
@dataclass(frozen=True, eq=False)
class ShuffleNode(PassingNode):
    """The elements of random buffer slots, each refilled with the next element of the input.

    A negative `buffer_size` buffers the whole input.
    """

    buffer_size: int
    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The seeds of the random order."""
        return self.seeds

    @property
    def peeked(self) -> Node:
        """The input, unshuffled."""
        return self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        generator = run.generator(self.seeds)
        ahead = 1 if self.input.calls_user_code else _AHEAD
        return _ShuffleStream(self.input.open(run), self.buffer_size, generator, ahead=ahead)


@final
class _ShuffleStream(Stream):
    def __init__(
        self, stream: Stream, capacity: int, generator: np.random.Generator, *, ahead: int
    ) -> None:
        self._stream = stream
        self._capacity = capacity if capacity >= 0 else 1 << 62
        self._generator = generator
        self._ahead = ahead
        self._store = MixedStore()
        self._filling: list[Array] = []
        self._missing = self._capacity
        self._slots = np.empty(0, np.int64)  # handles of the buffered elements
        self._draws = np.empty(0, np.int64)
        self._ready = np.empty(0, np.int64)  # handles in output order, to be returned next
        self._is_filled = False
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        handles = self._next_handles(limit)
        return None if handles is None else self._store.get(handles)

    def skip(self, count: int) -> int:
        done = 0
        while done < count:
            handles = self._next_handles(count - done)
            if handles is None:
                break
            self._store.drop(handles)
            done += len(handles)
        return done

    def close(self) -> None:
        self._stream.close()

    def _next_handles(self, limit: int) -> Array | None:
        """Return up to `limit` handles in output order, or None at the end."""
        if not self._is_filled:
            self._fill()
        if not len(self._ready) and not self._is_done:
            block = self._stream.pull(max(limit, self._ahead))
            if block is None:
                self._finish()
            else:
                self._ready = self._swap(self._store.put(block))
        if not len(self._ready):
            return None
        handles, self._ready = self._ready[:limit], self._ready[limit:]
        return handles

    def _fill(self) -> None:
        """Fill the buffer; after an error of the input, a second call continues."""
        while self._missing:
            block = self._stream.pull(min(self._missing, _FILL))
            if block is None:
                break
            self._filling.append(self._store.put(block))
            self._missing -= len(block)
        self._is_filled = True
        if self._filling:
            self._slots = np.concatenate(self._filling)
            self._filling = []
        if self._missing:
            self._finish()

    def _swap(self, arrived: Array) -> Array:
        """Put each arrival into a random slot and return the handles that were replaced, in order.

        Equivalent to swapping one by one, but vectorized: a slot that is drawn a second time
        releases the arrival of the earlier draw instead of its original content.
        """
        drawn = self._draw(len(arrived))
        # A stable sort puts repeated draws of one slot next to each other, in order of arrival.
        order = np.argsort(drawn, kind="stable")
        is_again = np.empty(len(drawn), bool)
        is_again[:1] = False
        np.equal(drawn[order[1:]], drawn[order[:-1]], out=is_again[1:])
        leaving = self._slots[drawn]
        again = np.flatnonzero(is_again)
        leaving[order[again]] = arrived[order[again - 1]]
        self._slots[drawn] = arrived  # for repeated indices NumPy keeps the last value
        return leaving

    def _draw(self, count: int) -> Array:
        while len(self._draws) < count:
            fresh = self._generator.integers(0, self._capacity, _DRAWS)
            self._draws = np.concatenate([self._draws, fresh])
        drawn, self._draws = self._draws[:count], self._draws[count:]
        return drawn

    def _finish(self) -> None:
        # The draws so far depend only on the number of elements, and so does the permutation:
        # the order does not depend on pull sizes.
        self._ready = self._slots[self._generator.permutation(len(self._slots))]
        self._slots = self._slots[:0]
        self._is_done = True
