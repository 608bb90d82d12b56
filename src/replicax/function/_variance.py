"""Which values of a replica function can differ between replicas.

Compiled replica functions are one program for all replicas. This walk over their jaxpr finds the
outputs that can vary, and refuses collectives that only some replicas would reach, which would wait
for each other for ever.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from replicax._errors import ReplicaError
from replicax.topology._mesh import REPLICA_AXIS

_EQUALISING = frozenset(
    {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
)
_MOVING = frozenset({"ppermute", "all_to_all", "reduce_scatter", "psum_scatter", "pbroadcast"})
_HOST = frozenset({"pure_callback", "io_callback", "debug_callback", "outside_call"})


def varying_outputs(jaxpr: Jaxpr, varying_inputs: Sequence[bool]) -> list[bool]:
    """Which outputs can differ between replicas.

    Args:
        jaxpr: The body of a replica function.
        varying_inputs: Which of its inputs differ.

    Raises:
        ReplicaError: If a collective stands where only some replicas come.
    """
    return _walk(jaxpr, list(varying_inputs), divergent=False)


_MAY_RAISE = ("pure_callback", "io_callback")


def calls_host(jaxpr: Jaxpr, names: tuple[str, ...] = _MAY_RAISE) -> bool:
    """Whether Python code is called while the program runs; by default, code that may raise."""
    return any(
        e.primitive.name in names
        or any(calls_host(inner, names) for inner in jaxprs_in_params(e.params))
        for e in jaxpr.eqns
    )


def _walk(jaxpr: Jaxpr, ins: list[bool], *, divergent: bool) -> list[bool]:
    known: dict[Any, bool] = dict(zip(jaxpr.invars, ins, strict=True))

    def varies(x: Any) -> bool:
        return not isinstance(x, Literal) and known.get(x, False)

    for equation in jaxpr.eqns:
        inputs = [varies(x) for x in equation.invars]
        outputs = _equation(equation, inputs, divergent=divergent)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [varies(x) for x in jaxpr.outvars]


def _equation(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    name, outs = equation.primitive.name, len(equation.outvars)
    over_replicas = REPLICA_AXIS in _axes(equation)
    if over_replicas and name in _EQUALISING | _MOVING:
        _refuse_divergent(name, divergent=divergent)
        whole = equation.params.get("axis_index_groups") is None
        return [not (whole and name in _EQUALISING)] * outs
    if (over_replicas and name == "axis_index") or name in _HOST:
        return [True] * outs
    if name in _CONTROL:
        return _CONTROL[name](equation, ins, divergent=divergent)
    return _call(equation, ins, divergent=divergent)


def _scan(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    consts, carries = equation.params["num_consts"], equation.params["num_carry"]
    body, state = equation.params["jaxpr"].jaxpr, list(ins)
    while True:
        outs = _walk(body, state, divergent=divergent)
        carried = [a or b for a, b in zip(state[consts : consts + carries], outs, strict=False)]
        if carried == state[consts : consts + carries]:
            return [*carried, *outs[carries:]]
        state[consts : consts + carries] = carried


def _while(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    nc, nb = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    cond, body = equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr
    state = ins[nc + nb :]
    while True:
        (stops,) = _walk(cond, ins[:nc] + state, divergent=divergent)
        outs = _walk(body, ins[nc : nc + nb] + state, divergent=divergent or stops)
        new = [a or b or stops for a, b in zip(state, outs, strict=True)]
        if new == state:
            if stops:
                _walk(cond, ins[:nc] + state, divergent=True)
            return state
        state = new


def _cond(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    chosen = ins[0]
    branches = [
        _walk(b.jaxpr, ins[1:], divergent=divergent or chosen) for b in equation.params["branches"]
    ]
    return [chosen or any(column) for column in zip(*branches, strict=True)]


def _call(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    outs = len(equation.outvars)
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(key)
        if inner is None:
            continue
        jaxpr = inner.jaxpr if hasattr(inner, "jaxpr") else inner
        if len(jaxpr.invars) == len(ins) and len(jaxpr.outvars) == outs:
            return _walk(jaxpr, ins, divergent=divergent)
    for jaxpr in jaxprs_in_params(equation.params):
        _walk(jaxpr, [any(ins)] * len(jaxpr.invars), divergent=divergent)
    return [any(ins)] * outs


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}


def _axes(equation: Any) -> tuple[Any, ...]:
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _refuse_divergent(name: str, *, divergent: bool) -> None:
    if divergent:
        raise ReplicaError(
            f"A collective ({name}) stands in a branch or loop that depends on values which differ"
            " between replicas, so that some replicas would wait for others that never come. Take"
            " the all_reduce, all_gather, merge_call or variable assignment out of the rx.cond or"
            " rx.while_loop, or make its condition equal on all replicas with an all_reduce."
        )
