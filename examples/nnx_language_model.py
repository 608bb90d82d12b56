"""A small language model of Flax NNX, letter by letter, on the text that lies beside it.

    pip install 'replicax[flax]'
    REPLICAX_CPU_DEVICES=4 python examples/nnx_language_model.py

The model, the optimizer and `nnx.value_and_grad` are those of one device. The text is the beginning
of "Alice's Adventures in Wonderland", which has no copyright any more.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "2")  # without accelerators: two virtual devices

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx

TEXT = Path(__file__).with_name("alice.txt").read_text()
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH, HEADS, LAYERS = 48, 64, 4, 2
BATCH = 32  # rows of all replicas together


class Layer(nnx.Module):
    """Every letter looks at those before it, and thinks about what it saw."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.look = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.first, self.second = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """For each letter, what it was and what it makes of those before it."""
        before = nnx.make_causal_mask(x[..., 0])
        x = x + self.look(self.first(x), mask=before)
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class Model(nnx.Module):
    """For each letter, how likely each letter is to follow."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.letters = nnx.Embed(len(LETTERS), WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, len(LETTERS), rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Rows of letters, as numbers."""
        x = self.letters(rows) + self.places(jnp.arange(rows.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def main() -> None:
    """Train, and let the model write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()

    strategy = rx.distribute.MirroredStrategy()
    print(f"{strategy.num_replicas_in_sync} replicas, {len(TEXT)} letters")
    with strategy.scope():
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    def replica_step(model: Any, optimizer: Any, rows: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(
                model(rows[:, :-1]), rows[:, 1:]
            )
            return rx.nn.mean_loss(losses)

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)  # adds up the gradients of all replicas
        return loss

    @rx.function
    def train_step(model: Any, optimizer: Any, rows: Any) -> Any:
        losses = strategy.run(replica_step, args=(model, optimizer, rows))
        return strategy.reduce("SUM", losses, axis=None)

    batches = strategy.experimental_distribute_dataset(make_dataset().take(options.steps))
    bar = rx.train.progress(batches, total=options.steps, batch_size=BATCH)
    for rows in bar:
        bar.update(loss=train_step(model, optimizer, rows))
    print(repr(write(model, "Alice was ", 80)))


def make_dataset() -> Any:
    """Pieces of the text that begin anywhere, for ever."""
    numbers = np.array([LETTERS.index(letter) for letter in TEXT], np.int32)
    pieces = np.lib.stride_tricks.sliding_window_view(numbers, LENGTH + 1).copy()
    dataset = rx.data.Dataset.from_tensor_slices(pieces)
    return dataset.shuffle(len(pieces), seed=0).repeat().batch(BATCH)


def write(model: Any, text: str, count: int) -> str:
    """Go on with a text, always with the likeliest letter."""
    likeliest = rx.function(lambda rows, last: jnp.argmax(model(rows)[0, last]))
    for _ in range(count):
        seen = [LETTERS.index(letter) for letter in text[-LENGTH:]]
        row = np.zeros((1, LENGTH), np.int32)
        row[0, : len(seen)] = seen  # what stands behind the last letter is not looked at
        text += LETTERS[int(likeliest(row, jnp.int32(len(seen) - 1)))]
    return text


if __name__ == "__main__":
    main()
