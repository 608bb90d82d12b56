"""Checkpoints of Keras models, ours and those that TensorFlow wrote."""

import json
import pathlib

import numpy as np
import pytest

import replicax as rx

keras = rx.keras
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
FILES = pathlib.Path(__file__).parents[1] / "golden" / "checkpoints"
TOLD = json.loads((FILES / "keras.json").read_text())
X = np.asarray(TOLD["x"], np.float32)
Y = X.sum(1, keepdims=True)


def made(strategy, *, built=True):
    layers = keras.layers
    head = [layers.Input((4,))] if built else []
    with strategy.scope():
        model = keras.Sequential(
            [*head, layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]
        )
        optimizer = keras.optimizers.Adam(0.01)
        model.compile(optimizer, "mse")
    return model, optimizer


def fit(model):
    return model.fit(X, Y, verbose=0, shuffle=False, epochs=2).history["loss"]


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n}dev")
def strategy(request):
    return rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


@pytest.mark.parametrize("built", [True, False], ids=["built", "built later"])
def test_training_continues_where_tensorflow_left_it(strategy, built):
    model, optimizer = made(strategy, built=built)
    checkpoint = rx.train.Checkpoint(model=model, optimizer=optimizer)
    checkpoint.restore(str(FILES / "keras-1"))
    if built:
        for new, old in zip(model.get_weights(), TOLD["weights"], strict=True):
            np.testing.assert_array_equal(new, np.asarray(old, np.float32))

    np.testing.assert_allclose(fit(model), TOLD["loss_after"], rtol=1e-5)


def test_metrics_are_nothing_that_tensorflow_saves_and_so_nothing_that_is_missing(strategy):
    model, optimizer = made(strategy)
    status = rx.train.Checkpoint(model=model, optimizer=optimizer).restore(str(FILES / "keras-1"))
    status.assert_existing_objects_matched()
    fit(model)  # makes the metric of the loss, and the optimizer's variables
    status.assert_consumed()

    mean = keras.metrics.Mean()
    status = rx.train.Checkpoint(model=model, mean=mean).restore(str(FILES / "keras-1"))
    with pytest.raises(rx.errors.CheckpointError, match="mean/total"):  # asked for by name
        status.assert_existing_objects_matched()


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.5),
    "amsgrad": lambda: keras.optimizers.Adam(0.5, amsgrad=True),
    "sgd": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.5, momentum=0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.5),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(0.5),
    "ftrl": lambda: keras.optimizers.Ftrl(0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_of_keras_2_are_restored_where_the_optimizer_is_the_same(two, name):
    expected = json.loads((FILES / "slots.json").read_text())[name]
    with two.scope():
        a, b = keras.Variable(np.zeros(3)), keras.Variable(np.zeros((2, 1)))
        optimizer = OPTIMIZERS[name]()
        optimizer.build([a, b])
    checkpoint = rx.train.Checkpoint(a=a, b=b, optimizer=optimizer)
    status = checkpoint.restore(str(FILES / f"slots-{name}"))

    def step():  # the gradients of all replicas are summed
        optimizer.apply_gradients([(a.value, a), (b.value * b.value / 2, b)])

    for _ in range(2):
        rx.function(lambda: two.run(step))()

    for v, value in zip((a, b), expected, strict=True):
        np.testing.assert_allclose(v.numpy(), value, rtol=2e-5)
    with pytest.raises(rx.errors.CheckpointError, match="optimizer/decay"):  # what Keras 3 has not
        status.assert_consumed()


def test_slots_of_another_optimizer_are_listed_and_not_restored(two):
    with two.scope():
        a, b = keras.Variable(np.zeros(3)), keras.Variable(np.zeros((2, 1)))
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        optimizer.build([a, b])
    checkpoint = rx.train.Checkpoint(a=a, b=b, optimizer=optimizer)
    status = checkpoint.restore(str(FILES / "slots-adam"))

    assert not np.any(optimizer.momentums[0].numpy())
    with pytest.raises(rx.errors.CheckpointError, match=r"a/\.OPTIMIZER_SLOT/optimizer/m"):
        status.assert_consumed()
    with pytest.raises(rx.errors.CheckpointError, match="optimizer/_variables/2"):
        status.assert_existing_objects_matched()


@pytest.mark.parametrize("built", [True, False], ids=["built", "built later"])
def test_a_model_continues_from_a_checkpoint_on_another_number_of_replicas(tmp_path, built):
    one, two = (rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)]) for n in (1, 2))
    keras.utils.set_random_seed(0)
    model, optimizer = made(two)
    fit(model)
    path = rx.train.Checkpoint(model=model, optimizer=optimizer).save(f"{tmp_path}/ckpt")
    wanted = fit(model)

    other, other_optimizer = made(one, built=built)
    checkpoint = rx.train.Checkpoint(model=other, optimizer=other_optimizer)
    status = checkpoint.restore(path)

    np.testing.assert_allclose(fit(other), wanted, rtol=1e-5)
    status.assert_consumed()


def test_a_model_is_restored_without_its_optimizer(tmp_path):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    model, optimizer = made(strategy)
    fit(model)
    path = rx.train.Checkpoint(model=model, optimizer=optimizer).save(f"{tmp_path}/ckpt")

    other, _ = made(strategy)
    rx.train.Checkpoint(model=other).restore(path).expect_partial()

    for new, old in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(new, old)
