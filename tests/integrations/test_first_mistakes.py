"""Mistakes of programs that come from one device: each warns once, and says what to write."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
