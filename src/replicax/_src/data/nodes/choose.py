"""Nodes that pick the next element from one of several datasets, and random-number sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, ColumnBlock, as_structure, join
from replicax._src.data.leaves import Array
from replicax._src.data.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batching,
    BufferedStream,
    PendingFailure,
    SourceNode,
    Stream,
    UnaryNode,
)
from replicax._src.data.nodes.combine import NaryNode, common_spec
from replicax._src.data.seeds import Run, Seeds
from replicax._src.data.structure import LEAF

_DRAWS = 1024  # random numbers drawn at once, and the most choices read ahead


@final
@dataclass(frozen=True, eq=False)
class ChooseNode(NaryNode):
    """The elements of branches 1 to n, in the order that the indices in branch 0 select."""

    stop_on_empty_dataset: bool

    @property
    def element_spec(self) -> Any:
        """The spec that covers all branches but the first."""
        return common_spec(self.branches[1:])

    @property
    def batching(self) -> Batching | None:
        """The batching of all branches but the first if they agree, otherwise None."""
        first, *others = (node.batching for node in self.branches[1:])
        return first if all(other == first for other in others) else None

    @property
    def cardinality(self) -> int:
        """Infinite if the choices and enough of the branches are, otherwise unknown."""
        choices, *sizes = (node.cardinality == INFINITE_CARDINALITY for node in self.branches)
        is_endless = all(sizes) if self.stop_on_empty_dataset else any(sizes)
        return INFINITE_CARDINALITY if choices and is_endless else UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        choices, *streams = (node.open(run.at(k)) for k, node in enumerate(self.branches))
        return _ChooseStream(choices, streams, stop_on_empty=self.stop_on_empty_dataset)


@final
class _ChooseStream(Stream):
    """A pass that reads several choices at a time and pulls from each chosen branch once."""

    def __init__(self, choices: Stream, streams: Sequence[Stream], *, stop_on_empty: bool) -> None:
        self._choices = BufferedStream(choices)
        self._branches = Branches([Branch(stream) for stream in streams])
        self._stop_on_empty = stop_on_empty
        self._is_done = False
        self._pending = PendingFailure()
        self._lookahead = 1  # choices to read at once; doubles while the branches have the elements

    def pull(self, limit: int) -> Block | None:
        self._pending.raise_stored()
        while not self._is_done:
            choice = self._next_choices(min(limit, self._lookahead))
            if choice is None:
                self._is_done = True
                break
            block = self._pull_one(choice) if limit == 1 else self._pull_chosen(choice)
            if block is not None:
                return block
        return None

    def _pull_one(self, choice: Block) -> Block | None:
        """Return one element for the single `choice`, without the bookkeeping of blocks."""
        number = int(choice.elements()[0])
        streams = self._branches.streams
        if not 0 <= number < len(streams):
            raise self._invalid_choice(number)
        stream = streams[number]
        block = None if stream is None else stream.pull(1)
        if block is None and stream is not None:
            self._end(number)
        return block

    def _next_choices(self, wanted: int) -> Block | None:
        """Return up to `wanted` choices, pulling repeatedly if they arrive in small blocks."""
        if wanted == 1:
            return self._choices.pull(1)
        blocks: list[Block] = []
        while wanted > 0 and (block := self._choices.pull(wanted)) is not None:
            blocks.append(block)
            wanted -= len(block)
        return join(blocks) if blocks else None

    def close(self) -> None:
        self._choices.close()
        self._branches.close()

    def _pull_chosen(self, choice: Block) -> Block | None:
        """Return the elements for the leading choices that the branches can serve now."""
        numbers = np.asarray(choice.elements(), np.int64)
        is_wrong = (numbers < 0) | (numbers >= len(self._branches.streams))
        end = int(np.argmax(is_wrong)) if is_wrong.any() else len(numbers)
        selection = self._branches.select(numbers[:end])
        error, count = selection.error, selection.count
        if count == end < len(numbers):
            error = self._invalid_choice(int(numbers[end]))
        if selection.ended is not None:  # later choices of it are ignored
            self._end(selection.ended)
        used = count + (error is not None)
        self._lookahead = min(max(2 * used, 1), _DRAWS)
        if used < len(numbers):
            self._choices.push_back(choice.slice(used, len(numbers)))
        if error is not None:
            self._pending.put(error)
            if selection.block is None:
                self._pending.raise_stored()
        return selection.block

    def _end(self, number: int) -> None:
        """Close an exhausted branch, which may end the pass."""
        self._branches.end(number)
        self._is_done = self._stop_on_empty or not any(self._branches.streams)

    def _invalid_choice(self, number: int) -> InvalidArgumentError:
        count = len(self._branches.streams)
        return InvalidArgumentError(
            f"choose_from_datasets() got the choice {number}, but there are {count} datasets,"
            f" numbered from 0 to {count - 1}."
        )


@final
class Branch(BufferedStream):
    """A stream with push-back that pulls from its input at most once per pull."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._pending = PendingFailure()
        self._has_more = True

    def pull(self, limit: int) -> Block | None:
        """Return the next 1 to `limit` elements; defer an error behind pushed-back rows."""
        pushed_back = super().pull(limit) if self._left is not None else None
        if pushed_back is not None and len(pushed_back) == limit:
            return pushed_back
        self._pending.raise_stored()
        pulled: Block | None = None
        if self._has_more:
            try:
                pulled = self.stream.pull(limit - (0 if pushed_back is None else len(pushed_back)))
                self._has_more = pulled is not None
            except Exception as error:
                if pushed_back is None:
                    raise
                self._pending.put(error)
        blocks = [block for block in (pushed_back, pulled) if block is not None]
        return join(blocks) if blocks else None


