"""Source nodes: range, from_tensor_slices, from_tensors and from_generator."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.data.element_blocks import (
    Block,
    IndexBlock,
    IndexedSource,
    NewArray,
    Row,
    RowBlock,
)
from replicax._src.data.graph_facts import with_unknown_sizes
from replicax._src.data.leaves import Array, leaf_spec, private_copy, to_array, to_leaf, unshared
from replicax._src.data.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    PendingFailure,
    SourceNode,
    Stream,
)
from replicax._src.data.seeds import Run
from replicax._src.data.structure import LEAF, Structure, flatten, require_dense

_ENDLESS = 1 << 62


@final
class SourceStream(Stream):
    """A sequential pass over a random-access source that yields indices, not data.

    Args:
        source: The random-access source.
        count: The number of elements in `source`.
        passes: How many times to repeat the source; infinitely if negative.
    """

    def __init__(self, source: IndexedSource, count: int, passes: int = 1) -> None:
        self._source = source
        self._count = count
        self._total = count * (passes if passes >= 0 else _ENDLESS)
        self._position = 0

    def repeated(self, passes: int) -> "SourceStream":
        """Return a new stream over the same source that repeats it `passes` times."""
        return SourceStream(self._source, self._count, passes)

    def pull(self, limit: int) -> Block | None:
        """Return a block of the next indices; the data are fetched when they are read."""
        start = self._position
        if start >= self._total:
            return None
        self._position = stop = min(start + limit, self._total)
        first = start % self._count
        last = first + stop - start
        if last <= self._count:
            return IndexBlock(self._source, first, last)
        return IndexBlock.of(self._source, np.arange(first, last) % self._count)

    def skip(self, count: int) -> int:
        """Advance the position by `count` without fetching anything."""
        start = self._position
        self._position = min(start + count, self._total)
        return self._position - start


@final
@dataclass(frozen=True, eq=False)
class RangeNode(SourceNode):
    """Integers from `start` to `stop` in increments of `step`, as in Python's range."""

    start: int
    stop: int
    step: int
    dtype: np.dtype[Any]
    is_endless: bool = False

    @property
    def part(self) -> str:
        """The range, as a Python expression."""
        return f"range({self.start}, {self.stop}, {self.step})"

    structure = LEAF

    @property
    def yields_indices(self) -> bool:
        """Always True: blocks are indices, and numbers are computed when they are read."""
        return True

    @property
    def element_spec(self) -> TensorSpec:
        """A scalar of `dtype`."""
        return TensorSpec((), self.dtype)

    @property
    def cardinality(self) -> int:
        """The length of the range, or infinite for `Dataset.counter`."""
        return INFINITE_CARDINALITY if self.is_endless else self._count()

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return SourceStream(self, self._count())

    def span(self, start: int, stop: int, new: NewArray | None = None) -> list[Array]:
        """Return the numbers at the indices from `start` to `stop`."""
        if self.start == 0 and self.step == 1:
            return [np.arange(start, stop, dtype=self.dtype)]
        first, last = self.start + start * self.step, self.start + stop * self.step
        return [np.arange(first, last, self.step, dtype=self.dtype)]

    def gather(self, places: Array, new: NewArray | None = None) -> list[Array]:
        """Return the numbers at the indices `places`."""
        return [(self.start + places * self.step).astype(self.dtype)]

    def _count(self) -> int:
        return len(range(self.start, self.stop, self.step))


@final
class ArraySource:
    """Arrays with first axes of equal length, read by row index."""

    def __init__(self, structure: Structure, arrays: list[Array]) -> None:
        self.structure = structure
        self._arrays = arrays

    def span(self, start: int, stop: int, new: NewArray | None = None) -> list[Array]:
        """Return copies of the rows from `start` to `stop`, which the consumer may modify."""
        rows = [array[start:stop] for array in self._arrays]
        if new is None:
            return [part.copy() for part in rows]
        copies = [new(part.shape, part.dtype) for part in rows]
        for part, copied in zip(rows, copies, strict=True):
            copied[...] = part
        return copies

    def gather(self, places: Array, new: NewArray | None = None) -> list[Array]:
        """Return the rows at `places`, with one gather per leaf."""
        if new is None:
            return [array.take(places, 0) for array in self._arrays]
        made = [new((len(places), *array.shape[1:]), array.dtype) for array in self._arrays]
        for array, rows in zip(self._arrays, made, strict=True):
            # All indices are in range. With the default mode="raise", NumPy would gather into a
            # temporary array before it writes to `out`.
            array.take(places, 0, out=rows, mode="clip")
        return made


