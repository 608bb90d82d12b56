"""Variables where JAX takes arrays; `_jax_private.accept_as_array` makes them pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

FUNCTIONS = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "add": lambda v: jnp.add(v, 1),
    "dot": lambda v: jnp.dot(np.eye(3, dtype=np.float32), v),
    "matmul": lambda v: jnp.matmul(v, v),
    "tanh": jnp.tanh,
    "where": lambda v: jnp.where(v > 1, v, 0),
    "maximum": lambda v: jnp.maximum(0, v),
    "einsum": lambda v: jnp.einsum("ij,jk->ik", v, v),
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "lax": lambda v: jax.lax.add(v, v),
    "jit": jax.jit(lambda x: x * 2),
    "vmap": jax.vmap(lambda x: x * 2),
    "fori_loop": lambda v: jax.lax.fori_loop(0, 3, lambda _, c: c * 2, v),
    "concatenate": lambda v: jnp.concatenate([v, v]),
}
VALUE = np.arange(9, dtype=np.float32).reshape(3, 3)


@pytest.fixture(params=["plain", "mirrored"])
def variable(request):
    if request.param == "plain":
        return rx.Variable(VALUE)
    with rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return rx.Variable(VALUE)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_jax_takes_a_variable_as_its_value(variable, name):
    function = FUNCTIONS[name]

    np.testing.assert_allclose(function(variable), function(jnp.asarray(VALUE)), rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_a_compiled_function_the_variable_stays_an_input(name):
    variable, function = rx.Variable(VALUE), FUNCTIONS[name]
    compiled = rx.function(lambda: function(variable))
    compiled()

    variable.assign(VALUE + 1)

    np.testing.assert_allclose(compiled(), function(jnp.asarray(VALUE + 1)), rtol=1e-6)


def test_a_jitted_function_sees_the_value_of_today(variable):
    double = jax.jit(lambda x: x * 2)
    double(variable)

    variable.assign(VALUE + 1)

    np.testing.assert_array_equal(double(variable), 2 * (VALUE + 1))


def test_gradients_flow_through_functions_of_jax():
    variable = rx.Variable(VALUE)

    gradient = rx.grad(lambda: jnp.sum(jnp.square(variable)), variable)()

    np.testing.assert_array_equal(gradient, 2 * VALUE)
