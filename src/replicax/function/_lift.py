"""Lift: a Python function with variables -> a jaxpr with inputs and outputs in their place.

The Python body runs once. What it reads appears in the jaxpr as `read` equations at its top level,
which become inputs here; what it writes is appended to its outputs.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from replicax._errors import TracingError
from replicax.values._in_body import stacked_array
from replicax.values._per_replica import PerReplica, stacked
from replicax.variables._cell import Cell
from replicax.variables._levels import TraceLevel, read_p


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

    def run(self, args: Sequence[Any], level: Any) -> list[Any]:
        """Call it with the values of a level; its results, with its writes done there."""
        results = self.call(*args, *(raw(level.read(c), c) for c in self.reads))
        for cell, value in zip(self.writes, results[self.num_outs :], strict=True):
            level.write(cell, cooked(value, cell))
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
        return [*outs, *(raw(v, c) for c, v in level.writes.items()), *starts]

    closed = jax.make_jaxpr(traced)(*args)
    settle_created(level, closed)
    jaxpr, reads = pull_reads(closed.jaxpr, level)
    jaxpr = jaxpr.replace(outvars=jaxpr.outvars[: counts[0] + len(level.writes)])
    call = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    return Lifted(call, reads, list(level.writes), counts[0], jaxpr, closed.consts)


def raw(value: Any, cell: Cell) -> Any:
    """A cell's value at some level as the array that a jaxpr takes."""
    if isinstance(value, PerReplica):
        assert cell.topology is not None
        return stacked_array(value, cell.topology)
    return value


def cooked(value: Any, cell: Cell) -> Any:
    """The reverse of `raw`: a stacked array is a per-replica value again."""
    if cell.per_replica and value.ndim > len(cell.shape):
        assert cell.topology is not None
        return stacked(value, cell.topology)
    return value


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


def settle_created(level: TraceLevel, closed: ClosedJaxpr) -> None:
    """Give variables that the body created the initial values that it computed for them.

    Raises:
        TracingError: If such a value depends on the arguments of the function.
    """
    if not level.created:
        return
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    for equation in jaxpr.eqns:
        if equation.primitive is read_p or not all(
            isinstance(x, Literal) or x in known for x in equation.invars
        ):
            continue
        _evaluate(equation, known)
    starts = jaxpr.outvars[len(jaxpr.outvars) - len(level.created) :]
    for (variable, _), out in zip(level.created, starts, strict=True):
        if not isinstance(out, Literal) and out not in known:
            raise TracingError(
                f"The initial value of variable {variable.name!r}, created while a function is"
                " traced, depends on the function's arguments, on other variables or on the"
                " replica. Create the variable before the first call, or give it a constant."
            )
        variable.cell.store(out.val if isinstance(out, Literal) else known[out])


def _evaluate(equation: Any, known: dict[Any, Any]) -> None:
    values = [x.val if isinstance(x, Literal) else known[x] for x in equation.invars]
    subfuns, params = equation.primitive.get_bind_params(equation.params)
    try:
        with jax.ensure_compile_time_eval():
            results = equation.primitive.bind(*subfuns, *values, **params)
    except (NameError, ValueError):  # it names the replica axis: no constant
        return
    outs = results if equation.primitive.multiple_results else [results]
    known.update(zip(equation.outvars, outs, strict=True))
