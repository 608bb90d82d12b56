"""Several passes over the input, one after the other."""

from dataclasses import dataclass
from typing import final

from replicax.data._blocks import Block
from replicax.data._node import INFINITE_CARDINALITY, Node, PassingNode, Stream
from replicax.data._seeds import Run


@final
@dataclass(frozen=True, eq=False)
class RepeatNode(PassingNode):
    """``count`` passes; without end if it is negative."""

    count: int

    @property
    def cardinality(self) -> int:
        """The input's times the number of passes."""
        size = self.input.cardinality
        if self.count == 0 or size == 0:
            return 0
        if self.count < 0:
            return INFINITE_CARDINALITY
        return size * self.count if size >= 0 else size

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _RepeatStream(self.input, self.count, run)


@final
class _RepeatStream(Stream):
    def __init__(self, node: Node, count: int, run: Run) -> None:
        self._node = node
        self._count = count
        self._run = run
        self._epoch = 0
        self._stream: Stream | None = None
        self._seen = False  # whether this epoch has given anything

    def pull(self, limit: int) -> Block | None:
        while (stream := self._current()) is not None:
            block = stream.pull(limit)
            if block is not None:
                self._seen = True
                return block
            self._end_epoch()
        return None

    def skip(self, count: int) -> int:
        done = 0
        while done < count and (stream := self._current()) is not None:
            passed = stream.skip(count - done)
            done += passed
            self._seen = self._seen or passed > 0
            if done < count:
                self._end_epoch()
                done += self._skip_epochs(count - done)
        return done

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _current(self) -> Stream | None:
        if self._stream is None and self._epoch != self._count:
            self._stream = self._node.open(self._run.at(self._epoch))
            self._seen = False
        return self._stream

    def _end_epoch(self) -> None:
        self.close()
        self._stream = None
        # An input that gives nothing would be repeated for ever.
        self._epoch = self._epoch + 1 if self._seen or self._count >= 0 else self._count

    def _skip_epochs(self, count: int) -> int:
        size = self._node.cardinality
        if size <= 0:
            return 0
        epochs = count // size
        if self._count >= 0:
            epochs = min(epochs, self._count - self._epoch)
        self._epoch += max(epochs, 0)
        return max(epochs, 0) * size