@final
@dataclass(frozen=True)
class Selection:
    """The elements that the branches have for a list of choices.

    Attributes:
        block: The elements of the first `count` choices, in order; None if there are none.
        count: The number of choices used, including those of branches that have ended.
        error: The error that the branch of the next choice raised, if any.
        ended: The index of that branch, if it has no more elements.
    """

    block: Block | None
    count: int
    error: Exception | None = None
    ended: int | None = None


@final
class Branches:
    """Several streams, read by index; None in place of a stream that has ended."""

    def __init__(self, streams: list[Branch | None]) -> None:
        self.streams = streams

    def select(self, numbers: Array) -> Selection:
        """Return the elements for as many `numbers` as one pull per branch can serve."""
        blocks: dict[int, Block] = {}
        end = len(numbers)
        # Branches in the order of their first choice: a branch that fails or ends shortens the
        # result to the choices before it, and later branches are not pulled from.
        for number in dict.fromkeys(numbers.tolist()):
            stream = self.streams[number]
            places = np.flatnonzero(numbers[:end] == number)
            if not len(places) or stream is None:
                continue
            first, error = int(places[0]), None
            try:
                block = stream.pull(len(places))
            except Exception as failed:
                block, error = None, failed
            if block is None:
                found = self._in_order(numbers[:first], blocks)
                return Selection(found, first, error, number if error is None else None)
            blocks[number] = block
            if len(block) < len(places):
                end = int(places[len(block)])
        return Selection(self._in_order(numbers[:end], blocks), end)

    def end(self, number: int) -> None:
        """Close and remove a stream that has no more elements."""
        stream, self.streams[number] = self.streams[number], None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Close all streams."""
        for stream in self.streams:
            if stream is not None:
                stream.close()

    def _in_order(self, numbers: Array, blocks: dict[int, Block]) -> Block | None:
        """Join `blocks` in the order of `numbers`; push surplus rows back to their branches."""
        parts: list[Block] = []
        places = []
        for number, block in blocks.items():
            chosen = np.flatnonzero(numbers == number)
            stream = self.streams[number]
            if len(chosen) < len(block) and stream is not None:
                stream.push_back(block.slice(len(chosen), len(block)))
            if len(chosen):
                parts.append(block.slice(0, len(chosen)) if len(chosen) < len(block) else block)
                places.append(chosen)
        if not parts:
            return None
        structure = parts[0].structure
        joined = join([as_structure(part, structure) for part in parts])
        return joined if len(parts) == 1 else joined.take(np.argsort(np.concatenate(places)))


@dataclass(frozen=True, eq=False)
class _DrawingNode(SourceNode):
    """An infinite source of random int64 scalars."""

    @property
    def element_spec(self) -> TensorSpec:
        """An int64 scalar."""
        return TensorSpec((), np.int64)

    @property
    def cardinality(self) -> int:
        """Infinite."""
        return INFINITE_CARDINALITY


@final
@dataclass(frozen=True, eq=False)
class RandomChoiceNode(_DrawingNode):
    """An infinite source of indices drawn with the given weights."""

    weights: tuple[float, ...]
    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The seeds of the draws."""
        return self.seeds

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _RandomChoiceStream(self.weights, run.generator(self.seeds))


