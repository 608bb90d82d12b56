"""Random order through a buffer."""

from dataclasses import dataclass
from typing import final

import numpy as np

from replicax.data._blocks import Block
from replicax.data._leaves import Array
from replicax.data._node import Node, PassingNode, Stream
from replicax.data._nodes._stores import MixedStore
from replicax.data._seeds import Run, Seeds

_DRAWS = 1024  # random numbers are drawn in chunks of this fixed size, whatever is pulled
_AHEAD = 1024  # elements swapped at once
_FILL = 1 << 16  # elements read at once while the buffer fills


@final
@dataclass(frozen=True, eq=False)
class ShuffleNode(PassingNode):
    """Each element comes from a random slot of a buffer, which the next one of the input fills.

    A negative ``buffer_size`` holds the whole input.
    """

    buffer_size: int
    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The seeds of the order."""
        return self.seeds

    @property
    def peeked(self) -> Node:
        """In the order of the input."""
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
        self._slots = np.empty(0, np.int64)  # handles of the store
        self._draws = np.empty(0, np.int64)
        self._ready = np.empty(0, np.int64)  # handles in their final order
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
        """Each arrival takes a random slot, and what was there leaves, one after the other.

        Done for all at once: what leaves a slot drawn before is the arrival of that earlier draw.
        """
        drawn = self._draw(len(arrived))
        order = np.argsort(drawn, kind="stable")
        is_again = np.empty(len(drawn), bool)
        is_again[:1] = False
        np.equal(drawn[order[1:]], drawn[order[:-1]], out=is_again[1:])
        leaving = self._slots[drawn]
        again = np.flatnonzero(is_again)
        leaving[order[again]] = arrived[order[again - 1]]
        self._slots[drawn] = arrived  # of several arrivals in one slot NumPy keeps the last
        return leaving

    def _draw(self, count: int) -> Array:
        while len(self._draws) < count:
            fresh = self._generator.integers(0, self._capacity, _DRAWS)
            self._draws = np.concatenate([self._draws, fresh])
        drawn, self._draws = self._draws[:count], self._draws[count:]
        return drawn

    def _finish(self) -> None:
        # The draws so far are a function of the number of elements, and so is this one.
        self._ready = self._slots[self._generator.permutation(len(self._slots))]
        self._slots = self._slots[:0]
        self._is_done = True
