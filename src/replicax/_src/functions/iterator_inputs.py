"""Pulls: elements of an iterator as inputs of a compiled function.

While a function is traced, ``next(iterator)`` peeks at the upcoming element and returns tracers of
its shape. Each call of the compiled function then takes as many elements as the trace did, and
passes them as inputs. Elements taken by the body of `rx.scan` are passed stacked over the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jaxprs
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.base.errors import TracingError
from replicax._src.base.managers import contextmanager
from replicax._src.compat.jax import at_rest
from replicax._src.context.current import current, entered, within
from replicax._src.data.optional import Ahead, in_function, is_plain
from replicax._src.functions.modes import HostDriven, PythonFallback, ShapeMismatch
from replicax._src.functions.signature import examples
from replicax._src.state.cell import Cell, Journal
from replicax._src.state.levels import (
    Level,
    Overlay,
    TraceLevel,
    current_trace,
    is_staging,
    level,
)
from replicax._src.topology.mesh import REPLICA_AXIS, Topology
from replicax._src.values.per_replica import PerReplica, Stacked, is_distributed, stacked
from replicax._src.values.placement import NUMERIC, as_array, fitting, is_array
from replicax._src.workers.elastic import cached_until_resize

_MAX_PEEKED = 64  # elements that a step in Python may hold back


class FunctionIteration:
    """Implements `IterationInFunctions`: elements as inputs of the function that is traced."""

    def take(self, iterator: Ahead) -> Any:
        """Return ``next(iterator)`` in traced code, or in the body of a function run by Python."""
        return _next_element(iterator)

    def begin_loop(self) -> None:
        """Refuse ``iter(iterator)`` in traced code: only Python can run a loop of unknown length.

        Raises:
            HostDriven: The function is run by Python instead.
        """
        if traced_function() is not None:
            raise HostDriven


def _next_element(iterator: Ahead) -> Any:
    where = traced_function()
    if where is not None and where.is_idle:
        return _example(iterator)
    if where is not None:
        return _input_element(iterator, where)
    frame = current()
    with _outside():
        element = _take(iterator, frame.journal)
    return jax.tree.map(_as_array, element) if frame.host_driven else element


def _take(iterator: Ahead, journal: Journal | None) -> Any:
    """Return the next element; in a step of an elastic run, leave it in the iterator."""
    if journal is None or journal.taken is None:
        return iterator.take()
    count = journal.taken.get(iterator, 0)
    if count < _MAX_PEEKED and iterator.reaches(count + 1):
        journal.taken[iterator] = count + 1
        return iterator.peek(count)
    # The end, an element that failed, or a loop over many elements.
    journal.is_repeatable = False
    iterator.consume(journal.taken.pop(iterator, 0))
    return iterator.take()


def traced_function() -> TraceLevel | None:
    """Return the function being traced, if elements can be taken in it; None in eager code.

    Raises:
        TracingError: In code that JAX traces on its own, where one element would be a constant.
    """
    where: Any = level()
    now = current_trace()
    found: TraceLevel | None = None
    while isinstance(where, TraceLevel | Overlay):
        if now is not where.fresh.trace:
            raise TracingError(_REFUSED)
        if isinstance(where, TraceLevel):
            if where.is_idle:
                return where
            found = found or where
            if where.outer is None:
                if where.in_replica:
                    raise TracingError(_IN_REPLICA)
                return found
        where, now = where.outer, where.enclosing_trace
    if found is not None or is_staging():
        raise TracingError(_REFUSED)
    return None


_REFUSED = (
    "next(iterator) was called inside a function that JAX traces itself (jax.jit, jax.lax.scan,"
    " cond, while_loop, jax.checkpoint, ... or jax.grad and jax.vmap inside of an rx.function): it"
    " would take one element when the function is traced, and return that same element forever."
    " Take the element outside and pass it in; or use `rx.function`, `rx.scan`, `rx.cond`,"
    " `rx.while_loop` and `rx.value_and_grad`, in which every iteration takes its own element."
)
_IN_REPLICA = (
    "next(iterator) was called inside a compiled replica function, which is one program for all"
    " replicas, so they cannot take different elements. Call it outside, and pass the element:"
    " `strategy.run(fn, args=(next(iterator),))`."
)


def run_in_python(fn: Callable[[], Any]) -> Any:
    """Run the body of a function in Python: elements become arrays, and runs are compiled."""
    before = in_function.get()
    try:
        in_function.set(True)
        return within(fn, host_driven=True)
    finally:
        in_function.set(before)  # a single call into C, which no signal handler interrupts


@contextmanager
def _outside() -> Iterator[None]:
    """Leave the current function: the pipeline's own code is no part of its trace."""
    token = in_function.set(False)
    try:
        with (
            jaxprs.set_current_trace(at_rest),
            entered(level=None, replica=None, body=None, host_driven=False),
        ):
            yield
    finally:
        in_function.reset(token)


