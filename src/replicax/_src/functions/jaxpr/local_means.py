"""Find gradients of a mean over one replica's rows that are summed over the replicas.

They are too large by the number of replicas, the commonest mistake in programs that come from one
device. Differentiation leaves an unmistakable trace of such a mean in the jaxpr of the replica
function: an equation of `jnp.mean` divides the cotangent of the loss, 1.0, by the number of local
elements. The walk follows the quotient through linear operations to a sum over the replicas.

It prefers a miss to a false alarm: a factor in the loss, a nonlinear operation, or a division by
the number of replicas before or after the sum ends the search. `rx.nn.mean_loss` divides by the
number of examples of all replicas, and not with `jnp.mean`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jaxprs

from replicax._src.base.origin import is_library
from replicax._src.functions.jaxpr.replica_variance import CALLS, varying_values
from replicax._src.topology.mesh import REPLICA_AXIS

# How a value depends on the cotangent of the loss. Values without an entry do not, or not linearly.
_OTHER = 1  # on the cotangent of a loss that is no local mean
_UNIT = 2  # the cotangent of the loss, or its negative
_MEAN = 3  # divided by the number of elements of a mean
_GRADIENT = 4  # of such a mean, through values that differ between the replicas
_SUM = 5  # of such gradients, over the replicas

_SUMS = frozenset({"psum", "psum2", "psum_invariant"})
_UNARY = frozenset(
    {
        *("broadcast_in_dim", "convert_element_type", "copy", "copy_p", "cumsum", "expand_dims"),
        *("name", "neg", "optimization_barrier", "pvary", "real", "reduce_precision"),
        *("reduce_sum", "reshape", "rev", "sharding_constraint", "slice", "squeeze", "transpose"),
    }
)
_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "mul", "select_and_scatter_add"})
# The operands that may be the gradient, of operations that move it; the others select where.
_MOVES = {"dynamic_slice": (0,), "gather": (0,), "scatter-add": (0, 2), "pad": (0,)}
_FILE_OF_MEAN = inspect.unwrap(jnp.mean).__code__.co_filename
_JOINS = frozenset({"add_any", "concatenate"})


def summed_local_means(
    jaxpr: jaxprs.Jaxpr, varying_inputs: Sequence[bool], replicas: int
) -> list[str]:
    """Return the lines of means whose gradients are summed over the replicas.

    Args:
        jaxpr: The body of a replica function.
        varying_inputs: Which of its inputs differ between replicas.
        replicas: The number of replicas.

    Returns:
        A "file:line" for each mean; "" if its line is not known.
    """
    # Most steps of most programs are without any: one glance at the equations decides.
    if replicas < 2 or not any(_is_sum(e) for e in _all_equations(jaxpr)):
        return []
    walk = _Walk(replicas)
    walk.run(jaxpr, [None] * len(jaxpr.invars), varying_inputs)
    return [] if walk.is_scaled or not walk.is_summed else sorted(set(walk.means))


class _Walk:
    """The analysis of one replica function, in one pass over its jaxpr.

    Attributes:
        means: Where the means are.
        is_summed: Whether a gradient of one is summed over the replicas.
        is_scaled: Whether a gradient or such a sum is divided by the number of replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self.means: list[str] = []
        self.is_summed = False
        self.is_scaled = False

    def run(
        self, jaxpr: jaxprs.Jaxpr, inputs: Sequence[int | None], varying: Sequence[bool]
    ) -> list[int | None]:
        """Return how the outputs depend on the cotangent of the loss."""
        known = {v: s for v, s in zip(jaxpr.invars, inputs, strict=True) if s is not None}
        differ = varying_values(jaxpr.eqns, dict(zip(jaxpr.invars, varying, strict=True)))
        of = lambda x: _of_literal(x) if isinstance(x, jaxprs.Literal) else known.get(x)  # noqa: E731
        varies = lambda x: not isinstance(x, jaxprs.Literal) and differ.get(x, False)  # noqa: E731
        for equation in jaxpr.eqns:
            states = [of(x) for x in equation.invars]
            if not any(states):
                continue
            found = self._equation(equation, states, varies)
            for var, state in zip(equation.outvars, found, strict=True):
                if state is not None:
                    known[var] = state
        return [of(x) for x in jaxpr.outvars]

    def _equation(
        self, equation: Any, states: list[int | None], varies: Callable[[Any], bool]
    ) -> list[int | None]:
        name = equation.primitive.name
        none: list[int | None] = [None] * len(equation.outvars)
        if name in CALLS:
            return self._call(equation, states, varies)
        if _is_sum(equation):
            self.is_summed |= _GRADIENT in states
            return [_SUM if s == _GRADIENT else None for s in states]
        if name == "scan":  # layers: the backward pass is linear in the cotangent
            inner = equation.params["jaxpr"].jaxpr
            self.is_scaled |= any(self._scales(e) for e in _all_equations(inner))
            linear = _joined(states)
            found = _GRADIENT if linear == _MEAN and any(map(varies, equation.invars)) else linear
            return [found] * len(none)
        state = self._state(equation, name, states, varies)
        return none if state is None else [state] * len(none)

    def _state(
        self, equation: Any, name: str, states: list[int | None], varies: Callable[[Any], bool]
    ) -> int | None:
        """Return how the results of an operation that calls no function depend on the cotangent."""
        first = states[0]
        if name in _UNARY:
            return first
        if name == "div":
            return self._quotient(equation, states)
        if name in _PRODUCTS and len(states) == 2:
            return self._product(equation, states, varies)
        if name in _MOVES:
            return _joined([states[i] for i in _MOVES[name]])
        if name == "select_n" and _SUM not in states:
            state = _joined(states[1:])
            return _GRADIENT if state == _MEAN and varies(equation.invars[0]) else state
        if name in _JOINS:
            return _joined(states)
        if name in ("add", "sub") and first == states[1]:
            return first
        # The arithmetic of an optimizer may still divide the sum.
        return _SUM if _SUM in states else None

    def _quotient(self, equation: Any, states: list[int | None]) -> int | None:
        state, divisor = states[0], _number(equation.invars[1])
        if state == _UNIT:
            is_mean = divisor is not None and divisor > 1 and _is_of_mean(equation)
            if is_mean:
                self.means.append(_user_line(equation))
            return _MEAN if is_mean else _OTHER
        self.is_scaled |= state is not None and self._scales(equation)
        return state if (states[1] or 0) <= _UNIT else None

    def _product(
        self, equation: Any, states: list[int | None], varies: Callable[[Any], bool]
    ) -> int | None:
        self.is_scaled |= max(s or 0 for s in states) >= _MEAN and self._scales(equation)
        states = [
            None if isinstance(x, jaxprs.Literal) else s
            for x, s in zip(equation.invars, states, strict=True)
        ]  # a factor of 1.0 is no cotangent
        if None not in states:
            # The square of a norm, or the outer cotangent in a gradient of a gradient: the outer
            # loss alone determines the divisor of the gradients.
            return _SUM if _SUM in states else _OTHER
        state = _joined(states)
        other = equation.invars[states.index(None)]
        return _GRADIENT if state == _MEAN and varies(other) else state

    def _scales(self, equation: Any) -> bool:
        """Whether an equation divides by the number of replicas."""
        name, numbers = equation.primitive.name, [_number(x) for x in equation.invars]
        if name == "div":
            return numbers[1] == self._replicas
        return name == "mul" and any(
            n is not None and np.isclose(n * self._replicas, 1, rtol=1e-2) for n in numbers
        )

    def _call(
        self, equation: Any, states: list[int | None], varies: Callable[[Any], bool]
    ) -> list[int | None]:
        """Analyse the function that an equation calls; None for results of unknown signatures."""
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = equation.params.get(key)
            jaxpr = getattr(inner, "jaxpr", inner)
            if jaxpr is not None and len(jaxpr.invars) == len(states):
                return self.run(jaxpr, states, [varies(x) for x in equation.invars])
        return [None] * len(equation.outvars)


