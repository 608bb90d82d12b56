"""Control flow of keras.ops that carries assignments, where there is a level or a strategy."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from keras.src.backend.common.stateless_scope import in_stateless_scope

from replicax.context._current import current
from replicax.function._control import cond, scan, while_loop
from replicax.integrations._hook import Hook


def _carried(ours: Callable[..., Any]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def flow(*args: Any, **kwargs: Any) -> Any:
            frame = current()
            here = (frame.level or frame.strategy) is not None and not in_stateless_scope()
            return (ours if here else original)(*args, **kwargs)

        return flow

    return make


def _while_loop(cond: Any, body: Any, loop_vars: Any, maximum_iterations: int | None = None) -> Any:
    several = isinstance(loop_vars, tuple | list)

    def go_on(state: Any) -> Any:
        turns, values = state
        more = cond(*values)
        return more if maximum_iterations is None else more & (turns < maximum_iterations)

    def turn(state: Any) -> Any:
        turns, values = state
        new = body(*values)
        return turns + 1, tuple(new) if several else (new,)

    start = tuple(loop_vars) if several else (loop_vars,)
    _, values = while_loop(go_on, turn, (jnp.int32(0), start))
    return values if several else values[0]


def _switch(index: Any, branches: Any, *operands: Any) -> Any:
    if len(branches) == 1:
        return branches[0](*operands)
    rest = lambda *given: _switch(index - 1, branches[1:], *given)  # noqa: E731
    return cond(jnp.asarray(index) <= 0, branches[0], rest, *operands)


def _fori_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any) -> Any:
    if isinstance(lower, int) and isinstance(upper, int) and lower < upper:
        steps = jnp.arange(lower, upper)  # a scan has gradients, a loop has not
        return scan(lambda value, i: (body_fun(i, value), None), init_val, steps)[0]
    return while_loop(
        lambda state: state[0] < upper,
        lambda state: (state[0] + 1, body_fun(*state)),
        (jnp.asarray(lower), init_val),
    )[1]


def _map(f: Any, xs: Any) -> Any:
    return scan(lambda carry, x: (carry, f(x)), (), xs)[1]


HOOKS = (
    Hook("backend.jax.core:cond", "pred, true_fn, false_fn", _carried(cond)),
    Hook("backend.jax.core:scan", "f, init, xs, length, reverse, unroll", _carried(scan)),
    Hook(
        "backend.jax.core:while_loop",
        "cond, body, loop_vars, maximum_iterations",
        _carried(_while_loop),
    ),
    Hook("backend.jax.core:switch", "index, branches, operands", _carried(_switch)),
    Hook("backend.jax.core:fori_loop", "lower, upper, body_fun, init_val", _carried(_fori_loop)),
    Hook("backend.jax.core:map", "f, xs", _carried(_map)),
)
