"""The node of group_by_window, and the buckets of bucket_by_sequence_length."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError, StructureError
from replicax._src.base.types import TensorSpec
from replicax._src.data.element_blocks import Block, RowBlock, as_structure, join, one_row
from replicax._src.data.graph_facts import first_element, traced_on, with_unknown_sizes
from replicax._src.data.leaves import DatasetSpec, leaf_spec
from replicax._src.data.node import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, Node, Stream, to_int
from replicax._src.data.nodes.batch import padded_shapes
from replicax._src.data.nodes.flat_map import DatasetFunctionNode, call_for_dataset, require_dataset
from replicax._src.data.nodes.window import BlockNode
from replicax._src.data.seeds import Run, Seeds
from replicax._src.data.structure import Structure, flatten
from replicax._src.data.tracing import TraceOutcome, Verdict, traced
from replicax._src.data.user_functions import ElementFunction


@final
@dataclass(frozen=True, eq=False)
class GroupByWindowNode(DatasetFunctionNode):
    """The elements of the datasets that `reduce` returns, one dataset for each group."""

    key: ElementFunction
    reduce: ElementFunction
    window_size: ElementFunction
    seeds: Seeds
    wrap: Callable[[Node], Any]
    declared: Any = field(default=None, kw_only=True)  # the spec of elements, if declared

    @property
    def random(self) -> Seeds:
        """The seeds for random datasets created in `reduce`."""
        return self.seeds

    @property
    def element_spec(self) -> Any:
        """The traced spec, or the spec of the dataset made from the first element."""

        def learn() -> Node:
            structure, leaves = first_element(self.input, self.reduce.name)
            block = one_row(structure, leaves)
            key = self.key_of(block.elements()[0], 0)
            return self.inner(key, BlockNode(block, self.input.element_spec), 0, Run())

        return self.infer_spec(learn)

    def trace_spec(self) -> TraceOutcome:
        """Trace `reduce`; the result is the spec of the dataset that it returns."""
        if self.declared is not None:
            return TraceOutcome(Verdict.PROVED, DatasetSpec(self.declared))
        if not self.input.is_spec_sure:
            return TraceOutcome(Verdict.UNPROVED)
        window = DatasetSpec(self.input.element_spec)
        outcome = traced(self.reduce.function, TensorSpec((), np.int64), window)
        return require_dataset(outcome, self.reduce.name)

    def check(self) -> None:
        """Trace the functions; raise if `key` returns no int or `reduce` no dataset."""
        keys = traced_on(self.input, self.key)
        if keys.verdict is Verdict.PROVED:
            spec = keys.result
            is_int = isinstance(spec, TensorSpec) and not spec.shape and spec.dtype.kind in "iub"
            if not is_int:
                raise StructureError(
                    f"The key_func must return one int, but it returns a value of the spec {spec}."
                    " Convert it, as in `np.int64(x)`."
                )
        _ = self.outcome  # raises if `reduce` returns no dataset

    @property
    def cardinality(self) -> int:
        """Unknown until the keys are, unless the input is infinite."""
        is_endless = self.input.cardinality == INFINITE_CARDINALITY
        return INFINITE_CARDINALITY if is_endless else UNKNOWN_CARDINALITY

    def key_of(self, element: Any, index: int) -> int:
        """Return the key of `element`."""
        return _to_int_result(self.key.call(element, index), "key_func")

    def size_of(self, key: int) -> int:
        """Return the number of elements in a group with `key`."""
        size = _to_int_result(self.window_size.call(np.int64(key), key), "window_size_func")
        if size < 1:
            raise InvalidArgumentError(
                f"group_by_window() got the window size {size} for the key {key}; a group has at"
                " least one element."
            )
        return size

    def inner(self, key: int, group: Node, index: int, run: Run) -> Node:
        """Return the graph of the dataset that `reduce` returns for `group`."""
        element = (np.int64(key), self.wrap(group))
        return call_for_dataset(self.reduce, element, index, run.at(index), self.seeds)

    def open(self, run: Run) -> Stream:
        """Start a pass."""
        return _GroupStream(self, run)


@final
class _GroupStream(Stream):
    def __init__(self, node: GroupByWindowNode, run: Run) -> None:
        self._node = node
        self._run = run
        self._stream = node.input.open(run)
        self._spec = node.input.element_spec if node.input.is_spec_known else None
        self._structure: Structure | None = None
        self._groups: dict[int, list[Block]] = {}
        self._sizes: dict[int, int] = {}
        self._index = 0
        self._made = 0
        self._is_input_done = False
        self._inner: Stream | None = None

    def pull(self, limit: int) -> Block | None:
        while True:
            if self._inner is not None:
                block = self._inner.pull(limit)
                if block is not None:
                    self._structure = self._structure or block.structure
                    return as_structure(block, self._structure)
                self._inner.close()
                self._inner = None
            elif not self._is_input_done:
                self._read()
            elif self._groups:  # incomplete groups at the end, in the order of their keys
                self._begin(min(self._groups))
            else:
                return None

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
        self._stream.close()

    def _read(self) -> None:
        """Read one element into its group, and start the dataset of the group if it is full."""
        block = self._stream.pull(1)
        if block is None:
            self._is_input_done = True
            return
        self._index += 1
        key = self._node.key_of(block.elements()[0], self._index - 1)
        if key not in self._groups:
            self._sizes[key] = self._node.size_of(key)
            self._groups[key] = []
        self._groups[key].append(block)
        if len(self._groups[key]) == self._sizes[key]:
            self._begin(key)

    def _begin(self, key: int) -> None:
        """Open the dataset that the function returns for the group of `key`."""
        group = join(self._groups.pop(key))
        spec = self._spec
        if spec is None:
            leaves = [with_unknown_sizes(leaf_spec(leaf)) for leaf in group.rows()[0]]
            spec = group.structure.unflatten(leaves)
        self._made += 1
        index = self._made - 1
        rows = RowBlock(group.structure, list(group.rows()))
        node = self._node.inner(key, BlockNode(rows, spec), index, self._run)
        self._inner = node.open(self._run.inside(self._node.seeds, index))


@dataclass(frozen=True)
class Buckets:
    """Ranges of sequence lengths, each with its batch size."""

    bounds: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, bounds: Sequence[int], sizes: Sequence[int]) -> "Buckets":
        """Return the buckets; raise unless there is a batch size for each."""
        if len(sizes) != len(bounds) + 1:
            raise InvalidArgumentError(
                f"bucket_by_sequence_length() got {len(bounds)} boundaries, which make"
                f" {len(bounds) + 1} buckets, and {len(sizes)} batch sizes; give one for each"
                " bucket."
            )
        verb = "bucket_by_sequence_length"
        return cls(
            tuple(to_int(bound, verb, "bucket_boundaries") for bound in bounds),
            tuple(to_int(size, verb, "bucket_batch_sizes", least=1) for size in sizes),
        )

    def number(self, length: Any) -> int:
        """Return the index of the first bucket that contains `length`."""
        size = _to_int_result(length, "element_length_func")
        pairs = zip((None, *self.bounds), (*self.bounds, None), strict=True)
        fits = ((a is None or a <= size) and (b is None or size < b) for a, b in pairs)
        return next(number for number, fit in enumerate(fits) if fit)

    def filled(self, bucket: int, shapes: Any, spec: Any) -> Any:
        """Return the padded shapes, with unknown sizes set to the longest length of `bucket`."""
        if bucket == len(self.bounds):
            raise InvalidArgumentError(
                f"bucket_by_sequence_length(pad_to_bucket_boundary=True): an element is at least"
                f" {self.bounds[-1] if self.bounds else 0} long, and the last bucket has no"
                " boundary to pad to. Add a boundary, or leave such elements out with `filter`."
            )
        structure, specs = flatten(spec)
        known = padded_shapes(structure, shapes) if shapes is not None else [s.shape for s in specs]
        most = self.bounds[bucket] - 1
        return structure.unflatten([tuple(most if n is None else n for n in s) for s in known])


def _to_int_result(value: Any, name: str) -> int:
    """Return `value` as an int; raise if the function `name` returned anything else."""
    try:
        return operator.index(value[()] if isinstance(value, np.ndarray) else value)
    except TypeError:
        raise StructureError(
            f"The {name} must return one int, got {value!r:.100} of type {type(value).__name__}."
        ) from None
