"""One of several datasets for each element: chosen by a dataset of numbers, or at random."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._types import TensorSpec
from replicax.data._blocks import Block, ColumnBlock, as_structure, join
from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import Array
from replicax.data._node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batching,
    Buffered,
    Due,
    SourceNode,
    Stream,
    UnaryNode,
)
from replicax.data._nodes._combine import ManyNode, common_spec
from replicax.data._seeds import Run, Seeds
from replicax.data._structure import LEAF

_DRAWS = 1024


@final
@dataclass(frozen=True, eq=False)
class ChooseNode(ManyNode):
    """The first branch gives numbers; each says which of the others gives the next element."""

    stop_on_empty_dataset: bool

    @property
    def element_spec(self) -> Any:
        """What all branches have in common."""
        return common_spec(self.branches[1:])

    @property
    def batching(self) -> Batching | None:
        """That of all branches but the first, if they agree."""
        first, *others = (node.batching for node in self.branches[1:])
        return first if all(other == first for other in others) else None

    @property
    def cardinality(self) -> int:
        """Not known before the choices are, unless one that has no end is left in the end."""
        choices, *sizes = (node.cardinality == INFINITE_CARDINALITY for node in self.branches)
        is_endless = all(sizes) if self.stop_on_empty_dataset else any(sizes)
        return INFINITE_CARDINALITY if choices and is_endless else UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        choices, *streams = (node.open(run.at(k)) for k, node in enumerate(self.branches))
        return _ChooseStream(choices, streams, stop_on_empty=self.stop_on_empty_dataset)


@final
class _ChooseStream(Stream):
    """As many choices at a time as the streams, asked once each, have elements for."""

    def __init__(self, choices: Stream, streams: Sequence[Stream], *, stop_on_empty: bool) -> None:
        self._choices = Buffered(choices)
        self._branches = Branches([Branch(stream) for stream in streams])
        self._stop_on_empty = stop_on_empty
        self._is_done = False
        self._due = Due()
        self._reach = 1  # of the choices, which grows where the streams keep up

    def pull(self, limit: int) -> Block | None:
        self._due.settle()
        while not self._is_done:
            choice = self._more(min(limit, self._reach))
            if choice is None:
                self._is_done = True
                break
            block = self._one(choice) if limit == 1 else self._chosen(choice)
            if block is not None:
                return block
        return None

    def _one(self, choice: Block) -> Block | None:
        number = int(choice.elements()[0])
        streams = self._branches.streams
        if not 0 <= number < len(streams):
            raise self._refusal(number)
        stream = streams[number]
        block = None if stream is None else stream.pull(1)
        if block is None and stream is not None:
            self._end(number)
        return block

    def _more(self, wanted: int) -> Block | None:
        """The next choices; where few come at a time, several times."""
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

    def _chosen(self, choice: Block) -> Block | None:
        """The elements for these choices, up to the first that a stream has none for yet."""
        numbers = np.asarray(choice.elements(), np.int64)
        is_wrong = (numbers < 0) | (numbers >= len(self._branches.streams))
        end = int(np.argmax(is_wrong)) if is_wrong.any() else len(numbers)
        answer = self._branches.ask(numbers[:end])
        error, count = answer.error, answer.count
        if count == end < len(numbers):
            error = self._refusal(int(numbers[end]))
        if answer.ended is not None:  # it is passed over from here on
            self._end(answer.ended)
        used = count + (error is not None)
        self._reach = min(max(2 * used, 1), _DRAWS)
        if used < len(numbers):
            self._choices.push_back(choice.slice(used, len(numbers)))
        if error is not None:
            self._due.put(error)
            if answer.block is None:
                self._due.settle()
        return answer.block

    def _end(self, number: int) -> None:
        self._branches.end(number)
        self._is_done = self._stop_on_empty or not any(self._branches.streams)

    def _refusal(self, number: int) -> InvalidArgumentError:
        count = len(self._branches.streams)
        return InvalidArgumentError(
            f"choose_from_datasets() got the choice {number}, but there are {count} datasets,"
            f" numbered from 0 to {count - 1}."
        )


@final
class Branch(Buffered):
    """One of several streams: what was given back to it, and then what it has, asked once."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._due = Due()
        self._has_more = True

    def pull(self, limit: int) -> Block | None:
        """The next 1 to ``limit`` elements."""
        kept = super().pull(limit) if self._left is not None else None
        if kept is not None and len(kept) == limit:
            return kept
        self._due.settle()
        fresh: Block | None = None
        if self._has_more:
            try:
                fresh = self.stream.pull(limit - (0 if kept is None else len(kept)))
                self._has_more = fresh is not None
            except Exception as error:
                if kept is None:
                    raise
                self._due.put(error)
        blocks = [block for block in (kept, fresh) if block is not None]
        return join(blocks) if blocks else None