@final
@dataclass(frozen=True, eq=False)
class WeighedChoiceNode(UnaryNode):
    """Node that draws an index for each input element, which is the vector of weights."""

    seeds: Seeds
    num_choices: int

    @property
    def random(self) -> Seeds:
        """The seeds of the draws."""
        return self.seeds

    @property
    def element_spec(self) -> TensorSpec:
        """An int64 scalar."""
        return TensorSpec((), np.int64)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        generator = run.generator(self.seeds)
        return _WeighedChoiceStream(self.input.open(run), generator, self.num_choices)


@final
class _WeighedChoiceStream(Stream):
    def __init__(self, stream: Stream, generator: np.random.Generator, num_choices: int) -> None:
        self._stream = stream
        self._generator = generator
        self._num_choices = num_choices

    def pull(self, limit: int) -> Block | None:
        block = self._stream.pull(1)
        if block is None:
            return None
        weights = np.asarray(block.elements()[0], np.float64)
        if weights.shape == (1, self._num_choices):  # a shape that TensorFlow accepts too
            weights = weights[0]
        is_right = weights.shape == (self._num_choices,) and (weights >= 0).all()
        if not is_right or not weights.sum() > 0:
            raise InvalidArgumentError(
                f"sample_from_datasets() of {self._num_choices} datasets got the weights"
                f" {weights.tolist()!r:.100}: each element of the dataset of weights needs one for"
                " each dataset, none negative and not all zero."
            )
        drawn = self._generator.choice(self._num_choices, 1, p=weights / weights.sum())
        return ColumnBlock(LEAF, [drawn], 1)

    def close(self) -> None:
        self._stream.close()


@final
@dataclass(frozen=True, eq=False)
class RandomNode(_DrawingNode):
    """An infinite source of random 32-bit integers."""

    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The seeds of the numbers."""
        return self.seeds

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _RandomStream(run.generator(self.seeds))


@final
class _RandomStream(Stream):
    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator

    def pull(self, limit: int) -> Block | None:
        count = min(limit, _DRAWS)  # the sequence does not depend on how many are drawn at once
        return ColumnBlock(LEAF, [self._generator.integers(1 << 32, size=count)], count)


@final
class _RandomChoiceStream(Stream):
    def __init__(self, weights: Sequence[float], generator: np.random.Generator) -> None:
        total = sum(weights)
        self._weights = [weight / total for weight in weights]
        self._generator = generator
        self._drawn = np.empty(0, np.int64)

    def pull(self, limit: int) -> Block | None:
        if not len(self._drawn):
            self._drawn = self._generator.choice(len(self._weights), _DRAWS, p=self._weights)
        drawn, self._drawn = self._drawn[:limit], self._drawn[limit:]
        return ColumnBlock(LEAF, [drawn], len(drawn))
