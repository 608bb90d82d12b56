"""GANs written with `train_step(self, data)`: noise and numbers are those of one device."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import mirrored

keras = rx.keras
layers = keras.layers

ROWS = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


def drawn_by(library):
    if library == "keras":
        return keras.random.normal
    return rx.random.normal


class Wasserstein(keras.Model):
    """A WGAN-GP: the penalty is a gradient inside of a gradient."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.critic = keras.Sequential(
            [layers.Input((4,)), layers.Dense(8, "tanh"), layers.Dropout(0.3), layers.Dense(1)]
        )
        self.generator = keras.Sequential([layers.Input((3,)), layers.Dense(4)])
        self.optimizers = [keras.optimizers.SGD(0.05, momentum=0.5) for _ in range(2)]

    def penalty(self, real, fake):
        mixed = real + self.draw((len(real), 1)) * (fake - real)
        with rx.GradientTape() as tape:
            tape.watch(mixed)
            score = self.critic(mixed, training=True)
        slope = tape.gradient(score, mixed)
        return jnp.mean((jnp.sqrt(jnp.sum(slope**2, axis=1) + 1e-7) - 1) ** 2)

    def train_step(self, real):
        losses = {}
        for optimizer, part in zip(self.optimizers, ("critic", "generator"), strict=True):
            weights = getattr(self, part).trainable_variables
            with rx.GradientTape() as tape:
                fake = self.generator(self.draw((len(real), 3)), training=True)
                score = jnp.mean(self.critic(fake, training=True))
                loss = -score
                if part == "critic":
                    loss = score - jnp.mean(self.critic(real)) + self.penalty(real, fake)
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            losses[part] = loss
        return losses


def trained(strategy, library):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Wasserstein(drawn_by(library))
        model.compile()
        history = model.fit(ROWS, batch_size=8, epochs=2, verbose=0).history
    return history, model.critic.get_weights() + model.generator.get_weights()


@pytest.mark.parametrize("library", ["rx", "keras"])
def test_gan_draws_and_learns_as_one_device(library):
    history, weights = trained(rx.distribute.OneDeviceStrategy("CPU:0"), library)
    got_history, got_weights = trained(mirrored(2), library)

    for name, values in history.items():
        np.testing.assert_allclose(got_history[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    for got, expected in zip(got_weights, weights, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
