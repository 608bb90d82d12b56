"""Levels: the read and write targets of variables for the code that is running.

Outside of any trace the target is the variables' storage. While a function is traced, reading a
variable adds it to the function's inputs; a write stays in the level until tracing ends, and then
becomes one of the function's outputs. function, run, value_and_grad, cond and scan all use this
mechanism.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core as jaxprs

from replicax._src.base.errors import TracingError
from replicax._src.base.managers import contextmanager
from replicax._src.compat.jax import at_rest, surrounding, traced
from replicax._src.context.current import current, entered
from replicax._src.state.agreement import agreed_traced_value, check_workers_agree
from replicax._src.state.cell import Cell
from replicax._src.topology.mesh import Topology
from replicax._src.values import placement
from replicax._src.values.per_replica import PerReplica, stacked
from replicax._src.values.placement import is_array, is_traced

# Part of the key of JAX's trace caches. JAX caches the jaxpr of a function passed to scan, cond,
# jit or checkpoint. If the function read a variable, the cached jaxpr holds that value as a
# constant, so the key has to change whenever the variable does.
trace_key = jax.make_user_context(default_value=None)
_numbers = itertools.count(1)
_eager_key = [0]
_callbacks: ContextVar[dict[Any, Callable[[], str]] | None] = ContextVar(
    "replicax_callbacks", default=None
)
_inferring_shapes: ContextVar[bool] = ContextVar("replicax_inferring_shapes", default=False)


class Level(Protocol):
    """The target of variable reads and writes."""

    is_eager: bool
    """Whether operations run immediately, with concrete values, instead of being traced."""

    @abstractmethod
    def read(self, cell: Cell) -> Any:
        """Return the value of `cell` as the current context sees it."""

    @abstractmethod
    def write(self, cell: Cell, value: Any) -> None:
        """Replace the value of `cell`."""

    @abstractmethod
    def uses(self, topology: Topology, what: Any) -> None:
        """Record that code at this level computes on `topology`.

        Args:
            topology: The devices.
            what: The cause, for error messages: a description, or the strategy whose run it is.
        """

    @abstractmethod
    def read_copy(self, cell: Cell, replica: int) -> Any:
        """Return the copy of replica number `replica`."""

    @abstractmethod
    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Replace the copy of replica number `replica`."""


@contextmanager
def exit_callbacks() -> Iterator[None]:
    """Run the callbacks registered with `at_end` when the block exits, also if it raises.

    Raises:
        TracingError: If the block succeeds but a callback returns an error message.
    """
    callbacks: dict[Any, Callable[[], str]] = {}
    token = _callbacks.set(callbacks)
    faults: list[str] = []
    try:
        yield
    finally:
        _callbacks.reset(token)
        faults = [callback() for callback in reversed(callbacks.values())]
    for fault in filter(None, faults):
        raise TracingError(fault)


def at_end(key: Any, callback: Callable[[], str]) -> None:
    """Register a callback for the exit of the innermost level; the first one per `key` wins.

    Args:
        key: Identifies the callback's subject.
        callback: Cleans up state that must not outlive the level. Returns an error message, or "".
    """
    callbacks = _callbacks.get()
    assert callbacks is not None  # every level has a block of `exit_callbacks`
    callbacks.setdefault(key, callback)


@contextmanager
def inferring_shapes() -> Iterator[None]:
    """Let a library trace the code in the block for the shapes of its results alone.

    Reads of variables are constants of that trace, which nothing keeps, and writes have no effect.
    """
    token = _inferring_shapes.set(True)
    try:
        with TraceCacheGuard().isolated(eager=False):
            yield
    finally:
        _inferring_shapes.reset(token)


def _is_dropped() -> bool:
    """Whether the running code is traced for the shapes of its results alone."""
    return _inferring_shapes.get() and is_staging()


