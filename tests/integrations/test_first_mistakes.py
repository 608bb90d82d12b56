"""Mistakes of programs that come from one device: each warns once, and says what to write."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from replicax._src.strategy import base
from replicax._src.strategy.base import StrategyBase
from tests.replicas import mirrored

keras = rx.keras

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def train(strategy, loss_fn, op="SUM", how="tape", compiled=True):
    """One step of gradient descent; return the new weights."""
    with strategy.scope():
        w = rx.Variable(jnp.zeros((3, 1)))

    def step(x, y):
        if how == "tape":
            with rx.GradientTape() as tape:
                loss = loss_fn(y, x @ w)
            gradient = tape.gradient(loss, w)
        else:
            loss, gradient = rx.value_and_grad(lambda: loss_fn(y, x @ w), w)()
        gradient = rx.distribute.get_replica_context().all_reduce(op, gradient)
        w.assign_sub(0.1 * gradient)
        return loss

    run = lambda batch: strategy.run(step, args=batch)  # noqa: E731
    rows = rx.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for batch in strategy.experimental_distribute_dataset(rows):
        (rx.function(run) if compiled else run)(batch)
    return w.numpy()


ONE = 0.1 * 2 * (X.T @ Y) / 8  # the step on one device


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("how", ["tape", "value_and_grad"])
def test_summed_gradients_of_a_mean_keras_loss_warn(how, compiled):
    with pytest.warns(UserWarning, match=r"summed over 2 replicas.*rx\.nn\.mean_loss") as seen:
        wrong = train(mirrored(2), keras.losses.MeanSquaredError(), how=how, compiled=compiled)

    np.testing.assert_allclose(wrong, 2 * ONE, rtol=1e-5)
    assert {w.filename for w in seen} == {__file__}


def test_a_keras_optimizer_warns_of_gradients_of_a_mean():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    loss_fn = keras.losses.Huber()

    def step(x, y):
        with rx.GradientTape() as tape:
            loss = loss_fn(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    with pytest.warns(UserWarning, match="summed over 2 replicas"):
        rx.function(lambda: strategy.run(step, args=(X, Y)))()


def global_mean(y, prediction):
    losses = keras.losses.MeanSquaredError(reduction="none")(y, prediction)
    return rx.nn.mean_loss(losses)


def scaled_mean(y, prediction):
    return keras.losses.MeanSquaredError()(y, prediction) / 2


def averaged(y, prediction):
    return rx.nn.compute_average_loss((y - prediction)[:, 0] ** 2, global_batch_size=8)


@pytest.mark.parametrize("loss_fn", [global_mean, scaled_mean, averaged])
@pytest.mark.parametrize("how", ["tape", "value_and_grad"])
def test_right_scales_do_not_warn(loss_fn, how):
    np.testing.assert_allclose(train(mirrored(2), loss_fn, how=how), ONE, rtol=1e-5)


def test_mean_gradients_of_a_mean_loss_do_not_warn():
    loss = keras.losses.MeanSquaredError()
    np.testing.assert_allclose(train(mirrored(2), loss, op="MEAN"), ONE, rtol=1e-5)
    np.testing.assert_allclose(train(mirrored(1), loss), ONE, rtol=1e-5)  # one replica


def nnx_step(mean):
    """An NNX step with an Optax optimizer, which sums the gradients by itself."""
    model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(x, y):
        gradients = nnx.grad(lambda m: mean((m(x) - y) ** 2))(model)
        optimizer.update(model, gradients)

    return step


def optax_step(mean, op="SUM", after=1.0, before=1.0):
    """A step of plain JAX and Optax; the gradients may be scaled before and after the sum."""
    w, tx = rx.Variable(jnp.ones((3, 1))), optax.adam(0.1)
    state = tx.init(jnp.ones((3, 1)))

    def step(x, y):
        gradient = jax.grad(lambda w: mean(jnp.tanh(x @ w) - y))(w.read_value()) * before
        gradient = rx.distribute.get_replica_context().all_reduce(op, gradient) * after
        w.assign_add(tx.update(gradient, state)[0])

    return step


def layers_step(mean):
    """A model whose layers are scanned and rematerialized, with a jitted loss."""
    w = rx.Variable(jnp.ones((2, 3, 3)))

    def step(x, y):
        def loss_fn(w):
            layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
            h, _ = jax.lax.scan(layer, x, w)
            return jax.jit(lambda h: -mean(h - y))(h)

        gradient = jax.grad(loss_fn)(w.read_value())
        w.assign_sub(0.1 * rx.distribute.get_replica_context().all_reduce("SUM", gradient))

    return step


def two_level_step(mean):
    """An inner step on one replica's mean, whose outer loss is the right one."""
    w = rx.Variable(jnp.ones((3, 1)))

    def step(x, y):
        inner = lambda w: jnp.mean((x @ w - y) ** 2)  # noqa: E731

        def outer(w):
            return mean((x @ (w - 0.1 * jax.grad(inner)(w)) - y) ** 2)

        gradient = jax.grad(outer)(w.read_value())
        w.assign_sub(0.1 * rx.distribute.get_replica_context().all_reduce("SUM", gradient))

    return step