@final
@dataclass(frozen=True)
class Answer:
    """What branches have for a list of choices.

    Attributes:
        block: The elements of the first choices, in their order, if there are any.
        count: Of how many choices, those of branches that have ended before included.
        error: What the branch of the next choice raised.
        ended: That branch, if it has no more elements.
    """

    block: Block | None
    count: int
    error: Exception | None = None
    ended: int | None = None


@final
class Branches:
    """Several streams, in each of which elements come in order; None where there is none."""

    def __init__(self, streams: list[Branch | None]) -> None:
        self.streams = streams

    def ask(self, numbers: Array) -> Answer:
        """The elements for these choices, from every stream at once."""
        blocks: dict[int, Block] = {}
        end = len(numbers)
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
                return Answer(found, first, error, number if error is None else None)
            blocks[number] = block
            if len(block) < len(places):
                end = int(places[len(block)])
        return Answer(self._in_order(numbers[:end], blocks), end)

    def end(self, number: int) -> None:
        """Close a stream that has no more elements."""
        stream, self.streams[number] = self.streams[number], None
        if stream is not None:
            stream.close()

    def close(self) -> None:
        """Close all."""
        for stream in self.streams:
            if stream is not None:
                stream.close()

    def _in_order(self, numbers: Array, blocks: dict[int, Block]) -> Block | None:
        """The elements as they were chosen; what streams gave too many goes back to them."""
        parts: list[Block] = []
        places = []
        for number, block in blocks.items():
            own = np.flatnonzero(numbers == number)
            stream = self.streams[number]
            if len(own) < len(block) and stream is not None:
                stream.push_back(block.slice(len(own), len(block)))
            if len(own):
                parts.append(block.slice(0, len(own)) if len(own) < len(block) else block)
                places.append(own)
        if not parts:
            return None
        structure = parts[0].structure
        joined = join([as_structure(part, structure) for part in parts])
        return joined if len(parts) == 1 else joined.take(np.argsort(np.concatenate(places)))


@dataclass(frozen=True, eq=False)
class _DrawingNode(SourceNode):
    """Random numbers, without end."""

    @property
    def element_spec(self) -> TensorSpec:
        """One int64."""
        return TensorSpec((), np.int64)

    @property
    def cardinality(self) -> int:
        """Without end."""
        return INFINITE_CARDINALITY


@final
@dataclass(frozen=True, eq=False)
class RandomChoiceNode(_DrawingNode):
    """Numbers drawn with the given weights, without end."""

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
    """A number for each element of the input, drawn with the weights that the element is."""

    seeds: Seeds
    num_choices: int

    @property
    def random(self) -> Seeds:
        """The seeds of the draws."""
        return self.seeds

    @property
    def element_spec(self) -> TensorSpec:
        """One int64."""
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
        if weights.shape == (1, self._num_choices):  # which TensorFlow takes too
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
    """Numbers of 32 random bits, without end."""

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
        count = min(limit, _DRAWS)  # one draw for each number, however many are drawn at once
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