class Storage:
    """The stored values of variables, seen from cross-replica context."""

    is_eager = True

    def read(self, cell: Cell) -> Any:
        """Return the first copy, or the per-replica value."""
        refuse_in_foreign_trace(cell)
        return cell.view()

    def write(self, cell: Cell, value: Any) -> None:
        """Replace all copies."""
        if _is_dropped():
            return
        refuse_tracer(cell, value)
        if cell.sharded:
            check_workers_agree(cell, value)
        cell.store(value)

    def read_copy(self, cell: Cell, replica: int) -> Any:
        """Return the copy of replica number `replica`."""
        refuse_in_foreign_trace(cell)
        return cell.piece(replica)

    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Replace the copy of replica number `replica`."""
        if _is_dropped():
            return
        refuse_tracer(cell, value)
        cell.store_piece(replica, value)

    def uses(self, topology: Topology, what: Any) -> None:
        """Do nothing: every eager operation runs where its arrays are."""


class ReplicaStorage(Storage):
    """The stored values of variables, seen from one replica that runs eagerly."""

    def __init__(self, topology: Topology, replica: int) -> None:
        self._topology = topology
        self._replica = replica

    def read(self, cell: Cell) -> Any:
        """Return this replica's copy, or the first copy if `cell` is on another topology."""
        refuse_in_foreign_trace(cell)
        if cell.topology == self._topology:
            return cell.piece(self._replica)
        return cell.view()

    def write(self, cell: Cell, value: Any) -> None:
        """Replace this replica's copy."""
        if _is_dropped():
            return
        refuse_tracer(cell, value)
        cell.store_piece(self._replica if cell.topology == self._topology else 0, value)


class TraceCacheGuard:
    """Invalidates JAX's cached jaxprs that captured a variable's old value as a constant."""

    def __init__(self) -> None:
        self.trace: Any = None
        self._foreign: set[Cell] = set()
        self._context: Any = None

    @contextmanager
    def isolated(self, *, eager: bool) -> Iterator[None]:
        """Give the code in the block its own key in JAX's trace caches.

        Args:
            eager: Whether the block runs operation by operation. Eager blocks share one key until
                a variable is read in a sub-trace: with a new key per block, JAX would recompile
                every operation of every step.
        """
        self.trace = current_trace()
        start = ("eager", _eager_key[0], trace_key.value) if eager else next(_numbers)
        self._enter(start)
        try:
            yield
        finally:
            self._context.__exit__(None, None, None)
            if eager and self._foreign:
                _eager_key[0] = next(_numbers)

    def note_read(self, cell: Cell) -> None:
        """Record a read of `cell`; JAX may cache a sub-trace together with the value read."""
        if current_trace() is not self.trace:
            self._foreign.add(cell)

    def note_write(self, cell: Cell) -> None:
        """Record a write to `cell`, and change the cache key if a sub-trace captured its value."""
        if cell in self._foreign:
            self._context.__exit__(None, None, None)
            self._enter(next(_numbers))

    def _enter(self, value: Any) -> None:
        self._context = trace_key(value)
        self._context.__enter__()


