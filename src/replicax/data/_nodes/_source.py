"""Sources: a range of numbers, arrays cut along their first axis, one element, a generator."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from replicax._types import TensorSpec, TypeSpec
from replicax.data._blocks import Block, IndexedSource, NewArray, PlaceBlock, Row, RowBlock
from replicax.data._errors import InvalidArgumentError, StructureError
from replicax.data._known import opened
from replicax.data._leaves import Array, leaf_spec, own, to_array, to_leaf, unshared
from replicax.data._node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Due, SourceNode, Stream
from replicax.data._seeds import Run
from replicax.data._structure import LEAF, Structure, flatten, require_dense

_ENDLESS = 1 << 62


@final
class SourceStream(Stream):
    """The elements of a random-access source, in order; nothing is fetched yet.

    Args:
        source: The elements.
        count: How many there are.
        passes: How often they are given; without end if negative.
    """

    def __init__(self, source: IndexedSource, count: int, passes: int = 1) -> None:
        self._source = source
        self._count = count
        self._total = count * (passes if passes >= 0 else _ENDLESS)
        self._position = 0

    def repeated(self, passes: int) -> "SourceStream":
        """The same elements, several times."""
        return SourceStream(self._source, self._count, passes)

    def pull(self, limit: int) -> Block | None:
        """The next places."""
        start = self._position
        if start >= self._total:
            return None
        self._position = stop = min(start + limit, self._total)
        first = start % self._count
        last = first + stop - start
        if last <= self._count:
            return PlaceBlock(self._source, first, last)
        return PlaceBlock.of(self._source, np.arange(first, last) % self._count)

    def skip(self, count: int) -> int:
        """Move the position."""
        start = self._position
        self._position = min(start + count, self._total)
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

    @property
    def part(self) -> str:
        """The numbers."""
        return f"range({self.start}, {self.stop}, {self.step})"

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

    def span(self, start: int, stop: int, new: NewArray | None = None) -> list[Array]:
        """Consecutive numbers."""
        if self.start == 0 and self.step == 1:
            return [np.arange(start, stop, dtype=self.dtype)]
        first, last = self.start + start * self.step, self.start + stop * self.step
        return [np.arange(first, last, self.step, dtype=self.dtype)]

    def gather(self, places: Array, new: NewArray | None = None) -> list[Array]:
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

    def span(self, start: int, stop: int, new: NewArray | None = None) -> list[Array]:
        """A copy: the user may write into what is handed out."""
        rows = [array[start:stop] for array in self._arrays]
        if new is None:
            return [part.copy() for part in rows]
        copies = [new(part.shape, part.dtype) for part in rows]
        for part, copied in zip(rows, copies, strict=True):
            copied[...] = part
        return copies

    def gather(self, places: Array, new: NewArray | None = None) -> list[Array]:
        """One gather per leaf."""
        if new is None:
            return [array.take(places, 0) for array in self._arrays]
        made = [new((len(places), *array.shape[1:]), array.dtype) for array in self._arrays]
        for array, rows in zip(self._arrays, made, strict=True):
            # All places are there; looking for others, NumPy would gather elsewhere first.
            array.take(places, 0, out=rows, mode="clip")
        return made


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
        """One element."""
        return 1

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return SourceStream(self.source, 1)


def _tuple_if_mixed(tensors: Any) -> Any:
    # A list is one array, unless it holds structures.
    if isinstance(tensors, list) and any(isinstance(part, dict) for part in tensors):
        return tuple(tensors)
    return tensors


class _Last:
    """The iterator that the generator function returned last, to notice one-shot iterators."""

    def __init__(self) -> None:
        self._ref: Callable[[], Any] = lambda: None
        self.spec: Any = None

    def check(self, iterator: Any) -> None:
        if self._ref() is iterator:
            raise InvalidArgumentError(
                "The function given to from_generator() returned the same iterator again; it was"
                " used up by the first pass, and every later one would be empty. Make a new one in"
                " each call: `from_generator(lambda: make_items())` instead of"
                " `items = make_items(); from_generator(lambda: items)`."
            )
        try:
            self._ref = weakref.ref(iterator)
        except TypeError:
            # Built-in iterators (of lists, of tuples) take no weak references; keep it instead.
            self._ref = lambda: iterator


@final
@dataclass(frozen=True, eq=False)
class GeneratorNode(SourceNode):
    """Elements from a function that returns an iterable."""

    function: Callable[..., Iterable[Any]]
    args: tuple[Any, ...] = ()
    signature: Any = None
    last: _Last = field(default_factory=_Last)

    @property
    def element_spec(self) -> Any:
        """The declared signature, or what the first element shows."""
        if self.signature is not None:
            return self.signature
        if self.last.spec is None:
            with closing(self.open(Run())) as stream:
                block = stream.pull(1)
            if block is None:
                raise InvalidArgumentError(
                    "from_generator() without output_signature learns it from the first element,"
                    " but the generator yields none. Pass output_signature."
                )
            specs = [opened(leaf_spec(leaf)) for leaf in block.rows()[0]]
            self.last.spec = block.structure.unflatten(specs)
        return self.last.spec

    @property
    def is_spec_sure(self) -> bool:
        """If it was declared."""
        return self.signature is not None

    @property
    def is_spec_known(self) -> bool:
        """If it was declared, or asked for before."""
        return self.is_spec_sure or self.last.spec is not None

    @property
    def cardinality(self) -> int:
        """Nobody knows how much a generator yields."""
        return UNKNOWN_CARDINALITY

    @property
    def calls_user_code(self) -> bool:
        """A generator is advanced only as far as asked for."""
        return True

    def open(self, run: Run) -> Stream:
        """Call the function."""
        items = self.function(*self.args)
        if isinstance(items, Iterator):
            self.last.check(items)
        return RowStream(iter(items), self.signature)


@final
class RowStream(Stream):
    """Elements of a Python iterator, checked against a signature or against the first."""

    def __init__(self, items: Iterator[Any], signature: Any) -> None:
        self._items = items
        self._structure: Structure | None = None
        self._specs: list[TypeSpec] | None = None
        if signature is not None:
            self._structure, self._specs = flatten(signature)
        self._index = 0
        self._due = Due()

    def pull(self, limit: int) -> Block | None:
        """Advance the iterator up to ``limit`` times."""
        if self._due.error is not None:
            self._due.settle()
        rows: list[Row] = []
        while len(rows) < limit:
            try:
                row = self._next_row()
            except Exception as error:
                if not rows:
                    raise
                self._due.put(error)
                break
            if row is None:
                break
            rows.append(row)
        if not rows or self._structure is None:
            return None
        return RowBlock(self._structure, rows)

    def skip(self, count: int) -> int:
        """Replay: a generator has no other way to its middle."""
        done = 0
        for _ in range(count):
            if self._next_row() is None:
                break
            done += 1
        return done

    def close(self) -> None:
        """Close a generator, so that its `finally` runs."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def _next_row(self) -> Row | None:
        try:
            element = next(self._items)
        except StopIteration:
            return None
        finally:
            self._index += 1
        if self._structure is None:
            self._structure, leaves = flatten(element)
        else:
            try:
                # Where a signature says that there is one tensor, a tuple can be nothing else.
                takes_tuples = self._specs is not None
                leaves = self._structure.leaves_of(element, takes_tuples=takes_tuples)
            except StructureError as error:
                raise self._different(error) from None
        return self._convert(leaves)

    def _convert(self, leaves: list[Any]) -> Row:
        if self._specs is None:
            return tuple(own(to_leaf(leaf)) for leaf in leaves)
        return tuple(own(self._fit(v, spec)) for v, spec in zip(leaves, self._specs, strict=True))

    def _fit(self, value: Any, spec: TypeSpec) -> Any:
        if not isinstance(spec, TensorSpec):
            return to_leaf(value)
        try:
            array = to_array(value) if spec.dtype == object else np.asarray(value, spec.dtype)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"Element {self._index - 1} of the generator is {value!r}, which cannot be"
                f" converted to {spec.dtype}, the dtype in its output_signature {spec}."
            ) from error
        if not spec.is_compatible_with(array):
            raise InvalidArgumentError(
                f"Element {self._index - 1} of the generator has shape {array.shape}, where"
                f" {spec.shape} was expected (None fits any size). Correct the generator, or the"
                " output_signature."
            )
        return array if array.ndim else array[()]

    def _different(self, error: StructureError) -> StructureError:
        return StructureError(
            f"Element {self._index - 1} is built differently from the ones before: {error}."
            " All elements of a dataset need the same nesting of tuples and dicts."
        )
