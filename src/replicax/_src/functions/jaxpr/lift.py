"""Lift: trace a Python function with variables to a jaxpr that has them as inputs and outputs.

The Python body runs once. Its reads appear in the jaxpr as `read` equations at the top level,
which become inputs here; its writes are appended to the outputs. The module also has the other
operations on jaxprs: finding host callbacks, describing a program, wrapping it in one equation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, wraps
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jaxprs

from replicax._src.base.errors import TracingError
from replicax._src.compat.jax import concrete, undisturbed
from replicax._src.context.current import in_replica
from replicax._src.state.cell import Cell
from replicax._src.state.hooks import value_before
from replicax._src.state.levels import TraceLevel, read_p
from replicax._src.topology.mesh import REPLICA_AXIS
from replicax._src.values.per_replica import PerReplica, stacked
from replicax._src.values.placement import is_traced
from replicax._src.values.replica_functions import broadcast_from_first, stacked_array
from replicax._src.values.sharded import STORED_NAME, WHOLE_NAME

# A jaxpr with its constants. Since JAX 0.11 this is `Jaxpr` itself, and `jax.extend.core` has the
# old name only at run time, where type checkers do not find it.
ClosedJaxpr: Any = vars(jaxprs)["ClosedJaxpr"]


def as_function(jaxpr: jaxprs.Jaxpr, consts: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return the function that evaluates `jaxpr` with these constants."""
    function: Callable[..., list[Any]] = jaxprs.jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))
    return function