def _joined(states: Sequence[int | None]) -> int | None:
    """Return how a sum or combination of values depends on the cotangent, given how each does."""
    known = [s for s in states if s is not None]
    return _OTHER if _UNIT in known and max(known) == _UNIT else max(known, default=None)


def _is_sum(equation: Any) -> bool:
    params = equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    return equation.primitive.name in _SUMS and REPLICA_AXIS in axes


def _all_equations(jaxpr: jaxprs.Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs.jaxprs_in_params(equation.params):
            yield from _all_equations(inner)


def _of_literal(literal: jaxprs.Literal) -> int | None:
    number = _number(literal)
    return _UNIT if number is not None and abs(number) == 1 else None


def _number(x: Any) -> float | None:
    """Return the value of a real scalar literal; None for anything else."""
    if not isinstance(x, jaxprs.Literal) or np.ndim(x.val):
        return None
    value = np.asarray(x.val)
    return float(value) if value.dtype.kind in "fiuV" or "float" in str(value.dtype) else None


def _is_of_mean(equation: Any) -> bool:
    """Whether an equation was traced from `jnp.mean`, not from a sum and a division."""
    return any(
        f.function_name in ("mean", "_mean") and f.file_name == _FILE_OF_MEAN
        for f in _frames(equation)
    )


def _user_line(equation: Any) -> str:
    for frame in _frames(equation):
        if not is_library(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def _frames(equation: Any) -> Sequence[Any]:
    """Return the frames of the code that an equation was traced from, the innermost first."""
    traceback = getattr(getattr(equation, "source_info", None), "traceback", None)
    return [] if traceback is None else traceback.frames
