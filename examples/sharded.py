"""Sharded variables: every device keeps a part of the model and of its optimizer (ZeRO, FSDP).

    pip install 'replicax[demo]'
    REPLICAX_CPU_DEVICES=4 python examples/sharded.py

One argument of the strategy changes where numbers are kept; the program and what it learns stay.
The run trains twice, with copies and with parts, and compares.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "4")  # without accelerators: four virtual devices

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import replicax as rx

BATCH = 128  # rows of all replicas together
LEARNING_RATE, MOMENTUM = 0.1, 0.9
TOLERANCE = 1e-5  # sums in another order


def main() -> None:
    """Train with copies and with parts, and show what a device keeps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    copies = train(rx.distribute.MirroredStrategy(), options.steps)
    parts = train(rx.distribute.MirroredStrategy(variable_policy="sharded"), options.steps)

    table = Table("", "loss", "bytes on one device")
    table.add_row("a copy on each device", f"{copies['loss']:.4f}", f"{copies['bytes']:,}")
    table.add_row("a part on each device", f"{parts['loss']:.4f}", f"{parts['bytes']:,}")
    Console().print(table)
    pairs = zip(copies["weights"], parts["weights"], strict=True)
    largest = max(float(np.abs(a - b).max()) for a, b in pairs)
    print(f"The largest difference between two weights is {largest:.1e}.")
    assert largest < TOLERANCE


def train(strategy: Any, steps: int) -> dict[str, Any]:
    """The same program for every strategy."""
    with strategy.scope():
        weights = [rx.Variable(value) for value in initial_weights()]
        moments = [rx.Variable(jnp.zeros(w.shape)) for w in weights]

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            w1, b1, w2, b2 = weights
            logits = jnp.tanh(x @ w1 + b1) @ w2 + b2
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
            return rx.nn.mean_loss(-picked[:, 0])

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        gradients = rx.distribute.get_replica_context().all_reduce("SUM", gradients)
        for weight, moment, gradient in zip(weights, moments, gradients, strict=True):
            moment.assign(MOMENTUM * moment + gradient)
            weight.assign_sub(LEARNING_RATE * moment)
        return loss

    @rx.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    loss = float("nan")
    for batch in strategy.experimental_distribute_dataset(make_dataset().take(steps)):
        loss = float(train_step(batch))
    return {
        "loss": loss,
        "bytes": max(rx.debug.placement([*weights, *moments]).bytes_per_device.values()),
        "weights": [w.numpy() for w in weights],
    }


def initial_weights() -> list[np.ndarray]:
    """Two dense layers: 64 pixels, 256 hidden units, 10 digits."""
    rng = np.random.default_rng(0)
    first = rng.normal(0, 64**-0.5, (64, 256)).astype(np.float32)
    second = rng.normal(0, 256**-0.5, (256, 10)).astype(np.float32)
    return [first, np.zeros(256, np.float32), second, np.zeros(10, np.float32)]


def make_dataset() -> Any:
    """The digits of scikit-learn, in the same order in every run."""
    x, y = load_digits(return_X_y=True)
    rows = ((x / 16).astype(np.float32), y.astype(np.int32))
    return rx.data.Dataset.from_tensor_slices(rows).shuffle(2000, seed=1).repeat().batch(BATCH)


if __name__ == "__main__":
    main()