def reaches(source: Ahead, count: int) -> bool:
    """Whether `source` has at least `count` more elements to peek at, called from any code."""
    if is_plain():
        return source.reaches(count)
    with _outside():
        return source.reaches(count)


def _as_array(x: Any) -> Any:
    return as_array(x) if _is_numeric(x) else x


def _is_numeric(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.dtype.kind in NUMERIC


def _example(iterator: Ahead) -> Any:
    """Return zeros shaped like an element, for the body of a loop with zero steps."""
    with _outside():
        with iterator.lock:
            element = iterator.peek(0) if iterator.reaches(1) else None
        if element is None or not all(map(_is_liftable, _leaves(element))):
            element = examples(iterator.element_spec, iterator)
    return jax.tree.map(_zeros, element, is_leaf=is_distributed)


def _zeros(x: Any) -> Any:
    if not isinstance(x, PerReplica):
        canonical = jax.dtypes.canonicalize_dtype
        return jnp.zeros(x.shape, canonical(x.dtype)) if _is_liftable(x) else x
    topology: Any = x.topology
    own = x.stored.array.shape[1:] if isinstance(x.stored, Stacked) else x.stored.values[0].shape
    dtype = x.stored.array.dtype if isinstance(x.stored, Stacked) else x.stored.values[0].dtype
    return stacked(jnp.zeros((topology.num_replicas, *own), dtype), topology)


def _leaves(element: Any) -> list[Any]:
    return jax.tree.leaves(element, is_leaf=is_distributed)


def _input_element(iterator: Ahead, where: TraceLevel) -> Any:
    """Return tracers for the next element, in a function that is being traced."""
    ahead = where.taken.get(iterator, 0)
    block = ElementBlock(iterator, ahead, ())
    first = ahead + _taken_before(iterator, where.outer)
    with iterator.lock:
        if not reaches(iterator, first + 1):
            raise PythonFallback
        element = iterator.peek(first)
    where.taken[iterator] = ahead + 1
    leaves, treedef = jax.tree.flatten(element, is_leaf=is_distributed)
    cells = [IteratorInput(block, i, *_leaf_type(x)) for i, x in enumerate(leaves)]
    block.size = len(cells)
    here = level()
    return jax.tree.unflatten(treedef, [here.read(c) for c in cells])


def _taken_before(iterator: Ahead, where: Level | None) -> int:
    """Return how many elements the enclosing levels take before the requested one."""
    count = 0
    while isinstance(where, TraceLevel | Overlay):
        count += where.taken.get(iterator, 0) if isinstance(where, TraceLevel) else 0
        where = where.outer
    return count


def _is_liftable(x: Any) -> bool:
    return is_array(x) or _is_numeric(x) or _is_stacked(x)


def _is_stacked(x: Any) -> bool:
    return isinstance(x, PerReplica) and isinstance(x.stored, Stacked)


def _leaf_type(x: Any) -> tuple[tuple[int, ...], Any, Topology | None]:
    """Return the shape, dtype and topology of a leaf; raise `PythonFallback` if not an array."""
    if not _is_liftable(x):
        raise PythonFallback
    if _is_stacked(x):
        return tuple(x.stored.array.shape[1:]), x.stored.array.dtype, x.stored.topology
    return tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype), None


