"""Elements up to the first that fails a test."""

from dataclasses import dataclass
from typing import final

from replicax.data._blocks import Block
from replicax.data._functions import ElementFunction
from replicax.data._node import UNKNOWN_CARDINALITY, Stream, UnaryNode
from replicax.data._seeds import Run


@final
@dataclass(frozen=True, eq=False)
class TakeWhileNode(UnaryNode):
    """The elements before the first for which the function is false."""

    predicate: ElementFunction

    @property
    def cardinality(self) -> int:
        """Not known before looking."""
        return 0 if self.input.cardinality == 0 else UNKNOWN_CARDINALITY

    @property
    def calls_user_code(self) -> bool:
        """Yes: the function."""
        return True

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _TakeWhileStream(self.input.open(run), self.predicate)


@final
class _TakeWhileStream(Stream):
    def __init__(self, stream: Stream, predicate: ElementFunction) -> None:
        self._stream = stream
        self._predicate = predicate
        self._index = 0
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        # One at a time: what comes after the end must not be looked at.
        block = None if self._is_done else self._stream.pull(1)
        if block is None:
            return None
        self._index += 1
        self._is_done = not self._predicate.call(block.elements()[0], self._index - 1)
        return None if self._is_done else block

    def close(self) -> None:
        self._stream.close()
