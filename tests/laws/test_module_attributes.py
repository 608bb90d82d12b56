"""The law of module attributes: a compiled step keeps what it sets on a module, or is refused.

Each way below has an attribute that holds state, and a step that replaces it. Afterwards the
attribute has the value that the step set, as when it runs op by op; a compiled step that cannot
keep the value raises `TracingError`, and the attribute has the value from before the step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import replicax as rx
from tests.replicas import mirrored


class Seen(nnx.Variable):
    """A variable that no gradient is taken of."""


# The attribute's value, given an array.
WAYS = {
    "array": lambda x: nnx.data(x),
    "tuple": lambda x: nnx.data((x, x + 1)),
    "dict": lambda x: nnx.data({"h": x}),
    "variable": Seen,
    "variables": lambda x: nnx.data([Seen(x), Seen(x + 1)]),
    "dict of variables": lambda x: nnx.data({"h": Seen(x)}),
}


class Module(nnx.Module):
    def __init__(self, make):
        self.w = nnx.Param(jnp.ones(()))
        self.make = make
        self.state = make(jnp.zeros(()))

    def __call__(self, x, how):
        y = x.sum() * self.w[...]
        if how == "replaced":
            self.state = self.make(jax.lax.stop_gradient(y))
        elif how == "assigned":
            self.state[...] = jax.lax.stop_gradient(y)
        return y


def direct(module, x, how):
    return module(x, how)


def differentiated(module, x, how):
    return nnx.grad(lambda m: m(x, how))(module)


def rematerialized(module, x, how):
    return nnx.remat(lambda m, x: m(x, how))(module, x)


def numbers(module):
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    leaves = jax.tree.leaves(module.state, is_leaf=is_variable)
    return [float(x[...]) if is_variable(x) else float(x) for x in leaves]


@pytest.mark.parametrize("call", [direct, differentiated, rematerialized])
@pytest.mark.parametrize("way", [*WAYS])
def test_replaced_state_is_refused_in_compiled_steps(way, call):
    strategy = mirrored(2)
    with strategy.scope():
        module = Module(WAYS[way])
    before = numbers(module)
    step = rx.function(lambda x: strategy.run(lambda x: call(module, x, "replaced") is None, (x,)))

    with pytest.raises(rx.errors.TracingError, match=r"set Module.state to another"):
        step(jnp.ones(3))

    assert numbers(module) == before


@pytest.mark.parametrize("way", [*WAYS])
def test_replaced_state_is_kept_op_by_op(way):
    strategy = mirrored(2)
    with strategy.scope():
        module = Module(WAYS[way])

    strategy.run(lambda x: module(x, "replaced") is None, (jnp.ones(3),))

    assert numbers(module)[0] == 3.0


@pytest.mark.parametrize("call", [direct, differentiated, rematerialized])
def test_assigned_variables_are_kept(call):
    strategy = mirrored(2)
    with strategy.scope():
        module = Module(Seen)
    step = rx.function(lambda x: strategy.run(lambda x: call(module, x, "assigned") is None, (x,)))

    step(jnp.ones(3))

    np.testing.assert_array_equal(module.state[...], 3.0)