class StepAxis(NamedTuple):
    """One stacked axis of a block: the number of steps, and the elements taken per step."""

    times: int
    step: int


class ElementBlock:
    """The elements that one call takes: a single one, or one for each step along `axes`."""

    def __init__(self, source: Ahead, start: int, axes: tuple[StepAxis, ...]) -> None:
        self.source, self.start, self.axes = source, start, axes
        self.size = 0
        self._seen: tuple[list[Any], list[Any]] = ([], [])

    def places(self) -> list[int]:
        """Return the indices of the block's elements among the upcoming ones."""
        steps = [[i * a.step for i in range(a.times)] for a in self.axes]
        return [self.start + sum(turn) for turn in itertools.product(*steps)]

    def leaf(self, number: int) -> Any:
        """Return one leaf of the element; of several elements, stacked.

        Raises:
            PythonFallback: If there are too few elements, or they cannot be stacked.
        """
        places = self.places()
        with self.source.lock:
            if not reaches(self.source, max(places) + 1):
                raise PythonFallback
            elements = [self.source.peek(i) for i in places]
        seen, leaves = self._seen
        if len(seen) != len(elements) or any(map(_is_not, seen, elements)):
            leaves = _stacked(elements, tuple(a.times for a in self.axes))
        if len(leaves) != self.size:
            raise PythonFallback
        # Cached only until the last leaf is read: the elements are large.
        self._seen = ([], []) if number == self.size - 1 else (elements, leaves)
        return leaves[number]


def _is_not(a: Any, b: Any) -> bool:
    return a is not b


