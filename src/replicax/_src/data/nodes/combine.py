"""Nodes with several inputs: zip and concatenate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, final

from replicax._src.base.tf_errors import StructureError
from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, ColumnBlock, RowBlock, as_structure
from replicax._src.data.leaves import common_shape, leaf_spec
from replicax._src.data.node import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Batching,
    BufferedStream,
    Node,
    Stream,
    discard_elements,
)
from replicax._src.data.seeds import Run
from replicax._src.data.structure import Structure, flatten, tuple_of


@dataclass(frozen=True, eq=False)
class NaryNode(Node):
    """A node with any number of inputs."""

    branches: tuple[Node, ...]

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The branches."""
        return self.branches

    def with_inputs(self, *inputs: Node) -> Self:
        """Return the same transformation over other branches."""
        return replace(self, branches=inputs)

    @property
    def batching(self) -> Batching | None:
        """The batching of the branches if all agree, otherwise None."""
        first, *others = (node.batching for node in self.branches)
        return first if all(other == first for other in others) else None


@final
@dataclass(frozen=True, eq=False)
class ZipNode(NaryNode):
    """One element of each branch, combined into a structure, until the shortest branch ends.

    The leaves of `nesting` are the branches, in order.
    """

    nesting: Structure

    @property
    def element_spec(self) -> Any:
        """The branches' specs in the structure of `nesting`."""
        return self.nesting.unflatten([node.element_spec for node in self.branches])

    @property
    def cardinality(self) -> int:
        """The smallest cardinality of the branches."""
        sizes = [node.cardinality for node in self.branches]
        finite = [size for size in sizes if size != INFINITE_CARDINALITY]
        if not finite:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if min(finite) < 0 else min(finite)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        streams = [node.open(run.at(k)) for k, node in enumerate(self.branches)]
        return _ZipStream(streams, self.nesting)


@final
class _ZipStream(Stream):
    def __init__(self, streams: Sequence[Stream], nesting: Structure) -> None:
        self._streams = [BufferedStream(stream) for stream in streams]
        self._nesting = nesting
        self._structure: Structure | None = None

    def pull(self, limit: int) -> Block | None:
        blocks: list[Block] = []
        for stream in self._streams:
            try:
                block = stream.pull(limit)
            except Exception:
                self._skip_failed(blocks)
                raise
            if block is None:
                return None
            limit = min(limit, len(block))
            blocks.append(block)
        for position, (stream, block) in enumerate(zip(self._streams, blocks, strict=True)):
            if len(block) > limit:
                stream.push_back(block.slice(limit, len(block)))
                blocks[position] = block.slice(0, limit)
        return self._combine(blocks, limit)

    def skip(self, count: int) -> int:
        return min(stream.skip(count) for stream in self._streams)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def _skip_failed(self, blocks: Sequence[Block]) -> None:
        """Skip one element in every branch except the one that raised, to keep them aligned."""
        for place, stream in enumerate(self._streams):
            if place < len(blocks):
                stream.push_back(blocks[place].slice(1, len(blocks[place])))
            elif place > len(blocks):
                discard_elements(stream, 1)

    def _combine(self, blocks: Sequence[Block], size: int) -> Block:
        """Return one block whose elements combine those of `blocks`, in columns if possible."""
        if self._structure is None:
            self._structure = _nest(self._nesting, [block.structure for block in blocks])
        if any(isinstance(block, RowBlock) for block in blocks):
            parts = zip(*(block.rows() for block in blocks), strict=True)
            return RowBlock(self._structure, [sum(rows, ()) for rows in parts])
        columns = [column for block in blocks for column in block.columns()]
        return ColumnBlock(self._structure, columns, size)


def _nest(nesting: Structure, parts: Sequence[Structure]) -> Structure:
    """Return the structure of elements that combine `parts` according to `nesting`."""
    placeholders = [part.unflatten([0] * part.num_leaves) for part in parts]
    if nesting.is_flat_tuple:
        return tuple_of(parts)
    return flatten(nesting.unflatten(placeholders))[0]