@final
@dataclass(frozen=True, eq=False)
class SlicesNode(SourceNode):
    """The slices of arrays along their first axis."""

    source: ArraySource
    spec: Any
    count: int

    @property
    def yields_indices(self) -> bool:
        """Always True: blocks are indices, and rows are copied when they are read."""
        return True

    @classmethod
    def of(cls, tensors: Any) -> "SlicesNode":
        """Return a node over the rows of `tensors`; raise if their first axes differ in length."""
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
        """The specs of the arrays without their first axis."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """The length of the first axis."""
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
        """Return a node of one element, stored as columns of length 1."""
        structure, leaves = flatten(_tuple_if_mixed(tensors))
        arrays = [unshared(leaf)[None] for leaf in leaves]
        specs = [leaf_spec(array[0]) for array in arrays]
        return cls(ArraySource(structure, arrays), structure.unflatten(specs))

    @property
    def element_spec(self) -> Any:
        """The spec of the element."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """One element."""
        return 1

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return SourceStream(self.source, 1)


def _tuple_if_mixed(tensors: Any) -> Any:
    # TensorFlow converts a list to one array, unless it contains dicts.
    if isinstance(tensors, list) and any(isinstance(part, dict) for part in tensors):
        return tuple(tensors)
    return tensors


class _GeneratorMemo:
    """The iterator of the previous pass, to detect one-shot iterators, and the inferred spec."""

    def __init__(self) -> None:
        self._ref: Callable[[], Any] = lambda: None
        self.spec: Any = None

    def check(self, iterator: Any) -> None:
        """Remember `iterator`; raise if the previous pass used the same one."""
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
            # Built-in iterators (of lists, of tuples) have no weak references; keep a strong one.
            self._ref = lambda: iterator


@final
@dataclass(frozen=True, eq=False)
class GeneratorNode(SourceNode):
    """The elements of an iterable that a user's function returns for each pass."""

    function: Callable[..., Iterable[Any]]
    args: tuple[Any, ...] = ()
    signature: Any = None
    last: _GeneratorMemo = field(default_factory=_GeneratorMemo)

    @property
    def element_spec(self) -> Any:
        """The declared signature, or the spec inferred from the first element."""
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
            specs = [with_unknown_sizes(leaf_spec(leaf)) for leaf in block.rows()[0]]
            self.last.spec = block.structure.unflatten(specs)
        return self.last.spec

    @property
    def is_spec_sure(self) -> bool:
        """Whether the signature was declared."""
        return self.signature is not None

    @property
    def is_spec_known(self) -> bool:
        """Whether the signature was declared or has already been inferred."""
        return self.is_spec_sure or self.last.spec is not None

    @property
    def cardinality(self) -> int:
        """Unknown: a generator has no length."""
        return UNKNOWN_CARDINALITY

    @property
    def calls_user_code(self) -> bool:
        """Always True: a generator must not be advanced further than requested."""
        return True

    def open(self, run: Run) -> Stream:
        """Call the function and start a pass over its iterable."""
        items = self.function(*self.args)
        if isinstance(items, Iterator):
            self.last.check(items)
        return RowStream(iter(items), self.signature)


@final
class RowStream(Stream):
    """The elements of a Python iterator, checked against a signature or the first element."""

    def __init__(self, items: Iterator[Any], signature: Any) -> None:
        self._items = items
        self._structure: Structure | None = None
        self._specs: list[TypeSpec] | None = None
        if signature is not None:
            self._structure, self._specs = flatten(signature)
        self._index = 0
        self._pending = PendingFailure()

    def pull(self, limit: int) -> Block | None:
        """Advance the iterator up to `limit` times and return the elements."""
        if self._pending.error is not None:
            self._pending.raise_stored()
        rows: list[Row] = []
        while len(rows) < limit:
            try:
                row = self._next_row()
            except Exception as error:
                if not rows:
                    raise
                self._pending.put(error)
                break
            if row is None:
                break
            rows.append(row)
        if not rows or self._structure is None:
            return None
        return RowBlock(self._structure, rows)

    def skip(self, count: int) -> int:
        """Advance the iterator `count` times: a generator cannot seek."""
        done = 0
        for _ in range(count):
            if self._next_row() is None:
                break
            done += 1
        return done

    def close(self) -> None:
        """Close a generator, which runs its `finally` blocks."""
        close = getattr(self._items, "close", None)
        if close is not None:
            close()

    def _next_row(self) -> Row | None:
        """Advance the iterator; return the leaves of its element, or None at the end."""
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
                # A declared signature settles whether a tuple is a structure or one tensor.
                takes_tuples = self._specs is not None
                leaves = self._structure.leaves_of(element, takes_tuples=takes_tuples)
            except StructureError as error:
                raise self._structure_error(error) from None
        return self._convert(leaves)

    def _convert(self, leaves: list[Any]) -> Row:
        if self._specs is None:
            return tuple(private_copy(to_leaf(leaf)) for leaf in leaves)
        return tuple(
            private_copy(self._fit(v, spec)) for v, spec in zip(leaves, self._specs, strict=True)
        )

    def _fit(self, value: Any, spec: TypeSpec) -> Any:
        """Convert a leaf to the dtype of `spec`; raise if that fails or the shape differs."""
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

    def _structure_error(self, error: StructureError) -> StructureError:
        return StructureError(
            f"Element {self._index - 1} is built differently from the ones before: {error}."
            " All elements of a dataset need the same nesting of tuples and dicts."
        )
