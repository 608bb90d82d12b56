"""`strategy.constrain` in the layers of Keras and of Flax NNX: shardings, and equal numbers."""

import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from tests.replicas import mirrored

OPTIONS = [{}, {"devices_per_replica": {"tensor": 2, "sequence": 2}, "variable_policy": "sharded"}]
ROWS, LENGTH, WIDTH, HIDDEN = 8, 4, 8, 64
X = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype("f4")


def constrained(strategy, x):
    """Shard activations of sequences, where a replica has such devices."""
    return strategy.constrain(x, None, "sequence", "tensor")


def keras_losses(strategy):
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.up = keras.layers.Dense(HIDDEN, activation="tanh")
            self.down = keras.layers.Dense(WIDTH)

        def call(self, x):
            return self.down(constrained(strategy, self.up(x)))

    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((LENGTH, WIDTH))
        model = keras.Model(inputs, Block()(inputs))
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    history = model.fit(X, X[..., ::-1], batch_size=ROWS, epochs=3, shuffle=False, verbose=0)
    return history.history["loss"]


def nnx_losses(strategy):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.down(constrained(strategy, jnp.tanh(self.up(x))))

    with strategy.scope():
        model = Block(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def replica_step(x):
        def loss_fn(model):
            return rx.nn.mean_loss(jnp.square(model(x) - x[..., ::-1]).mean((1, 2)))

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    @rx.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(replica_step, (x,)), axis=None)

    data = rx.data.Dataset.from_tensor_slices(X).batch(ROWS).repeat(3)
    batches = strategy.experimental_distribute_dataset(data)
    return [float(step(x)) for x in batches]


@pytest.mark.parametrize("losses", [keras_losses, nnx_losses])
def test_constrain_in_layers_keeps_the_numbers(losses):
    one = losses(mirrored(1))
    many = [losses(mirrored(8, **options)) for options in OPTIONS]

    assert one[-1] < one[0]
    for found in many:
        np.testing.assert_allclose(found, one, rtol=1e-4)
