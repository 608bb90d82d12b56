"""Levels: where a read comes from and a write goes to, in the code that runs now.

Outside of every trace that is the variables' own storage. While a function is traced, reading a
variable makes it an input of the function, and writing it stays in the level until it ends, when
the function returns it as an output. One mechanism serves function, run, value_and_grad, cond and
scan.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend import core as jaxprs

from replicax._blocks import contextmanager
from replicax._errors import TracingError
from replicax._jax_private import at_rest, surrounding, traced
from replicax.context._current import current, entered
from replicax.state._agreement import check_workers_agree, settled_copies
from replicax.state._cell import Cell
from replicax.topology._mesh import Topology
from replicax.values import _placement
from replicax.values._per_replica import PerReplica, stacked
from replicax.values._placement import is_traced

# Part of the key of JAX's trace caches. JAX keeps the jaxpr of a function that is given to scan,
# cond, jit or checkpoint; one that reads a variable must not be found again where the variable
# has another value.
generation = jax.make_user_context(default_value=None)
_numbers = itertools.count(1)
_eager_generation = [0]
_callbacks: ContextVar[dict[Any, Callable[[], str]] | None] = ContextVar(
    "replicax_callbacks", default=None
)


class Level(Protocol):
    """Where a read comes from and a write goes to."""

    is_eager: bool
    """Whether what is written is known now, and each operation runs when it is called."""

    @abstractmethod
    def read(self, cell: Cell) -> Any:
        """The value as the current context sees it."""

    @abstractmethod
    def write(self, cell: Cell, value: Any) -> None:
        """Replace the value."""

    @abstractmethod
    def uses(self, topology: Topology, what: Any) -> None:
        """Note that code at this level computes on ``topology``.

        Args:
            topology: The devices.
            what: Why: in words, or the strategy whose run it is.
        """

    @abstractmethod
    def read_copy(self, cell: Cell, replica: int) -> Any:
        """One replica's copy."""

    @abstractmethod
    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Replace one replica's copy."""


@contextmanager
def ending() -> Iterator[None]:
    """Call what `at_end` collected in the block when it ends, also if it raises.

    Raises:
        TracingError: If the block ends well, but a callback says what it must not leave behind.
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
    """Register a callback for the end of the innermost level; the first one for a key stays.

    Args:
        key: What the callback is about.
        callback: Undoes what must not outlive the level. Returns an error message, or "".
    """
    callbacks = _callbacks.get()
    assert callbacks is not None  # every level has a block of `ending`
    callbacks.setdefault(key, callback)


class Storage:
    """The variables' own storage, seen from cross-replica context."""

    is_eager = True

    def read(self, cell: Cell) -> Any:
        """The first copy, or the per-replica value."""
        refuse_in_foreign_trace(cell)
        return cell.view()

    def write(self, cell: Cell, value: Any) -> None:
        """Replace all copies."""
        refuse_tracer(cell, value)
        if cell.sharded:
            check_workers_agree(cell, value)
        cell.store(value)

    def read_copy(self, cell: Cell, replica: int) -> Any:
        """One replica's copy."""
        refuse_in_foreign_trace(cell)
        return cell.piece(replica)

    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Replace one replica's copy."""
        refuse_tracer(cell, value)
        cell.store_piece(replica, value)

    def uses(self, topology: Topology, what: Any) -> None:
        """Nothing to note: every operation runs where its arrays are."""


class ReplicaStorage(Storage):
    """The variables' own storage, seen from one eager replica."""

    def __init__(self, topology: Topology, replica: int) -> None:
        self._topology = topology
        self._replica = replica

    def read(self, cell: Cell) -> Any:
        """This replica's copy; the first copy of a variable that lives elsewhere."""
        refuse_in_foreign_trace(cell)
        if cell.topology == self._topology:
            return cell.piece(self._replica)
        return cell.view()

    def write(self, cell: Cell, value: Any) -> None:
        """Replace this replica's copy."""
        refuse_tracer(cell, value)
        cell.store_piece(self._replica if cell.topology == self._topology else 0, value)