@final
class IteratorInput(Cell):
    """One leaf of a block: a cell that is filled for every call."""

    __slots__ = ("_leaf_shape", "block", "leaf")

    transient = True
    offloaded = False

    def __init__(
        self,
        block: ElementBlock,
        leaf: int,
        own: tuple[int, ...],
        dtype: Any,
        topology: Topology | None,
    ) -> None:
        self.block, self.leaf, self._leaf_shape = block, leaf, own
        self.dtype = dtype
        self.topology = topology
        self.per_replica = topology is not None and not block.axes
        self.sharded = False
        self.name = f"element {block.start} of an iterator"
        self.owned = False
        self.guards = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The steps, then the replicas unless `per_replica`, then the axes of the leaf."""
        axes = tuple(a.times for a in self.block.axes)
        rows = self.topology is not None and not self.per_replica
        return (*axes, *((self.topology.num_replicas,) if rows else ()), *self._leaf_shape)  # type: ignore[union-attr]

    @property
    def sharding(self) -> NamedSharding:
        """The sharding over the replicas."""
        assert self.topology is not None
        return _stacked_sharding(self.topology, len(self.block.axes))

    def array(self) -> jax.Array:
        """Return this leaf of the upcoming elements.

        Raises:
            PythonFallback: If there are too few elements, or their shapes differ.
            ShapeMismatch: If their shape is not that of the trace.
        """
        x: Any = self.block.leaf(self.leaf)
        rows = (self.topology.num_replicas,) if self.topology and self.per_replica else ()
        if tuple(x.shape) != (*rows, *self.shape):
            raise ShapeMismatch
        taken: jax.Array = x
        return taken

    def in_block(self, block: ElementBlock) -> IteratorInput:
        """Return the cell of the same leaf in another block."""
        block.size = self.block.size
        return IteratorInput(block, self.leaf, self._leaf_shape, self.dtype, self.topology)


def enclosing_inputs(
    cells: Sequence[Cell], taken: Mapping[Ahead, int], axis: tuple[int, bool] | None = None
) -> list[IteratorInput]:
    """Return the cells that the enclosing trace reads for the elements that a body takes.

    Args:
        cells: The cells of elements that the body reads.
        taken: How many elements of each iterator the body takes.
        axis: For a loop body: the number of steps, and whether the last step comes first.
    """
    if not taken:
        return []
    where = traced_function()
    assert where is not None
    blocks: dict[tuple[Ahead, int, tuple[StepAxis, ...]], ElementBlock] = {}
    inputs: dict[tuple[ElementBlock, int], IteratorInput] = {}
    handed = []
    for cell in cells:
        assert isinstance(cell, IteratorInput)
        source, start, axes = cell.block.source, cell.block.start, cell.block.axes
        start += where.taken.get(source, 0)
        if axis is not None:
            (count, is_reversed), step = axis, taken[source]
            start += (count - 1) * step if is_reversed else 0
            axes = (StepAxis(count, -step if is_reversed else step), *axes)
        block = blocks.setdefault((source, start, axes), ElementBlock(source, start, axes))
        handed.append(inputs.setdefault((block, cell.leaf), cell.in_block(block)))
    for source, count in taken.items():
        where.taken[source] = where.taken.get(source, 0) + count * (axis[0] if axis else 1)
    return handed


def _stacked(elements: list[Any], counts: tuple[int, ...]) -> list[Any]:
    """Return the leaves of `elements`, each stacked with leading axes of sizes `counts`.

    Raises:
        PythonFallback: If the elements differ in structure or shape, or are not arrays.
    """
    flat = [jax.tree.flatten(e, is_leaf=is_distributed) for e in elements]
    structures: set[Any] = {treedef for _, treedef in flat}
    if len(structures) > 1:
        raise PythonFallback
    columns = [[_array(x) for x in column] for column in zip(*(f for f, _ in flat), strict=True)]
    for column in columns:
        if len({(x.shape, x.dtype) for x in column}) != 1:
            raise PythonFallback
    if not counts:
        return [column[0] for column in columns]
    return [
        _stack(column, counts, _topology(x)) for column, x in zip(columns, flat[0][0], strict=True)
    ]


def _array(x: Any) -> Any:
    if _is_numeric(x):
        # JAX reads the buffer while the program runs; the owner of a view may change it by then.
        return fitting(np.asarray(x) if getattr(x, "base", None) is None else np.array(x))
    if not _is_liftable(x):
        raise PythonFallback
    return x.stored.array if _is_stacked(x) else x


def _topology(x: Any) -> Topology | None:
    return x.stored.topology if isinstance(x, PerReplica) else None


def _stack(arrays: list[Any], counts: tuple[int, ...], topology: Topology | None) -> Any:
    """Stack arrays with leading axes of sizes `counts`, on the host or on their devices."""
    shape = arrays[0].shape
    if isinstance(arrays[0], np.ndarray):
        return np.stack(arrays).reshape(*counts, *shape)
    if topology is None:
        return _stack_on_device(arrays).reshape(*counts, *shape)
    # Device by device: a multi-process program would have to be launched by all processes.
    shards = [[s.data for s in a.addressable_shards] for a in arrays]
    parts = [_stack_on_device(list(row)) for row in zip(*shards, strict=True)]
    parts = [p.reshape(*counts, *p.shape[1:]) for p in parts]
    return jax.make_array_from_single_device_arrays(
        (*counts, *shape), _stacked_sharding(topology, len(counts)), parts, dtype=arrays[0].dtype
    )


_stack_on_device: Callable[[list[Any]], Any] = jax.jit(jnp.stack)


@cached_until_resize
def _stacked_sharding(topology: Topology, axes: int) -> NamedSharding:
    return NamedSharding(topology.mesh, PartitionSpec(*([None] * axes), REPLICA_AXIS))