class Overlay:
    """A level that substitutes values for some variables and buffers writes until it exits."""

    def __init__(self, values: dict[Cell, Any], enclosing_trace: Any) -> None:
        self.outer, self.enclosing_trace = level(), enclosing_trace
        self.is_eager: bool = self.outer.is_eager
        self._values = dict(values)
        self.writes: dict[Cell, Any] = {}
        self.fresh = TraceCacheGuard()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Direct reads and writes in the block to this level."""
        with self.fresh.isolated(eager=self.is_eager), entered(level=self), exit_callbacks():
            yield

    def read(self, cell: Cell) -> Any:
        """Return the buffered write, the substituted value, or the outer level's value."""
        self.fresh.note_read(cell)
        if cell in self.writes:
            return self.writes[cell]
        if cell in self._values:
            return self._values[cell]
        # In the trace around this level: the value belongs to the enclosing code.
        with jaxprs.set_current_trace(self.fresh.trace):
            return self.outer.read(cell)

    def write(self, cell: Cell, value: Any) -> None:
        """Buffer the value until the block exits."""
        if _inferring_shapes.get() and current_trace() is not self.fresh.trace:
            return
        refuse_other_trace(cell, self.fresh.trace)
        self.writes[cell] = value
        self.fresh.note_write(cell)

    def read_copy(self, cell: Cell, replica: int) -> Any:
        """Return one replica's copy, from this level if it has a value for `cell`."""
        if cell in self.writes or cell in self._values:
            return _copy_of(self.read(cell), replica)
        self.fresh.note_read(cell)
        with jaxprs.set_current_trace(self.fresh.trace):
            return self.outer.read_copy(cell, replica)

    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Raise `TracingError`: this level buffers one value for all replicas."""
        raise TracingError(
            f"A single copy of variable {cell.name!r} was assigned inside a function that"
            " `rx.value_and_grad` differentiates. Assign the variable itself there, or the copy"
            " outside."
        )

    def uses(self, topology: Topology, what: Any) -> None:
        """Forward to the outer level."""
        self.outer.uses(topology, what)


class CastLevel(Overlay):
    """A level that reads trainable floating-point variables in another type."""

    def __init__(self, dtype: Any, enclosing_trace: Any) -> None:
        super().__init__({}, enclosing_trace)
        self._dtype = dtype

    def read(self, cell: Cell) -> Any:
        """Return the value, converted if the variable is trainable and of floating point."""
        value = super().read(cell)
        is_cast = cell.trainable and jnp.issubdtype(cell.dtype, jnp.floating)
        return value.astype(self._dtype) if is_cast and is_array(value) else value

    def write(self, cell: Cell, value: Any) -> None:
        """Buffer the value until the block exits.

        Raises:
            TracingError: For a trainable variable, whose new value would be computed from a
                rounded one.
        """
        if cell.trainable:
            raise TracingError(
                f"Trainable variable {cell.name!r} was assigned inside of rx.mixed_precision, where"
                f" it is read as {self._dtype}: its precision would be lost. Wrap only the function"
                " that computes the loss, and update outside of it."
            )
        super().write(cell, value)


class TraceLevel:
    """A function that is being traced: its reads become inputs, its writes outputs.

    Attributes:
        taken: The number of elements that one call of the function takes from each iterator.
        outer: The enclosing level; None for a function that is traced independently.
        enclosing_trace: The JAX trace in which the function was passed to `rx.cond`, ...
        is_idle: Whether the function is traced only for its output shapes, and never run.
    """

    def __init__(self, *, in_replica: bool, outer: Level | None = None) -> None:
        self.in_replica = in_replica
        self.outer, self.enclosing_trace = outer, current_trace()
        self._reads: dict[Cell, jax.Array] = {}
        self._copies: dict[Cell, list[Any]] = {}
        self.fresh = TraceCacheGuard()
        self.writes: dict[Cell, Any] = {}
        self.topologies: dict[Topology, Any] = {}
        self.created: list[tuple[Any, jax.Array]] = []
        self.taken: dict[Any, int] = {}
        self.is_eager = self.is_idle = False

    @property
    def reads(self) -> list[Cell]:
        """The variables that were read before they were written, in order of first read."""
        return list(self._reads)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Trace the code in the block at this level."""
        with self.fresh.isolated(eager=False), entered(level=self), exit_callbacks():
            yield
            self._compare_copies()

    def read(self, cell: Cell) -> Any:
        """Return the value written in this trace, or the input that represents the variable."""
        self.fresh.note_read(cell)
        if cell in self.writes:
            return self.writes[cell]
        if cell not in self._reads:
            if cell.topology is not None:
                self.uses(cell.topology, f"variable {cell.name!r}")
            layout = None if self.in_replica else cell.shard_layout
            # Bind in the level's own trace, even when called from a sub-trace (scan, grad, ...):
            # the read equation must be at the top level of the jaxpr, where `pull_reads` finds it.
            with jaxprs.set_current_trace(self.fresh.trace):
                value = read_p.bind(number=len(self._reads), aval=self._aval(cell))
                self._reads[cell] = value if layout is None else layout.whole(value)
        value = self._reads[cell]
        if cell.per_replica and not self.in_replica:
            assert cell.topology is not None
            return stacked(value, cell.topology)
        return value

    def write(self, cell: Cell, value: Any) -> None:
        """Make `value` an output of the function."""
        if _inferring_shapes.get() and current_trace() is not self.fresh.trace:
            return
        refuse_other_trace(cell, self.fresh.trace)
        if cell.topology is not None:
            self.uses(cell.topology, f"variable {cell.name!r}")
        self.writes[cell] = value
        self._copies.pop(cell, None)
        self.fresh.note_write(cell)

    def read_copy(self, cell: Cell, replica: int) -> Any:
        """Return one replica's copy; inside a replica, that replica's own."""
        if cell in self._copies:
            return self._copies[cell][replica]
        return _copy_of(self.read(cell), replica)

    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Replace one replica's copy; mirrored copies are compared when tracing ends."""
        if self.in_replica or cell.topology is None:
            self.write(cell, value)
            return
        copies = [self.read_copy(cell, i) for i in range(cell.topology.num_replicas)]
        copies[replica] = value
        self.write(cell, PerReplica(copies) if cell.per_replica else copies[0])
        if not cell.per_replica:
            self._copies[cell] = copies

    def _compare_copies(self) -> None:
        for cell, copies in list(self._copies.items()):
            self.writes[cell] = agreed_traced_value(self, cell, copies)

    def uses(self, topology: Topology, what: Any) -> None:
        """Record that the function computes on `topology`."""
        self.topologies.setdefault(topology, what)

    def _aval(self, cell: Cell) -> Any:
        return ShapedArray(cell.shape if self.in_replica else cell.stored_shape, cell.dtype)