class Freshness:
    """Sees to it that JAX finds no jaxpr again which closed over a variable's old value."""

    def __init__(self) -> None:
        self.trace: Any = None
        self._foreign: set[Cell] = set()
        self._context: Any = None

    @contextmanager
    def kept(self, *, eager: bool) -> Iterator[None]:
        """Keep the code in the block apart from what JAX traced before.

        Args:
            eager: Whether the block is not traced as a whole. Then it shares what JAX compiled
                with the blocks before it, up to the first that read a variable in a sub-trace:
                a new generation for every step would compile every step anew.
        """
        self.trace = current_trace()
        start = ("eager", _eager_generation[0], generation.value) if eager else next(_numbers)
        self._enter(start)
        try:
            yield
        finally:
            self._context.__exit__(None, None, None)
            if eager and self._foreign:
                _eager_generation[0] = next(_numbers)

    def note_read(self, cell: Cell) -> None:
        """Note a read; in a sub-trace, JAX may keep what it gave."""
        if current_trace() is not self.trace:
            self._foreign.add(cell)

    def note_write(self, cell: Cell) -> None:
        """Note a write: a jaxpr that closed over the old value becomes unfindable."""
        if cell in self._foreign:
            self._context.__exit__(None, None, None)
            self._enter(next(_numbers))

    def _enter(self, value: Any) -> None:
        self._context = generation(value)
        self._context.__enter__()


class Overlay:
    """Values that stand for some variables, and writes that are kept, until the block ends."""

    def __init__(self, values: dict[Cell, Any], around: Any) -> None:
        self.outer, self.around = level(), around
        self.is_eager: bool = self.outer.is_eager
        self._values = dict(values)
        self.writes: dict[Cell, Any] = {}
        self.fresh = Freshness()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Read and write here until the block ends."""
        with self.fresh.kept(eager=self.is_eager), entered(level=self), ending():
            yield

    def read(self, cell: Cell) -> Any:
        """What was written here, stands for it here, or is outside."""
        self.fresh.note_read(cell)
        if cell in self.writes:
            return self.writes[cell]
        if cell in self._values:
            return self._values[cell]
        with jaxprs.set_current_trace(self.fresh.trace):
            return self.outer.read(cell)

    def write(self, cell: Cell, value: Any) -> None:
        """Keep the value until the block ends."""
        refuse_other_trace(cell, self.fresh.trace)
        self.writes[cell] = value
        self.fresh.note_write(cell)

    def read_copy(self, cell: Cell, replica: int) -> Any:
        """One replica's copy, as far as it is known here."""
        if cell in self.writes or cell in self._values:
            return _copy_of(self.read(cell), replica)
        self.fresh.note_read(cell)
        with jaxprs.set_current_trace(self.fresh.trace):
            return self.outer.read_copy(cell, replica)

    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Refuse: what is kept here is one value for all replicas."""
        raise TracingError(
            f"A single copy of variable {cell.name!r} was assigned inside a function that"
            " `rx.value_and_grad` differentiates. Assign the variable itself there, or the copy"
            " outside."
        )

    def uses(self, topology: Topology, what: Any) -> None:
        """Pass it on to what is outside."""
        self.outer.uses(topology, what)


class TraceLevel:
    """One function that is being traced: what it reads becomes inputs, what it writes outputs.

    Attributes:
        pulls: How many elements of each iterator one run of the function takes.
        outer: The level that the function is a part of; None for one that stands alone.
        around: What was being traced where the function was given to `rx.cond`, `rx.scan`, ...
        is_idle: Whether the function is traced for what it would return, and never run.
    """

    def __init__(self, *, in_replica: bool, outer: Level | None = None) -> None:
        self.in_replica = in_replica
        self.outer, self.around = outer, current_trace()
        self._reads: dict[Cell, jax.Array] = {}
        self._copies: dict[Cell, list[Any]] = {}
        self.fresh = Freshness()
        self.writes: dict[Cell, Any] = {}
        self.topologies: dict[Topology, Any] = {}
        self.created: list[tuple[Any, jax.Array]] = []
        self.pulls: dict[Any, int] = {}
        self.is_eager = self.is_idle = False

    @property
    def reads(self) -> list[Cell]:
        """The variables that were read before they were written, in that order."""
        return list(self._reads)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Trace here until the block ends."""
        with self.fresh.kept(eager=False), entered(level=self), ending():
            yield
            self._compare_copies()

    def read(self, cell: Cell) -> Any:
        """What was written here, or the input that stands for the variable."""
        self.fresh.note_read(cell)
        if cell in self.writes:
            return self.writes[cell]
        if cell not in self._reads:
            if cell.topology is not None:
                self.uses(cell.topology, f"variable {cell.name!r}")
            cut = None if self.in_replica else cell.cut
            with jaxprs.set_current_trace(self.fresh.trace):
                value = read_p.bind(number=len(self._reads), aval=self._aval(cell))
                self._reads[cell] = value if cut is None else cut.whole(value)
        value = self._reads[cell]
        if cell.per_replica and not self.in_replica:
            assert cell.topology is not None
            return stacked(value, cell.topology)
        return value

    def write(self, cell: Cell, value: Any) -> None:
        """Keep the value as an output of the function."""
        refuse_other_trace(cell, self.fresh.trace)
        if cell.topology is not None:
            self.uses(cell.topology, f"variable {cell.name!r}")
        self.writes[cell] = value
        self._copies.pop(cell, None)
        self.fresh.note_write(cell)

    def read_copy(self, cell: Cell, replica: int) -> Any:
        """One replica's copy; inside a replica, its own."""
        if cell in self._copies:
            return self._copies[cell][replica]
        return _copy_of(self.read(cell), replica)

    def write_copy(self, cell: Cell, replica: int, value: Any) -> None:
        """Replace one replica's copy; at the end all copies of a mirrored one must agree."""
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
            self.writes[cell] = settled_copies(self, cell, copies)

    def uses(self, topology: Topology, what: Any) -> None:
        """Note that the function computes on ``topology``."""
        self.topologies.setdefault(topology, what)

    def _aval(self, cell: Cell) -> Any:
        return ShapedArray(cell.shape if self.in_replica else cell.stored_shape, cell.dtype)


