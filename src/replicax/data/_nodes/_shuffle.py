"""Random order through a buffer."""

from dataclasses import dataclass
from typing import final

import numpy as np

from replicax.data._blocks import Block
from replicax.data._leaves import Array
from replicax.data._node import PassingNode, Stream
from replicax.data._nodes._stores import MixedStore
from replicax.data._seeds import Run, Seeds

_DRAWS = 1024  # random numbers are drawn in chunks of this fixed size, whatever is pulled
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

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        generator = run.generator(self.seeds)
        return _ShuffleStream(self.input.open(run), self.buffer_size, generator)


@final
class _ShuffleStream(Stream):
    def __init__(self, stream: Stream, capacity: int, generator: np.random.Generator) -> None:
        self._stream = stream
        self._capacity = capacity if capacity >= 0 else 1 << 62
        self._generator = generator
        self._store = MixedStore()
        self._slots: list[int] = []  # handles of the store
        self._draws: list[int] = []
        self._rest: Array | None = None  # handles in final order, once the input has ended
        self._is_filled = False

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
        if self._rest is None:
            block = self._stream.pull(limit)
            if block is not None:
                return self._swap(self._store.put(block).tolist())
            self._finish(np.array(self._slots, np.int64))
        rest = self._rest
        if rest is None or not len(rest):
            return None
        self._rest = rest[limit:]
        return rest[:limit]

    def _fill(self) -> None:
        parts: list[Array] = []
        missing = self._capacity
        while missing:
            block = self._stream.pull(min(missing, _FILL))
            if block is None:
                break
            parts.append(self._store.put(block))
            missing -= len(block)
        self._is_filled = True
        slots = np.concatenate(parts) if parts else np.empty(0, np.int64)
        if missing:
            self._finish(slots)
        else:
            self._slots = slots.tolist()

    def _swap(self, arrived: list[int]) -> Array:
        slots, leaving = self._slots, []
        for slot, handle in zip(self._draw(len(arrived)), arrived, strict=True):
            leaving.append(slots[slot])
            slots[slot] = handle
        return np.array(leaving, np.int64)

    def _draw(self, count: int) -> list[int]:
        while len(self._draws) < count:
            self._draws.extend(self._generator.integers(0, self._capacity, _DRAWS).tolist())
        drawn = self._draws[:count]
        del self._draws[:count]
        return drawn

    def _finish(self, slots: Array) -> None:
        # The draws so far are a function of the number of elements, and so is this one.
        self._rest = slots[self._generator.permutation(len(slots))]
        self._slots = []