def compile_and_run(make, *args, **kwargs):
    strategy = mirrored(2)
    with strategy.scope():
        step = make(*args, **kwargs)
    rows = rx.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for batch in strategy.experimental_distribute_dataset(rows):
        rx.function(lambda batch: strategy.run(step, args=batch))(batch)


def penalized(losses):
    return jnp.mean(losses) + 0.1 * jnp.mean(losses**2)


@pytest.mark.parametrize("make", [nnx_step, optax_step, layers_step])
@pytest.mark.parametrize("mean", [jnp.mean, lambda x: x.mean(), penalized])
def test_summed_gradients_of_a_jax_mean_warn(make, mean):
    with pytest.warns(UserWarning, match=r"summed over 2 replicas.*rx\.nn\.mean_loss") as seen:
        compile_and_run(make, mean)

    assert {w.filename for w in seen} == {__file__}
    assert f"jnp.mean at {__file__}:" in str(seen[0].message)


RIGHT = {
    "mean_loss": rx.nn.mean_loss,
    "divided by the replicas": lambda x: jnp.mean(x) / 2,
    "divided by the global batch": lambda x: x.sum() / 8,
    "sum": jnp.sum,
    "mean of features": lambda x: rx.nn.mean_loss(jnp.mean(x, axis=-1)),
    "weights": lambda x: (x * 0.25).sum() / 2,
}


@pytest.mark.filterwarnings("error:The gradients of jnp.mean")
@pytest.mark.parametrize("make", [nnx_step, optax_step, layers_step, two_level_step])
@pytest.mark.parametrize("mean", RIGHT)
def test_gradients_of_the_right_size_do_not_warn(make, mean):
    """With as many columns as replicas, a sum looks like a mean."""
    compile_and_run(make, RIGHT[mean])


@pytest.mark.filterwarnings("error:The gradients of jnp.mean")
@pytest.mark.parametrize("scales", [{"op": "MEAN"}, {"after": 0.5}, {"before": 0.5}])
def test_gradients_that_are_divided_by_the_replicas_do_not_warn(scales):
    compile_and_run(optax_step, jnp.mean, **scales)


@pytest.mark.filterwarnings("error:The gradients of jnp.mean")
def test_a_mean_of_parameters_does_not_warn():
    """What a regularizer adds does not depend on the rows."""
    compile_and_run(optax_step, lambda x: rx.nn.mean_loss(x) + jnp.mean(jnp.ones(8)))


def model_outside():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def _no_other_strategy(monkeypatch):
    """A program that has made no strategy and used none, whatever other tests did."""
    monkeypatch.setattr(StrategyBase, "is_any_used", False)
    live = weakref.WeakSet()
    monkeypatch.setattr(base, "live_strategies", live)
    monkeypatch.setattr("replicax._src.integrations.keras_trainer.live_strategies", live)


@pytest.mark.usefixtures("_no_other_strategy")
@pytest.mark.parametrize("first", ["strategy", "model"])
def test_fit_outside_of_the_scope_of_an_unused_strategy_warns(first):
    model = model_outside() if first == "model" else None
    strategy = mirrored(2)
    with pytest.warns(UserWarning, match="trains on one device, though .* has 2 replicas"):
        (model or model_outside()).fit(X, Y, verbose=0)
    with strategy.scope():
        pass
    other = mirrored(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The program knows scopes, and trains a second model without one.
        model_outside().fit(X, Y, verbose=0)
    assert other.num_replicas_in_sync == 4  # it lived


@pytest.mark.usefixtures("_no_other_strategy")
@pytest.mark.parametrize("case", ["strategy gone", "one replica"])
def test_models_of_one_device_do_not_warn(case):
    strategy = mirrored(1 if case == "one replica" else 2)
    model = model_outside()
    if case == "strategy gone":
        strategy = None
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y, verbose=0)
    assert (strategy is None) == (case == "strategy gone")


TABLE = np.arange(12, dtype="float32").reshape(4, 3)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["rx", "keras"])
@pytest.mark.parametrize("op", ["@", "+", "*", "-", "/", "**", "//", "%", "<", "=="])
def test_numpy_arrays_leave_operators_to_variables(op, kind, compiled):
    value = np.ones((3, 1) if op == "@" else (4, 3), "float32") + 1
    variable = rx.Variable(value) if kind == "rx" else keras.Variable(value)
    compute = eval(f"lambda v: TABLE {op} v")

    found = (rx.function(compute) if compiled else compute)(variable)

    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, compute(value), rtol=1e-6)


@pytest.mark.parametrize("kind", ["rx", "keras"])
def test_a_tape_follows_numpy_operators(kind):
    value = np.ones((3, 1), "float32")
    variable = rx.Variable(value) if kind == "rx" else keras.Variable(value)

    with rx.GradientTape() as tape:
        loss = jnp.sum((TABLE @ variable) ** 2)

    expected = jax.grad(lambda v: jnp.sum((TABLE @ v) ** 2))(value)
    np.testing.assert_allclose(tape.gradient(loss, variable), expected, rtol=1e-6)


def test_a_numpy_function_in_a_compiled_function_is_named_with_its_line():
    w = rx.Variable(jnp.ones(3))
    with pytest.raises(rx.errors.TracingError, match=r"test_first_mistakes.py:\d+: `.*np.exp"):
        rx.function(lambda: np.exp(w))()