read_p = jaxprs.Primitive("replicax_read")
read_p.def_abstract_eval(lambda *, number, aval: aval)

_storage = Storage()


def level() -> Level:
    """The level of the code that runs now."""
    found: Level | None = current().level
    return found if found is not None else _storage


def _copy_of(value: Any, replica: int) -> Any:
    return value.values[replica] if isinstance(value, PerReplica) else value


def current_trace() -> Any:
    """JAX's own notion of what is being traced now; a gradient tape only listens."""
    return surrounding(traced.value)


def is_transformed() -> bool:
    """Whether JAX transforms or records the code that runs now: jit, grad, scan, a tape, ..."""
    return traced.value is not at_rest


def is_staging() -> bool:
    """Whether operations on constants are recorded rather than run."""
    return _placement.is_staging()


def refuse_in_foreign_trace(cell: Cell) -> None:
    """Refuse to bake a variable's value into a function that JAX traces and keeps.

    Raises:
        TracingError: In ``jax.jit``, ``jax.lax.scan`` and the like, outside of `rx.function`.
    """
    if is_staging():
        raise TracingError(
            f"Variable {cell.name!r} was read inside a function that JAX is tracing (jax.jit,"
            " jax.lax.scan, jax.checkpoint, ...), which would keep today's value for ever. Read it"
            " outside and pass the value in, or put the whole function under `@rx.function`."
        )


def refuse_tracer(cell: Cell, value: Any) -> None:
    """Refuse to store a value that exists only while a function is traced.

    Raises:
        TracingError: If ``value`` is or holds a tracer, or JAX traces the code that runs now.
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
        TracingError: If JAX traces something else than the level's own function.
    """
    if current_trace() is not trace:
        raise TracingError(
            f"Variable {cell.name!r} was assigned inside a JAX transformation (jax.lax.scan, cond,"
            " while_loop, jax.grad, jax.vmap, jax.jit, ...) that does not carry assignments. Use"
            " `rx.scan`, `rx.cond`, `rx.while_loop` or `rx.value_and_grad`, which do, or return"
            " the value and assign it outside."
        )