@final
@dataclass(frozen=True, eq=False)
class ConcatenateNode(NaryNode):
    """The elements of each branch in turn."""

    @classmethod
    def of(cls, first: Node, second: Node) -> "ConcatenateNode":
        """Return the concatenation; raise if both specs are known and their structures differ.

        Chained concatenations become one node with many branches to keep the graph shallow.
        """
        left = first.branches if isinstance(first, cls) else (first,)
        right = second.branches if isinstance(second, cls) else (second,)
        if left[0].is_spec_known and right[0].is_spec_known:
            require_alike(left[0].element_spec, right[0].element_spec, "concatenate")
        # Flattening both would double the branches with each `d = d.concatenate(d)`.
        if len(left) > 1 and len(right) > 1:
            return cls((first, second))
        return cls((*left, *right))

    @property
    def element_spec(self) -> Any:
        """The spec that covers all branches."""
        return common_spec(self.branches)

    @property
    def cardinality(self) -> int:
        """The sum of the branches' cardinalities."""
        sizes = [node.cardinality for node in self.branches]
        if INFINITE_CARDINALITY in sizes:
            return INFINITE_CARDINALITY
        return UNKNOWN_CARDINALITY if min(sizes) < 0 else sum(sizes)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _ConcatenateStream(self.branches, run)


@final
class _ConcatenateStream(Stream):
    def __init__(self, nodes: Sequence[Node], run: Run) -> None:
        self._nodes = nodes
        self._run = run
        self._turn = 0
        self._stream: Stream | None = None
        self._structure: Structure | None = None
        self._first: Any = None  # the spec of the first element
        self._checked = -1  # the last branch whose first element was checked

    def pull(self, limit: int) -> Block | None:
        while (stream := self._current()) is not None:
            block = stream.pull(limit)
            if block is not None:
                if self._checked != self._turn:
                    self._check(block)
                assert self._structure is not None
                return as_structure(block, self._structure)
            self._next_branch()
        return None

    def skip(self, count: int) -> int:
        done = 0
        while done < count and (stream := self._current()) is not None:
            done += stream.skip(count - done)
            if done < count:
                self._next_branch()
        return done

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _check(self, block: Block) -> None:
        spec = block.structure.unflatten([leaf_spec(leaf) for leaf in block.rows()[0]])
        if self._structure is None:
            self._structure, self._first = block.structure, spec
        require_alike(self._first, spec, "concatenate")
        self._checked = self._turn

    def _current(self) -> Stream | None:
        if self._stream is None and self._turn < len(self._nodes):
            self._stream = self._nodes[self._turn].open(self._run.at(self._turn))
        return self._stream

    def _next_branch(self) -> None:
        self.close()
        self._stream = None
        self._turn += 1


def common_spec(nodes: Sequence[Node]) -> Any:
    """Return the spec that covers the elements of all `nodes`, which have the same structure."""
    structure, specs = flatten(nodes[0].element_spec)
    for node in nodes[1:]:
        other = structure.leaves_of(node.element_spec)
        specs = [joined(a, b) for a, b in zip(specs, other, strict=True)]
    return structure.unflatten(specs)


def require_known_alike(nodes: Sequence[Node], verb: str) -> None:
    """Raise if the specs of `nodes` that are known without reading differ in structure."""
    known = [node.element_spec for node in nodes if node.is_spec_known]
    for spec in known[1:]:
        require_alike(known[0], spec, verb)


def require_alike(first: Any, second: Any, verb: str) -> None:
    """Raise unless two specs have the same structure and dtypes."""
    problem = _difference(first, second)
    if problem:
        raise StructureError(
            f"{verb}() needs elements of the same structure, but {problem}:"
            f" {first} and {second}. Bring one to the form of the other with `map`."
        )


def _difference(first: Any, second: Any) -> str:
    """Describe how the structure or dtypes of two specs differ; empty if they do not."""
    structure, left = flatten(first)
    try:
        right = structure.leaves_of(second)
    except StructureError as error:
        return f"their nesting differs ({error})"
    for a, b in zip(left, right, strict=True):
        if getattr(a, "dtype", None) != getattr(b, "dtype", None):
            return f"dtypes differ ({getattr(a, 'dtype', a)} and {getattr(b, 'dtype', b)})"
    return ""


def joined(left: Any, right: Any) -> Any:
    """Return the spec that covers two leaf specs."""
    if isinstance(left, TensorSpec) and isinstance(right, TensorSpec):
        return TensorSpec(common_shape(left.shape, right.shape), left.dtype)
    return left
