"""One of several datasets for each element: chosen by a dataset of numbers, or at random."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._blocks import Block, ColumnBlock, as_structure, join
from replicax.data._errors import InvalidArgumentError
from replicax.data._node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batching,
    Buffered,
    Due,
    SourceNode,
    Stream,
    UnaryNode,
    once,
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
    @once
    def element_spec(self) -> Any:
        """What all branches have in common."""
        return common_spec(self.branches[1:])

    @property
    @once
    def batching(self) -> Batching | None:
        """That of all branches but the first, if they agree."""
        first, *others = (node.batching for node in self.branches[1:])
        return first if all(other == first for other in others) else None

    @property
    @once
    def cardinality(self) -> int:
        """Not known before the choices are."""
        sizes = [node.cardinality for node in self.branches]
        if all(size == INFINITE_CARDINALITY for size in sizes):
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        choices, *streams = (node.open(run.at(k)) for k, node in enumerate(self.branches))
        return _ChooseStream(choices, streams, stop_on_empty=self.stop_on_empty_dataset)


@final
class _ChooseStream(Stream):
    def __init__(self, choices: Stream, streams: Sequence[Stream], *, stop_on_empty: bool) -> None:
        self._choices = Buffered(choices)
        self._streams = list(streams)
        self._open = [True] * len(streams)
        self._stop_on_empty = stop_on_empty
        self._is_done = False
        self._due = Due()

    def pull(self, limit: int) -> Block | None:
        blocks: list[Block] = []
        self._due.settle()
        try:
            while len(blocks) < limit and not self._is_done:
                block = self._next()
                if block is not None:
                    blocks.append(block)
        except Exception as error:
            if not blocks:
                raise
            self._due.put(error)
        if not blocks:
            return None
        structure = blocks[0].structure
        return join([as_structure(block, structure) for block in blocks])

    def close(self) -> None:
        self._choices.close()
        for stream in self._streams:
            stream.close()

    def _next(self) -> Block | None:
        choice = self._choices.pull(1)
        if choice is None:
            self._is_done = True
            return None
        number = int(choice.elements()[0])
        if not 0 <= number < len(self._streams):
            raise InvalidArgumentError(
                f"choose_from_datasets() got the choice {number}, but there are"
                f" {len(self._streams)} datasets, numbered from 0 to {len(self._streams) - 1}."
            )
        if not self._open[number]:
            return None
        block = self._streams[number].pull(1)
        if block is None:
            self._open[number] = False
            self._is_done = self._stop_on_empty or not any(self._open)
        return block


@final
@dataclass(frozen=True, eq=False)
class RandomChoiceNode(SourceNode):
    """Numbers drawn with the given weights, without end."""

    weights: tuple[float, ...]
    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The seeds of the draws."""
        return self.seeds

    @property
    def element_spec(self) -> TensorSpec:
        """One int64."""
        return TensorSpec((), np.int64)

    @property
    def cardinality(self) -> int:
        """Without end."""
        return INFINITE_CARDINALITY

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
class RandomNode(SourceNode):
    """Numbers of 32 random bits, without end."""

    seeds: Seeds

    @property
    def random(self) -> Seeds:
        """The seeds of the numbers."""
        return self.seeds

    @property
    def element_spec(self) -> TensorSpec:
        """One int64."""
        return TensorSpec((), np.int64)

    @property
    def cardinality(self) -> int:
        """Without end."""
        return INFINITE_CARDINALITY

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
