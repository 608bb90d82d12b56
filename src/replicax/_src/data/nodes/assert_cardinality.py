"""The node of assert_cardinality: a declared cardinality, checked while reading."""

from dataclasses import dataclass
from typing import final

from replicax._src.base.tf_errors import FailedPreconditionError
from replicax._src.data.element_blocks import Block
from replicax._src.data.node import PassingNode, Stream
from replicax._src.data.seeds import Run


@final
@dataclass(frozen=True, eq=False)
class PromisedNode(PassingNode):
    """The input with a declared cardinality; a pass raises if the number of elements differs."""

    count: int

    @property
    def cardinality(self) -> int:
        """The declared cardinality."""
        return self.count

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _PromisedStream(self.input.open(run), self.count)


@final
class _PromisedStream(Stream):
    def __init__(self, stream: Stream, count: int) -> None:
        self._stream = stream
        self._count = count
        self._delivered = 0
        self._is_done = False

    def pull(self, limit: int) -> Block | None:
        if self._is_done:
            return None
        left = self._count - self._delivered if self._count >= 0 else limit
        block = self._stream.pull(max(1, min(limit, left)))
        if block is not None and left > 0:
            self._delivered += len(block)
            return block
        self._is_done = True
        if block is None and self._delivered == self._count:
            return None
        promised = "an infinite number of" if self._count < 0 else str(self._count)
        has = f"{self._delivered}" if block is None else "more"
        raise FailedPreconditionError(
            f"assert_cardinality() was promised {promised} elements, but the dataset has {has}."
            " Correct the number, or leave it out."
        )

    def close(self) -> None:
        self._stream.close()
