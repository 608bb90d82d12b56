"""The law of JAX's own traces: a run in one has the effect of plain code each time, or is refused.

Eager replicas run in threads, which take no part in the trace of the thread that starts them: what
they read there would be a constant of the traced function, and what they write would happen once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

ON_READ, SUM = rx.VariableSynchronization.ON_READ, rx.VariableAggregation.SUM


def in_scan(f):
    return lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0]


TRANSFORMATIONS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "cond": lambda f: lambda x: jax.lax.cond(x > 0, f, lambda y: y, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "grad": lambda f: lambda x: jax.value_and_grad(f)(x)[0],
    "jit of a function": lambda f: jax.jit(rx.function(f)),
    "grad of a function": lambda f: lambda x: jax.value_and_grad(rx.function(f))(x)[0],
}


class Program:
    """Functions of a number that call `strategy.run`, and their variables."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.weight = rx.Variable(2.0)
            self.total = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    def read(self, x):
        return x + self._sum(lambda: self.weight * 3)

    def write(self, x):
        self.strategy.run(lambda: self.total.assign_add(1.0))
        return x

    def argument(self, x):
        return self._sum(lambda y: self.weight * y, x)

    def capture(self, x):
        return self._sum(lambda: self.weight * x)

    def _sum(self, fn, *args):
        return self.strategy.reduce("SUM", self.strategy.run(fn, args), axis=None)


def effect(program, function, weight):
    """The result of a function, and what it adds to the total; None if it is refused."""
    program.weight.assign(weight)
    before = program.total.numpy()
    try:
        result = np.asarray(function(jnp.float32(5)))
    except rx.errors.TracingError:
        return None if program.total.numpy() == before else "written, and refused"
    return result, program.total.numpy() - before


@pytest.mark.parametrize("name", ["read", "write", "argument", "capture"])
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_a_run_in_a_trace_of_jax_is_that_of_plain_code_or_refused(two, transformation, name):
    program = Program(two)
    plain = getattr(program, name)
    traced = TRANSFORMATIONS[transformation](plain)

    for weight in (2.0, 7.0):
        assert effect(program, traced, weight) in (None, effect(program, plain, weight))


@pytest.mark.parametrize("name", ["read", "write", "argument", "capture"])
def test_a_function_takes_its_place(two, name):
    program = Program(two)
    plain, compiled = getattr(program, name), rx.function(getattr(program, name))

    for weight in (2.0, 7.0):
        assert effect(program, compiled, weight) == effect(program, plain, weight)


def test_replicas_of_a_tpu_strategy_are_refused_too():
    strategy = rx.distribute.TPUStrategy(rx.distribute.cluster_resolver.TPUClusterResolver(""))

    with pytest.raises(rx.errors.TracingError, match=r"rx\.function"):
        jax.jit(lambda x: strategy.run(lambda y: y * 2, args=(x,)))(1.0)
