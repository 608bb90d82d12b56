"""Levels: where a read comes from and a write goes to, in the code that runs now.

Outside of every trace that is the variables' own storage. While a function is traced, reading a
variable makes it an input of the function, and writing it stays in the level until it ends, when
the function returns it as an output. One mechanism serves function, run, value_and_grad, cond and
scan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, set_current_trace, take_current_trace

from replicax._errors import TracingError
from replicax.context._current import current, entered
from replicax.topology._mesh import Topology
from replicax.values._per_replica import stacked
from replicax.values._placement import is_traced
from replicax.variables._cell import Cell

# Part of the key of JAX's trace caches. JAX keeps the jaxpr of a function that is given to scan,
# cond, jit or checkpoint; one that reads a variable must not be found again where the variable
# has another value.
generation = jax.make_user_context(default_value=None)
_numbers = itertools.count(1)


class Level(Protocol):
    """Where a read comes from and a write goes to."""

    def read(self, cell: Cell) -> Any:
        """The value as the current context sees it."""

    def write(self, cell: Cell, value: Any) -> None:
        """Replace the value."""

    def uses(self, topology: Topology, what: str) -> None:
        """Note that code at this level computes on ``topology``, because of ``what``."""

    def unverify(self, cell: Cell) -> None:
        """Note that replicas wrote a mirrored variable, and must be seen to agree."""


class Storage:
    """The variables' own storage, seen from cross-replica context."""

    def read(self, cell: Cell) -> Any:
        """The first copy, or the per-replica value."""
        refuse_in_foreign_trace(cell)
        return cell.view()

    def write(self, cell: Cell, value: Any) -> None:
        """Replace all copies."""
        refuse_tracer(cell, value)
        cell.store(value)

    def uses(self, topology: Topology, what: str) -> None:
        """Nothing to note: every operation runs where its arrays are."""

    def unverify(self, cell: Cell) -> None:
        """Nothing to note: eager replicas are compared when they write."""


class ReplicaStorage:
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

    def uses(self, topology: Topology, what: str) -> None:
        """Nothing to note: every operation runs where its arrays are."""

    def unverify(self, cell: Cell) -> None:
        """Nothing to note: eager replicas are compared when they write."""


class Overlay:
    """Values that stand for some variables, and writes that are kept, until the block ends."""

    def __init__(self, values: dict[Cell, Any]) -> None:
        self._parent = level()
        self._values = dict(values)
        self.writes: dict[Cell, Any] = {}
        self._trace: Any = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Read and write here until the block ends."""
        self._trace = current_trace()
        with generation(next(_numbers)), entered(level=self):
            yield

    def read(self, cell: Cell) -> Any:
        """What was written here, stands for it here, or is outside."""
        if cell in self.writes:
            return self.writes[cell]
        return self._values[cell] if cell in self._values else self._parent.read(cell)

    def write(self, cell: Cell, value: Any) -> None:
        """Keep the value until the block ends."""
        refuse_other_trace(cell, self._trace)
        self.writes[cell] = value

    def uses(self, topology: Topology, what: str) -> None:
        """Pass it on to what is outside."""
        self._parent.uses(topology, what)

    def unverify(self, cell: Cell) -> None:
        """Pass it on to what is outside."""
        self._parent.unverify(cell)


class TraceLevel:
    """One function that is being traced: what it reads becomes inputs, what it writes outputs."""

    def __init__(self, *, in_replica: bool) -> None:
        self._in_replica = in_replica
        self._reads: dict[Cell, jax.Array] = {}
        self._foreign: set[Cell] = set()
        self.writes: dict[Cell, Any] = {}
        self.unverified: set[Cell] = set()
        self.topologies: dict[Topology, str] = {}
        self.created: list[tuple[Any, jax.Array]] = []
        self.pulls: dict[Any, int] = {}
        self.trace: Any = None
        self._generation: Any = None

    @property
    def reads(self) -> list[Cell]:
        """The variables that were read before they were written, in that order."""
        return list(self._reads)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Trace here until the block ends."""
        self.trace = current_trace()
        self._generation = generation(next(_numbers))
        self._generation.__enter__()
        try:
            with entered(level=self):
                yield
        finally:
            self._generation.__exit__(None, None, None)

    def read(self, cell: Cell) -> Any:
        """What was written here, or the input that stands for the variable."""
        if current_trace() is not self.trace:
            self._foreign.add(cell)
        if cell in self.writes:
            return self.writes[cell]
        if cell not in self._reads:
            if cell.topology is not None:
                self.uses(cell.topology, f"variable {cell.name!r}")
            with set_current_trace(self.trace):
                self._reads[cell] = read_p.bind(number=len(self._reads), aval=self._aval(cell))
        value = self._reads[cell]
        if cell.per_replica and not self._in_replica:
            assert cell.topology is not None
            return stacked(value, cell.topology)
        return value

    def write(self, cell: Cell, value: Any) -> None:
        """Keep the value as an output of the function."""
        refuse_other_trace(cell, self.trace)
        if cell.topology is not None:
            self.uses(cell.topology, f"variable {cell.name!r}")
        self.writes[cell] = value
        if cell in self._foreign:
            # A jaxpr that closed over the old value may be cached: make it unfindable.
            self._generation.__exit__(None, None, None)
            self._generation = generation(next(_numbers))
            self._generation.__enter__()

    def uses(self, topology: Topology, what: str) -> None:
        """Note that the function computes on ``topology``."""
        self.topologies.setdefault(topology, what)

    def unverify(self, cell: Cell) -> None:
        """Note it until the replica function ends."""
        self.unverified.add(cell)

    def _aval(self, cell: Cell) -> Any:
        rows = () if self._in_replica or not cell.per_replica else (cell.topology.num_replicas,)  # type: ignore[union-attr]
        return jax.core.ShapedArray((*rows, *cell.shape), cell.dtype)


read_p = Primitive("replicax_read")
read_p.def_abstract_eval(lambda *, number, aval: aval)

_storage = Storage()


def level() -> Level:
    """The level of the code that runs now."""
    found: Level | None = current().level
    return found if found is not None else _storage


def current_trace() -> Any:
    """JAX's own notion of what is being traced now."""
    with take_current_trace() as trace:
        return trace


_no_trace = current_trace()


def is_staging() -> bool:
    """Whether operations on constants are recorded rather than run."""
    return current_trace() is not _no_trace and is_traced(jax.lax.neg(np.float32(0)))


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
        TracingError: If ``value`` is or holds a tracer.
    """
    if any(map(is_traced, jax.tree.leaves(value))):
        raise TracingError(
            f"Variable {cell.name!r} was assigned a value that exists only while JAX traces a"
            f" function ({jnp.shape(value)} tracer): it would leak out of jax.jit, jax.grad,"
            " jax.lax.scan or the like. Return the value and assign it outside, or use"
            " `rx.function`, `rx.value_and_grad`, `rx.scan`, `rx.cond` or `rx.while_loop`, which"
            " carry assignments."
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