read_p = jaxprs.Primitive("replicax_read")
read_p.def_abstract_eval(lambda *, number, aval: aval)

_storage = Storage()


def level() -> Level:
    """Return the level of the running code."""
    found: Level | None = current().level
    return found if found is not None else _storage


def _copy_of(value: Any, replica: int) -> Any:
    return value.values[replica] if isinstance(value, PerReplica) else value


def current_trace() -> Any:
    """Return the trace that JAX is in, ignoring gradient tapes, which only observe."""
    return surrounding(traced.value)


def is_transformed() -> bool:
    """Whether the running code is under a JAX transformation or a tape: jit, grad, scan, ..."""
    return traced.value is not at_rest


def is_staging() -> bool:
    """Whether operations on constants are traced instead of executed."""
    return placement.is_staging()


def refuse_in_foreign_trace(cell: Cell) -> None:
    """Refuse a read that would become a constant in a function that JAX traces and caches.

    Raises:
        TracingError: Inside `jax.jit`, `jax.lax.scan` and the like, outside of `rx.function`.
    """
    if is_staging() and not _inferring_shapes.get():
        raise TracingError(
            f"Variable {cell.name!r} was read inside a function that JAX is tracing (jax.jit,"
            " jax.lax.scan, jax.checkpoint, ...), which would keep the current value forever. Read"
            " it outside and pass the value in, or put the whole function under `@rx.function`."
        )


def refuse_tracer(cell: Cell, value: Any) -> None:
    """Refuse to store a value that exists only while a function is traced.

    Raises:
        TracingError: If `value` is or contains a tracer, or JAX is tracing the running code.
    """
    if is_staging() or any(map(is_traced, jax.tree.leaves(value))):
        raise TracingError(
            f"Variable {cell.name!r} was assigned while JAX traces a function (jax.jit, jax.grad,"
            " jax.lax.scan, ...): the value exists only in the trace, and the assignment would"
            " happen once, when the function is traced, and never when it runs. Return the value"
            " and assign it outside, or use `rx.function`, `rx.value_and_grad`, `rx.scan`,"
            " `rx.cond` or `rx.while_loop`, which carry assignments."
        )


def refuse_other_trace(cell: Cell, trace: Any) -> None:
    """Refuse a write inside a JAX transformation that would lose it.

    Raises:
        TracingError: If the current JAX trace is not `trace`, that of the level's function.
    """
    if current_trace() is not trace:
        raise TracingError(
            f"Variable {cell.name!r} was assigned inside a JAX transformation (jax.lax.scan, cond,"
            " while_loop, jax.grad, jax.vmap, jax.jit, ...) that does not carry assignments. Use"
            " `rx.scan`, `rx.cond`, `rx.while_loop` or `rx.value_and_grad`, which do, or return"
            " the value and assign it outside."
        )
