"""Gradients with respect to variables, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import VariableError

FLOATS = st.floats(-2, 2, width=32, allow_subnormal=False)  # XLA takes such numbers for 0


def predict(w, b, x):
    return jnp.tanh(x @ w + b).sum()


@pytest.fixture
def params():
    return {"w": rx.Variable(jnp.array([0.5, -1.0])), "b": [rx.Variable(0.25)]}


def test_values_and_gradients_are_those_of_jax(params, mode):
    x = jnp.array([[1.0, 2.0], [3.0, -1.0]])
    wanted = jax.value_and_grad(lambda p: predict(p["w"], p["b"][0], x))(
        {"w": jnp.array([0.5, -1.0]), "b": [jnp.float32(0.25)]}
    )
    step = mode(
        lambda x: rx.value_and_grad(
            lambda x: predict(params["w"].value(), params["b"][0].value(), x), params
        )(x)
    )

    seen = step(x)

    assert jax.tree.structure(seen) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), seen, wanted)


@settings(max_examples=20)
@given(w=FLOATS, x=FLOATS)
def test_second_gradients_are_those_of_jax(w, x):
    v = rx.Variable(np.float32(w))

    slope = rx.grad(lambda: rx.grad(lambda: v**3 * x, v)(), v)()

    np.testing.assert_allclose(slope, 6 * np.float32(w) * np.float32(x), rtol=1e-5, atol=1e-6)


def test_arguments_and_keywords_are_passed(mode):
    v = rx.Variable(2.0)

    step = mode(lambda: rx.grad(lambda x, *, scale: v * x * scale, v)(3.0, scale=5.0))

    assert float(step()) == 15.0


def test_aux_comes_along(mode):
    v = rx.Variable(2.0)
    fn = rx.value_and_grad(lambda: (v * v, {"twice": v * 2}), v, has_aux=True)

    (loss, aux), gradient = mode(fn)()

    assert (float(loss), float(aux["twice"]), float(gradient)) == (4.0, 4.0, 4.0)
    gradient, aux = mode(rx.grad(lambda: (v * v, v + 1), v, has_aux=True))()
    assert (float(gradient), float(aux)) == (4.0, 3.0)


def test_assignments_are_kept(mode):
    v, moving = rx.Variable(3.0), rx.Variable(1.0)

    def loss():
        moving.assign(moving * 0.5 + v)
        v.assign(v * 2)
        return v * v

    value, gradient = mode(rx.value_and_grad(loss, v))()

    # (2 v)^2
    assert (float(value), float(gradient)) == (36.0, 24.0)
    assert (float(moving), float(v)) == (3.5, 6.0)


def test_an_exception_in_the_function_assigns_nothing(mode):
    v = rx.Variable(3.0)

    def loss():
        v.assign(v * 2)
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        mode(rx.value_and_grad(loss, v))()

    assert float(v) == 3.0


def test_a_variable_that_is_named_twice_has_its_gradient_twice(mode):
    v = rx.Variable(3.0)

    assert [float(g) for g in mode(rx.grad(lambda: v * v, [v, v]))()] == [6.0, 6.0]


def test_a_variable_that_does_not_matter_has_gradient_zero(mode):
    v, w = rx.Variable(3.0), rx.Variable(jnp.ones(2))

    assert mode(rx.grad(lambda: v * v, w))().tolist() == [0.0, 0.0]


def test_gradients_have_the_dtype_of_their_variable(mode):
    v = rx.Variable(jnp.ones(2, jnp.bfloat16))

    assert mode(rx.grad(lambda: (v * 2).sum(), v))().dtype == jnp.bfloat16


def test_inside_replicas_gradients_are_local_until_they_are_reduced(two, mode):
    with two.scope():
        v = rx.Variable(2.0)

    def step():
        context = rx.distribute.get_replica_context()
        x = context.replica_id_in_sync_group.astype(jnp.float32) + 1
        gradient = rx.grad(lambda: v * v * x, v)()
        return gradient, context.all_reduce("SUM", gradient)

    local, summed = mode(lambda: two.run(step))()

    assert [float(g) for g in local.values] == [4.0, 8.0]
    assert [float(g) for g in summed.values] == [12.0, 12.0]


def test_the_gradient_of_an_all_reduce_is_an_all_reduce(two, mode):
    with two.scope():
        v = rx.Variable(2.0)

    def step():
        context = rx.distribute.get_replica_context()
        x = context.replica_id_in_sync_group.astype(jnp.float32) + 1
        return rx.grad(lambda: context.all_reduce("SUM", v * x), v)()

    # Each replica's loss is 3 v, and both are summed: every v counts for both.
    assert [float(g) for g in mode(lambda: two.run(step))().values] == [2.0, 4.0]


def test_inside_merge_call_it_sees_the_mirrored_value(two):
    with two.scope():
        v = rx.Variable(3.0)

    def merge(_):
        return rx.grad(lambda: v * v, v)()

    def step():
        return rx.distribute.get_replica_context().merge_call(merge)

    for run in (lambda: two.run(step), rx.function(lambda: two.run(step))):
        assert [float(g) for g in two.experimental_local_results(run())] == [6.0] * len(
            two.experimental_local_results(run())
        )


def test_own_copies_of_an_on_read_variable_are_changed_in_a_differentiated_replica(two, mode):
    with two.scope():
        v = rx.Variable(2.0)
        seen = rx.Variable(
            0.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def step():
        def loss():
            seen.assign_add(v * 3)
            return v * v

        return rx.grad(loss, v)()

    mode(lambda: two.run(step))()

    assert float(seen) == 12.0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (None, r"needs the variables.*rx\.value_and_grad\(fn, \[w, b\]\)"),
        ([], "needs the variables"),
        (jnp.ones(2), r"variables, got.*jax\.value_and_grad"),
        ([rx.Variable(1.0), 3], "got 3 .int."),
    ],
    ids=["none", "empty", "an array", "a number"],
)
def test_something_else_than_variables_is_refused(variables, words):
    with pytest.raises(TypeError, match=words):
        rx.value_and_grad(lambda: 0.0, variables)


def test_a_variable_of_integers_has_no_gradient():
    with pytest.raises(VariableError, match=r"'n:0' of dtype int32 has no gradient"):
        rx.grad(lambda: 0.0, rx.Variable(1, name="n"))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (jnp.ones(3), r"one scalar, got shape \(3,\).*compute_average_loss"),
        (None, "one scalar, got type NoneType"),
        ((jnp.float32(1), 2), r"got type tuple.*has_aux=True"),
    ],
    ids=["an array", "nothing", "a pair"],
)
def test_a_loss_that_is_not_a_scalar_is_refused(result, words):
    v = rx.Variable(1.0)

    with pytest.raises(TypeError, match=words):
        rx.grad(lambda: result, v)()


def test_has_aux_needs_a_pair():
    v = rx.Variable(1.0)

    with pytest.raises(TypeError, match=r"has_aux=True.*pair"):
        rx.grad(lambda: v * v, v, has_aux=True)()
