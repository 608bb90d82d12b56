"""Lift: a Python function that uses variables -> a jaxpr that takes and gives them.

Outputs: what a traced function returned -> arrays, and back on every call.

Lift: a Python function with variables -> a jaxpr with inputs and outputs in their place.

The Python body runs once. What it reads appears in the jaxpr as `read` equations at its top level,
which become inputs here; what it writes is appended to its outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from replicax._errors import TracingError
from replicax.context._current import in_replica
from replicax.functions._reach import Edge, Reach
from replicax.state._cell import Cell
from replicax.state._creation import value_before
from replicax.state._held import value_of
from replicax.state._levels import TraceLevel, read_p
from replicax.topology._mesh import REPLICA_AXIS, Topology
from replicax.values._cut import STORED_NAME, WHOLE_NAME
from replicax.values._per_replica import (
    DistributedValues,
    Joined,
    PerReplica,
    Stacked,
    is_opaque,
    stacked,
)
from replicax.values._pieces import from_first, stacked_array
from replicax.values._placement import first, is_array, is_traced
from replicax.values._structures import closed, has_records, opened

_NUMBERS = (bool, int, float, complex, np.generic, np.ndarray)


@dataclass
class Outputs:
    """The structure that a traced function returned, without its arrays."""

    treedef: Any = None
    parts: list[Any] = field(default_factory=list)
    stacked: list[bool] = field(default_factory=list)
    has_records: bool = False

    def take(self, result: Any, topology: Callable[[], Topology | None]) -> list[Any]:
        """Note the structure of ``result``; its arrays."""
        tree = opened(result)
        self.has_records = has_records(tree)
        paths, self.treedef = jax.tree.flatten_with_path(tree, is_leaf=_is_leaf)
        arrays: list[Any] = []
        for path, x in paths:
            part, array, is_stacked = _part(x, topology)
            if isinstance(part, _Static):
                _refuse_traced(part.value, path)
            self.parts.append(part)
            if array is not None:
                arrays.append(array)
                self.stacked.append(is_stacked)
        return arrays

    def rebuild(self, arrays: Sequence[Any], *, local: bool) -> Any:
        """The structure with new arrays in it.

        Args:
            arrays: What a call returned.
            local: Whether plain results are copies on all devices, of which the first is wanted.
        """
        rest = iter(arrays)
        leaves = [part(next(rest), local) if callable(part) else part.value for part in self.parts]
        made = jax.tree.unflatten(self.treedef, leaves)
        return closed(made) if self.has_records else made


@dataclass(frozen=True)
class _Static:
    value: Any


def _is_leaf(x: Any) -> bool:
    return x is None or is_opaque(x)


def _refuse_traced(x: Any, path: Any) -> None:
    """Refuse an object that would carry values of the trace out of it."""
    where = f"result{jax.tree_util.keystr(path)}"
    if x is not None and (found := Reach(Edge(where, x), everything=True).traced):
        raise TypeError(
            f"A traced function returned an object of type {type(x).__name__!r} that holds an array"
            f" in `{found[0]}`, which exists only while the function is traced. Return the array"
            " itself, or a structure that JAX knows: a tuple, a list, a dictionary, a dataclass, or"
            " a class given to `jax.tree_util.register_pytree_node`."
        )


def _plain(x: Any, local: Any) -> Any:
    return first(x) if local else x


def _part(x: Any, topology: Callable[[], Topology | None]) -> tuple[Any, Any, bool]:
    x = value_of(x)  # a snapshot, as every result is
    if is_array(x):
        return _plain, x, False
    if isinstance(x, DistributedValues):
        return _distributed(x, topology)
    if isinstance(x, _NUMBERS):
        return _plain, jnp.asarray(x), False
    return _Static(x), None, False


def _distributed(
    x: DistributedValues, topology: Callable[[], Topology | None]
) -> tuple[Any, Any, bool]:
    form = x.form
    kind = type(x)
    if isinstance(form, Joined):
        where = form.topology
        return lambda a, _: kind.of(Joined(a, where)), form.array, False
    if isinstance(form, Stacked):
        place: Topology | None = form.topology
    elif any(map(is_traced, form.values)):
        place = topology()
    else:
        return _Static(x), None, False
    if place is None or place.num_replicas != len(x.values):
        raise TracingError(
            f"A traced function returned a per-replica value of {len(x.values)} components without"
            " using a strategy that has as many replicas."
        )
    return lambda a, _: kind.of(Stacked(a, place)), stacked_array(x, place), True  # type: ignore[arg-type]


@dataclass(frozen=True)
class Lifted:
    """A traced function.

    Attributes:
        call: The function: arguments, then the values of ``reads``; to ``num_outs`` results, then
            the values of ``writes``.
    """

    call: Callable[..., list[Any]]
    reads: list[Cell]
    writes: list[Cell]
    num_outs: int
    jaxpr: Jaxpr
    consts: Sequence[Any]

    def with_consts(self, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        """``call``, with other arrays in the place of those that the function closed over."""
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, list(consts)))  # type: ignore[no-any-return]

    def run(self, args: Sequence[Any], level: Any) -> list[Any]:
        """Call it with the values of a level; its results, with its writes done there."""
        results = self.call(*args, *(as_input(level.read(c), c) for c in self.reads))
        for cell, value in zip(self.writes, results[self.num_outs :], strict=True):
            level.write(cell, from_output(value, cell))
        return results[: self.num_outs]


def lift(
    body: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    level: TraceLevel,
    *,
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Lifted:
    """Trace ``body(*args)`` once at ``level``.

    Args:
        body: Takes arrays, returns a flat list of arrays.
        args: Arrays, or their shapes and dtypes.
        level: Collects what is read and written.
        inside: A context to enter for the trace.
    """
    counts: list[int] = []

    @wraps(body)
    def traced(*xs: Any) -> list[Any]:
        with level.opened(), inside():
            outs = list(body(*xs))
        counts.append(len(outs))
        starts = [start for _, start in level.created]
        return [*outs, *(as_input(v, c) for c, v in level.writes.items()), *starts]

    closed = jax.make_jaxpr(traced)(*args)
    settle_created(level, closed, list(level.writes))
    jaxpr, reads = pull_reads(closed.jaxpr, level)
    jaxpr = cancelled(jaxpr.replace(outvars=jaxpr.outvars[: counts[0] + len(level.writes)]))
    call = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    return Lifted(call, reads, list(level.writes), counts[0], jaxpr, closed.consts)


def as_input(value: Any, cell: Cell) -> Any:
    """A cell's value at some level as the array that a jaxpr takes."""
    if isinstance(value, PerReplica):
        assert cell.topology is not None
        return stacked_array(value, cell.topology)
    cut = None if in_replica() else cell.cut
    return value if cut is None else cut.stored(value)