@dataclass(frozen=True)
class Lifted:
    """A traced function.

    Attributes:
        call: Maps the arguments, then the values of `reads`, to `num_outs` results, then the
            values of `writes`.
    """

    call: Callable[..., list[Any]]
    reads: list[Cell]
    writes: list[Cell]
    num_outs: int
    jaxpr: jaxprs.Jaxpr
    consts: Sequence[Any]

    @property
    def out_avals(self) -> list[Any]:
        """The shapes and dtypes of the results."""
        return [x.aval for x in self.jaxpr.outvars[: self.num_outs]]

    def rewritten(self, change: Callable[[jaxprs.Jaxpr], jaxprs.Jaxpr]) -> "Lifted":
        """Return the function with its jaxpr replaced by `change(jaxpr)`, of the same signature."""
        jaxpr = change(self.jaxpr)
        return replace(self, jaxpr=jaxpr, call=as_function(jaxpr, self.consts))

    def with_consts(self, consts: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return `call` with `consts` in place of the arrays that the function captured."""
        return as_function(self.jaxpr, list(consts))

    def run(self, args: Sequence[Any], level: Any) -> list[Any]:
        """Call the function on the values of variables at `level`; write the new values there."""
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
    """Trace `body(*args)` once at `level`.

    Args:
        body: Takes arrays, returns a flat list of arrays.
        args: Arrays, or their shapes and dtypes.
        level: Collects the reads and writes.
        inside: A context to enter for the trace.
    """
    counts: list[int] = []

    @wraps(body)
    def traced(*xs: Any) -> list[Any]:
        with level.active(), inside():
            outs = list(body(*xs))
        # After the block, because callbacks at its exit may still write variables.
        counts.append(len(outs))
        starts = [start for _, start in level.created]
        # Initial values come last: `store_initial_values` takes them, and they are dropped below.
        return [*outs, *(as_input(v, c) for c, v in level.writes.items()), *starts]

    closed = undisturbed(lambda: jax.make_jaxpr(traced)(*args))
    store_initial_values(level, closed, list(level.writes))
    jaxpr, reads = pull_reads(closed.jaxpr, level)
    jaxpr = without_round_trips(
        jaxpr.replace(outvars=jaxpr.outvars[: counts[0] + len(level.writes)])
    )
    call = as_function(jaxpr, closed.consts)
    return Lifted(call, reads, list(level.writes), counts[0], jaxpr, closed.consts)


@dataclass(frozen=True)
class LiftedBody:
    """A traced replica function, extracted from its `shard_map` equation.

    Attributes:
        jaxpr: Takes `arrays`, then the values of `reads`; returns results, then writes.
        arrays: The arguments of the equation.
        in_specs: Their shardings over the replicas.
        num_outs: The number of results and writes.
    """

    jaxpr: jaxprs.Jaxpr
    reads: list[Cell]
    arrays: list[Any]
    in_specs: list[Any]
    num_outs: int


def lift_body(
    mapped: Callable[..., Any], arrays: Sequence[Any], level: TraceLevel, written: Sequence[Cell]
) -> LiftedBody:
    """Trace a function that is mapped over the replicas, once.

    Args:
        mapped: Applies one `shard_map` to a body that is traced at `level`.
        arrays: Its arguments.
        level: Collects the reads and writes of the body.
        written: The cells that the body writes for all replicas; their values are its last
            results before the initial values. Complete when the trace ends.
    """
    closed = undisturbed(lambda: jax.make_jaxpr(mapped)(*arrays))
    # The outer jaxpr is only a wrapper around a single `shard_map`, whose jaxpr is the replica
    # function. Captured arrays are inputs of that equation, found among the outer constants.
    equation = next(e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, arrays, strict=True))
    inputs = [x.val if isinstance(x, jaxprs.Literal) else values[x] for x in equation.invars]
    store_initial_values(level, ClosedJaxpr(equation.params["jaxpr"], ()), written, inputs)
    jaxpr, reads = pull_reads(equation.params["jaxpr"], level)
    num_outs = len(jaxpr.outvars) - len(level.created)
    jaxpr = jaxpr.replace(outvars=jaxpr.outvars[:num_outs])
    return LiftedBody(jaxpr, reads, inputs, list(equation.params["in_specs"]), num_outs)


def as_input(value: Any, cell: Cell) -> Any:
    """Convert a cell's value at some level to the array that a jaxpr takes."""
    if isinstance(value, PerReplica):
        assert cell.topology is not None
        return stacked_array(value, cell.topology)
    layout = None if in_replica() else cell.shard_layout
    return value if layout is None else layout.stored(value)


def from_output(value: Any, cell: Cell) -> Any:
    """Reverse `as_input`: convert an array of a jaxpr to the cell's value at some level."""
    if cell.per_replica and value.ndim > len(cell.shape):
        assert cell.topology is not None
        return stacked(value, cell.topology)
    layout = None if in_replica() else cell.shard_layout
    return value if layout is None else layout.whole(value)


def pull_reads(jaxpr: jaxprs.Jaxpr, level: TraceLevel) -> tuple[jaxprs.Jaxpr, list[Cell]]:
    """Return `jaxpr` with its `read` equations turned into inputs, and the cells they read."""
    equations = [e for e in jaxpr.eqns if e.primitive is read_p]
    cells = level.reads
    return (
        jaxpr.replace(
            invars=[*jaxpr.invars, *(e.outvars[0] for e in equations)],
            eqns=[e for e in jaxpr.eqns if e.primitive is not read_p],
            # The recorded names belong to the original inputs; JAX asserts that the number matches.
            debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        ),
        [cells[e.params["number"]] for e in equations],
    )


def without_round_trips(jaxpr: jaxprs.Jaxpr) -> jaxprs.Jaxpr:
    """Return `jaxpr` without gathers of a sharded variable that are immediately split again."""
    # `parts` maps each gathered array to the shards it came from; `same` maps the result of
    # splitting it again to these shards, which replace it in all later equations.
    parts: dict[Any, Any] = {}
    same: dict[Any, Any] = {}

    def renamed(xs: Sequence[Any]) -> list[Any]:
        return [x if isinstance(x, jaxprs.Literal) else same.get(x, x) for x in xs]

    equations = []
    for e in jaxpr.eqns:
        is_one = len(e.invars) == len(e.outvars) == 1 and not isinstance(
            e.invars[0], jaxprs.Literal
        )
        name = e.params.get("name") if is_one else None
        if name == WHOLE_NAME and _is_gather(_shape(e.invars[0]), _shape(e.outvars[0])):
            (parts[e.outvars[0]],) = renamed(e.invars)
        stored = parts.get(e.invars[0]) if name == STORED_NAME else None
        if stored is not None and _shape(stored) == _shape(e.outvars[0]):
            same[e.outvars[0]] = stored
        else:
            equations.append(e.replace(invars=renamed(e.invars)) if same else e)
    return jaxpr.replace(eqns=equations, outvars=renamed(jaxpr.outvars)) if same else jaxpr


def _is_gather(stored: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether shapes are those of a gather; its transpose has the same name, and them reversed.

    Stored arrays are larger, by padding or copies for groups of replicas, or flat.
    """
    return prod(stored) > prod(whole) or (prod(stored) == prod(whole) and len(stored) == 1)


def _shape(x: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = x.aval.shape
    return shape


def store_initial_values(
    level: TraceLevel,
    closed: Any,
    written: Sequence[Cell],
    known: Sequence[Any] = (),
) -> None:
    """Store the initial values that a traced body computed for the variables it created.

    Random initial values are drawn now, and the state of the generator is advanced: the body is
    traced again afterwards, without the draw.

    Args:
        level: The level at which they were created.
        closed: The traced body; its last results are its writes, then the initial values.
        written: The cells of these writes, in order.
        known: For each input, its constant value, or a tracer.

    Raises:
        TracingError: If an initial value depends on the arguments of the function.
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
        with concrete():
            _store_initial_value(variable.cell, jnp.asarray(value))
    for cell in [cell for cell in written if cell in drawn]:
        out = jaxpr.outvars[first - len(written) + list(written).index(cell)]
        value = _constant(out, closed, inputs, level, drawn)
        with concrete():
            cell.store(jnp.asarray(value))


def _store_initial_value(cell: Cell, value: jax.Array) -> None:
    if cell.topology is not None:
        value = broadcast_from_first(value, cell.topology, f"variable {cell.name!r}")
    if cell.per_replica:
        cell.store_same(value)
    else:
        cell.store(value)


def _constant(
    out: Any,
    closed: Any,
    inputs: Mapping[Any, Any],
    level: TraceLevel,
    drawn: dict[Cell, Any],
) -> Any:
    """Return the constant value of `out`; None if it depends on the inputs.

    Generator states count as constants: their values before the function are used. Where replicas
    differ, the first replica's value is used, as it is for initial values.
    """
    if isinstance(out, jaxprs.Literal):
        return out.val
    jaxpr, needed, equations, inputs = closed.jaxpr, {out}, [], dict(inputs)
    # Backward slice: keep only the equations that `out` depends on.
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
        needed.update(x for x in equation.invars if not isinstance(x, jaxprs.Literal))
    if any(x in needed and x not in inputs for x in jaxpr.invars):
        return None
    alone = jaxpr.replace(
        invars=list(inputs),
        outvars=[out],
        eqns=equations[::-1],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    call = as_function(alone, closed.consts)
    return _called(lambda: call(*inputs.values())[0], level, draws=bool(drawn))


def _called(call: Callable[[], Any], level: TraceLevel, *, draws: bool) -> Any:
    """Return `call()`, or None if its value differs between replicas.

    It differs if the code needs the replica axis. Random numbers are the exception: initial values
    are the first replica's, so if the code `draws`, return the first replica's draw.
    """
    with concrete():
        try:
            return call()
        except NameError:  # which JAX raises for an axis that is not there: the replica axis
            if not draws:
                return None
        topology = next(iter(level.topologies), None)
        if topology is None:  # the axis is one of the user's code
            return None
        size = topology.num_replicas
        return jax.vmap(call, axis_name=REPLICA_AXIS, axis_size=size)()[0]


MAY_RAISE = frozenset({"pure_callback", "io_callback"})


def host_calls(jaxpr: jaxprs.Jaxpr) -> set[str]:
    """Return the primitives by which a program calls Python code while it runs."""
    found = {e.primitive.name for e in jaxpr.eqns} & (MAY_RAISE | {"debug_callback"})
    for e in jaxpr.eqns:
        for inner in jaxprs.jaxprs_in_params(e.params):
            found |= host_calls(inner)
    return found


def outline(jaxpr: Any) -> Iterator[str]:
    """Yield a description of the program that is the same in every process."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        yield from (str(x.aval) for x in equation.outvars)
        yield from (
            str(x) for x in equation.invars if isinstance(x, jaxprs.Literal) and np.ndim(x.val) == 0
        )
        for inner in jaxprs.jaxprs_in_params(equation.params):
            yield from outline(inner)


def taking_consts(closed: Any) -> Callable[..., list[Any]]:
    """Return `closed` as a function of its arguments followed by its captured arrays."""
    count = len(closed.in_avals)
    return lambda *xs: as_function(closed.jaxpr, xs[count:])(*xs[:count])


def in_one_equation(closed: Any) -> Callable[..., list[Any]]:
    """Like `jaxpr_as_fun`, but add a single call equation to every enclosing trace."""
    one = _example_call()
    if not set(one.params) >= {"jaxpr", "in_shardings", "out_shardings", "ctx_mesh", "name"}:
        return jaxprs.jaxpr_as_fun(closed)  # type: ignore[no-any-return]  # pragma: no cover
    # The parameters of a call differ between JAX versions, so they are copied from an example call.
    # Tuples among them have one entry per input ("in_...", "donated_...") or output ("out_...").
    counts = {"in": len(closed.in_avals), "do": len(closed.in_avals), "ou": len(closed.out_avals)}
    lists = {k: v * counts.get(k[:2], 1) for k, v in one.params.items() if isinstance(v, tuple)}

    def call(*args: Any) -> list[Any]:
        # Use the mesh of the enclosing code, which may be inside a `shard_map`.
        own = {"jaxpr": closed, "name": "replica", "ctx_mesh": jax.sharding.get_abstract_mesh()}
        results: list[Any] = one.primitive.bind(*args, **(one.params | lists | own))
        return results

    return call


@cache
def _example_call() -> Any:
    return jax.make_jaxpr(jax.jit(lambda x: x + 1))(0.0).eqns[0]


def with_equations(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Return `jaxpr`, closed or not, with `change` applied to each of its equations."""
    # Since JAX 0.11 a jaxpr carries its constants itself, and `.jaxpr` is the same object.
    body = getattr(jaxpr, "jaxpr", jaxpr)
    equations = list(map(change, body.eqns))
    if all(new is old for new, old in zip(equations, body.eqns, strict=True)):
        return jaxpr
    changed = body.replace(eqns=equations)
    return changed if body is jaxpr else ClosedJaxpr(changed, jaxpr.consts)


def with_inner(equation: Any, change: Callable[[Any], Any]) -> Any:
    """Return `equation` with `change` applied to each jaxpr among its parameters."""

    def changed(value: Any) -> Any:
        if isinstance(value, jaxprs.Jaxpr | ClosedJaxpr):
            return change(value)
        if type(value) in (tuple, list):
            new = type(value)(map(changed, value))
            return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
        return value

    params = {name: changed(value) for name, value in equation.params.items()}
    is_same = all(params[name] is value for name, value in equation.params.items())
    return equation if is_same else equation.replace(params=params)


# For each primitive, a function that describes an equation from its parameters and input avals.
Descriptions = Mapping[Any, Callable[[Mapping[str, Any], Sequence[Any]], str]]


def number_collectives(
    lifted: Lifted, collectives: Descriptions, effect: Any
) -> tuple[Lifted, list[str]]:
    """Number the collectives of a replica's function; return it and their descriptions, in order.

    Args:
        lifted: The function.
        collectives: The primitives whose equations get a parameter `number`, from 1 on.
        effect: The ordered effect of these primitives.
    """
    found: list[str] = []

    def change(equation: Any) -> Any:
        if equation.primitive in collectives:
            params = {**equation.params, "number": len(found) + 1}
            describe = collectives[equation.primitive]
            found.append(describe(params, [x.aval for x in equation.invars]))
            return equation.replace(params=params)
        if effect in equation.effects:  # as of every equation whose functions contain collectives
            return with_inner(equation, lambda jaxpr: with_equations(jaxpr, change))
        return equation

    return lifted.rewritten(lambda jaxpr: with_equations(jaxpr, change)), found
