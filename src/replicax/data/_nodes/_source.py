"""In-memory sources: a range of numbers, arrays cut along their first axis, one element."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._blocks import Block, PlaceBlock, Source
from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import Array, leaf_spec, unshared
from replicax.data._node import INFINITE_CARDINALITY, SourceNode, Stream
from replicax.data._seeds import Run
from replicax.data._structure import LEAF, Structure, flatten, require_dense


@final
class SourceStream(Stream):
    """The elements of a random-access source, in order; nothing is fetched yet."""

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._count = count
        self._position = 0

    def pull(self, limit: int) -> Block | None:
        """The next places."""
        start = self._position
        if start >= self._count:
            return None
        self._position = min(start + limit, self._count)
        return PlaceBlock(self._source, start, self._position)

    def skip(self, count: int) -> int:
        """Move the position."""
        start = self._position
        self._position = min(start + count, self._count)
        return self._position - start


@final
@dataclass(frozen=True, eq=False)
class RangeNode(SourceNode):
    """Numbers from ``start`` to ``stop``."""

    start: int
    stop: int
    step: int
    dtype: np.dtype[Any]
    is_endless: bool = False

    structure = LEAF

    @property
    def gives_places(self) -> bool:
        """Numbers are made when they are fetched."""
        return True

    @property
    def element_spec(self) -> TensorSpec:
        """One scalar."""
        return TensorSpec((), self.dtype)

    @property
    def cardinality(self) -> int:
        """As many as Python's range has."""
        return INFINITE_CARDINALITY if self.is_endless else self._count()

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return SourceStream(self, self._count())

    def span(self, start: int, stop: int) -> list[Array]:
        """Consecutive numbers."""
        if self.start == 0 and self.step == 1:
            return [np.arange(start, stop, dtype=self.dtype)]
        first, last = self.start + start * self.step, self.start + stop * self.step
        return [np.arange(first, last, self.step, dtype=self.dtype)]

    def gather(self, places: Array) -> list[Array]:
        """Scattered numbers."""
        return [(self.start + places * self.step).astype(self.dtype)]

    def _count(self) -> int:
        return len(range(self.start, self.stop, self.step))


@final
class ArraySource:
    """Arrays with a common first axis."""

    def __init__(self, structure: Structure, arrays: list[Array]) -> None:
        self.structure = structure
        self._arrays = arrays

    def span(self, start: int, stop: int) -> list[Array]:
        """A copy: the user may write into what is handed out."""
        return [array[start:stop].copy() for array in self._arrays]

    def gather(self, places: Array) -> list[Array]:
        """One gather per leaf."""
        return [array.take(places, 0) for array in self._arrays]


@final
@dataclass(frozen=True, eq=False)
class SlicesNode(SourceNode):
    """Arrays cut along their first axis."""

    source: ArraySource
    spec: Any
    count: int

    @property
    def gives_places(self) -> bool:
        """Rows are copied when they are fetched."""
        return True

    @classmethod
    def of(cls, tensors: Any) -> "SlicesNode":
        """Check that the first axes agree."""
        structure, leaves = flatten(_tuple_if_mixed(tensors))
        require_dense(structure, "from_tensor_slices")
        arrays = [unshared(leaf) for leaf in leaves]
        if not arrays:
            raise InvalidArgumentError("from_tensor_slices() needs at least one array, got none.")
        for array in arrays:
            if not array.ndim:
                raise InvalidArgumentError(
                    f"from_tensor_slices() cuts arrays along their first axis, but {array[()]!r}"
                    " is a scalar. Use `Dataset.from_tensors` for a single element."
                )
        sizes = [len(array) for array in arrays]
        if len(set(sizes)) > 1:
            raise InvalidArgumentError(
                f"from_tensor_slices() got arrays whose first axes differ: {sizes}."
                " Each element takes one slice of every array, so all must be equally long."
            )
        specs = [TensorSpec(array.shape[1:], array.dtype) for array in arrays]
        return cls(ArraySource(structure, arrays), structure.unflatten(specs), sizes[0])

    @property
    def element_spec(self) -> Any:
        """The shapes without the first axis."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """The size of the first axis."""
        return self.count

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return SourceStream(self.source, self.count)


@final
@dataclass(frozen=True, eq=False)
class TensorsNode(SourceNode):
    """A single element."""

    source: ArraySource
    spec: Any

    @classmethod
    def of(cls, tensors: Any) -> "TensorsNode":
        """Keep the element as columns of length one."""
        structure, leaves = flatten(_tuple_if_mixed(tensors))
        arrays = [unshared(leaf)[None] for leaf in leaves]
        specs = [leaf_spec(array[0]) for array in arrays]
        return cls(ArraySource(structure, arrays), structure.unflatten(specs))

    @property
    def element_spec(self) -> Any:
        """The shapes of the element."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """One."""
        return 1

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return SourceStream(self.source, 1)


def _tuple_if_mixed(tensors: Any) -> Any:
    # A list is one array, unless it holds structures.
    if isinstance(tensors, list) and any(isinstance(part, dict) for part in tensors):
        return tuple(tensors)
    return tensors