def from_output(value: Any, cell: Cell) -> Any:
    """The reverse of `as_input`: a stacked array is a per-replica value again."""
    if cell.per_replica and value.ndim > len(cell.shape):
        assert cell.topology is not None
        return stacked(value, cell.topology)
    cut = None if in_replica() else cell.cut
    return value if cut is None else cut.whole(value)


def pull_reads(jaxpr: Jaxpr, level: TraceLevel) -> tuple[Jaxpr, list[Cell]]:
    """``jaxpr`` with its `read` equations turned into inputs, and the cells that they read."""
    equations = [e for e in jaxpr.eqns if e.primitive is read_p]
    cells = level.reads
    return (
        jaxpr.replace(
            invars=[*jaxpr.invars, *(e.outvars[0] for e in equations)],
            eqns=[e for e in jaxpr.eqns if e.primitive is not read_p],
            debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        ),
        [cells[e.params["number"]] for e in equations],
    )


def cancelled(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` without ways from a sharded variable's parts to the whole and back again."""
    parts: dict[Any, Any] = {}
    same: dict[Any, Any] = {}

    def renamed(xs: Sequence[Any]) -> list[Any]:
        return [x if isinstance(x, Literal) else same.get(x, x) for x in xs]

    equations = []
    for e in jaxpr.eqns:
        # A gradient's way back has the name of the way there; it leads to another shape.
        is_one = len(e.invars) == len(e.outvars) == 1 and not isinstance(e.invars[0], Literal)
        name = e.params.get("name") if is_one else None
        if name == WHOLE_NAME and len(_shape(e.invars[0])) == 1:
            (parts[e.outvars[0]],) = renamed(e.invars)
        stored = parts.get(e.invars[0]) if name == STORED_NAME else None
        if stored is not None and _shape(stored) == _shape(e.outvars[0]):
            same[e.outvars[0]] = stored
        else:
            equations.append(e.replace(invars=renamed(e.invars)) if same else e)
    return jaxpr.replace(eqns=equations, outvars=renamed(jaxpr.outvars)) if same else jaxpr


def _shape(x: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = x.aval.shape
    return shape


def settle_created(
    level: TraceLevel, closed: ClosedJaxpr, written: Sequence[Cell], known: Sequence[Any] = ()
) -> None:
    """Give variables that the body created the initial values that it computed for them.

    A value that is drawn at random is drawn now, and the source of the numbers goes on: the body
    is traced again, without the draw.

    Args:
        level: Where they were created.
        closed: The traced body; its last results are what it wrote, and the initial values.
        written: What it wrote, in that order.
        known: For each input, the array that it always is, or a tracer.

    Raises:
        TracingError: If such a value depends on the arguments of the function.
    """
    if not level.created:
        return
    jaxpr = closed.jaxpr
    pairs = zip(jaxpr.invars, known, strict=False)
    inputs = {var: value for var, value in pairs if not is_traced(value)}
    first = len(jaxpr.outvars) - len(level.created)
    drawn: dict[Cell, Any] = {}
    for (variable, _), out in zip(level.created, jaxpr.outvars[first:], strict=True):
        value = _constant(out, closed, inputs, level, drawn)
        if value is None:
            raise TracingError(
                f"The initial value of variable {variable.name!r}, created while a function is"
                " traced, depends on the function's arguments, on other variables or on the"
                " replica. Create the variable before the first call, or give it a constant; one"
                " that is drawn at random, as a function: `rx.Variable(lambda: ...)`."
            )
        with jax.ensure_compile_time_eval():
            _start(variable.cell, jnp.asarray(value))
    for cell in [cell for cell in written if cell in drawn]:
        out = jaxpr.outvars[first - len(written) + list(written).index(cell)]
        value = _constant(out, closed, inputs, level, drawn)
        with jax.ensure_compile_time_eval():
            cell.store(jnp.asarray(value))


def _start(cell: Cell, value: jax.Array) -> None:
    own = 1
    if cell.topology is not None:
        value = from_first(value, cell.topology, f"variable {cell.name!r}")
        own = len(cell.topology.own)
    cell.store(PerReplica([value] * own) if cell.per_replica else value)


def _constant(
    out: Any,
    closed: ClosedJaxpr,
    inputs: Mapping[Any, Any],
    level: TraceLevel,
    drawn: dict[Cell, Any],
) -> Any:
    """What ``out`` is whatever the inputs are; None if it depends on them.

    Sources of random numbers count as known: they are what they are before the function. What
    differs between replicas is that of the first, who makes variables.
    """
    if isinstance(out, Literal):
        return out.val
    jaxpr, needed, equations, inputs = closed.jaxpr, {out}, [], dict(inputs)
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars):
            continue
        if equation.primitive is read_p:
            cell = level.reads[equation.params["number"]]
            if not cell.draws:
                return None
            inputs[equation.outvars[0]] = drawn.setdefault(cell, value_before(cell))
            continue
        equations.append(equation)
        needed.update(x for x in equation.invars if not isinstance(x, Literal))
    if any(x in needed and x not in inputs for x in jaxpr.invars):
        return None
    alone = jaxpr.replace(
        invars=list(inputs),
        outvars=[out],
        eqns=equations[::-1],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    call = jaxpr_as_fun(ClosedJaxpr(alone, closed.consts))
    return _called(lambda: call(*inputs.values())[0], level, draws=bool(drawn))


def _called(call: Callable[[], Any], level: TraceLevel, *, draws: bool) -> Any:
    """The value; if it names the replica axis None, or the first replica's if it is drawn."""
    with jax.ensure_compile_time_eval():
        try:
            return call()
        except NameError:
            if not draws:
                return None
        size = next(iter(level.topologies)).num_replicas
        return jax.vmap(call, axis_name=REPLICA_AXIS, axis_size=size)()[0]
