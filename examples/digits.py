"""Train a small network on handwritten digits: 1, 2 and 4 replicas, the same weights.

Run it with `make demo`, or by hand:

    pip install 'replicax[demo]'
    python examples/digits.py --steps 300

The replicas are virtual devices of this machine's CPU and share its cores, so more of them do not
make the steps faster here. What the run shows is that one program serves any number of replicas,
and that it learns the same weights.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits

import replicax as rx

REPLICAS = (1, 2, 4)
BATCH = 128  # rows of all replicas together
LEARNING_RATE = 0.3
# Sums of float32 differ in their last digits with the order of their terms: about 3e-7 in the end.
TOLERANCE = 5e-6


@dataclass(frozen=True)
class Digits:
    """Images as rows of 64 numbers, and which digit each of them shows."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The same rows for the same step, whatever the number of replicas."""
        rows = np.random.default_rng(step).choice(len(self.train_y), BATCH, replace=False)
        return self.train_x[rows], self.train_y[rows]


@dataclass(frozen=True)
class Run:
    """What one training run gave."""

    replicas: int
    steps_per_second: float
    loss: float
    accuracy: float
    weights: list[np.ndarray]

    def distance(self, other: "Run") -> float:
        """The largest difference between a weight of this run and of the other."""
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)


def main() -> int:
    """Train with each number of replicas, print the table, say whether the weights agree."""
    parser = argparse.ArgumentParser(description="Train on digits with 1, 2 and 4 replicas.")
    parser.add_argument("--steps", type=int, default=300, help="steps of each run (default: 300)")
    steps = parser.parse_args().steps
    if steps < 2:
        parser.error(
            f"--steps {steps} measures nothing: the first step compiles, so give 2 or more"
        )

    # Before the first computation: one machine, four devices.
    [cpu] = rx.config.list_physical_devices("CPU")
    four = [rx.config.LogicalDeviceConfiguration()] * max(REPLICAS)
    rx.config.set_logical_device_configuration(cpu, four)

    console, digits, runs = Console(), load(), []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for replicas in REPLICAS:
            bar = progress.add_task(f"training on {replicas} replica(s)", total=steps)
            runs.append(train(digits, replicas, steps, partial(progress.advance, bar)))
    return report(console, runs)


def load() -> Digits:
    """The digits of scikit-learn: 1,797 images, every fifth kept aside for the test."""
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    is_test = np.arange(len(y)) % 5 == 0
    return Digits(x[~is_test], y[~is_test], x[is_test], y[is_test])


def train(digits: Digits, replicas: int, steps: int, on_step: Callable[[], None]) -> Run:
    """Train from the same start; only the list of devices depends on ``replicas``."""
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        weights = [rx.Variable(value) for value in initial_weights()]

    def replica_step(x: jax.Array, y: jax.Array) -> Any:
        def loss_fn() -> jax.Array:
            losses = cross_entropy(network(weights, x), y)
            return rx.nn.mean_loss(losses)

        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        gradients = rx.distribute.get_replica_context().all_reduce("SUM", gradients)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(LEARNING_RATE * gradient)
        return loss

    @rx.function
    def train_step(x: Any, y: Any) -> Any:
        losses = strategy.run(replica_step, args=(x, y))
        return strategy.reduce("SUM", losses, axis=None)

    def split(rows: np.ndarray) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda ctx: rows[ctx.replica_id_in_sync_group :: ctx.num_replicas_in_sync]
        )

    loss = float("nan")
    started = time.perf_counter()
    for step in range(steps):
        x, y = digits.batch(step)
        loss = float(train_step(split(x), split(y)))
        on_step()
        if step == 0:  # it also compiled the step
            started = time.perf_counter()
    seconds = time.perf_counter() - started

    final = [np.asarray(weight) for weight in weights]
    guesses = np.argmax(network(final, digits.test_x), axis=1)
    accuracy = float(np.mean(guesses == digits.test_y))
    return Run(replicas, (steps - 1) / seconds, loss, accuracy, final)


def initial_weights() -> list[np.ndarray]:
    """Two dense layers: 64 pixels, 128 hidden units, 10 digits."""
    rng = np.random.default_rng(0)
    first = rng.normal(0, 64**-0.5, (64, 128)).astype(np.float32)
    second = rng.normal(0, 128**-0.5, (128, 10)).astype(np.float32)
    return [first, np.zeros(128, np.float32), second, np.zeros(10, np.float32)]


def network(weights: list[Any], x: Any) -> Any:
    """Ten numbers for each image: how much it looks like each digit."""
    w1, b1, w2, b2 = weights
    # A smooth function: at the kink of a ReLU a difference of 1e-8 becomes one of 1e-5, and the
    # comparison of the weights would have to allow for that.
    return jnp.tanh(x @ w1 + b1) @ w2 + b2


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of each example."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def report(console: Console, runs: list[Run]) -> int:
    """Print the table and the verdict; 0 if every run learned the weights of the first."""
    table = Table(title="The same program on 1, 2 and 4 replicas")
    for column in ("replicas", "steps/s", "last loss", "test accuracy", "distance from 1 replica"):
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            str(run.replicas),
            f"{run.steps_per_second:,.0f}",
            f"{run.loss:.4f}",
            f"{run.accuracy:.1%}",
            f"{run.distance(runs[0]):.1e}",
        )
    console.print(table)
    largest = max(run.distance(runs[0]) for run in runs)
    agree = largest <= TOLERANCE
    verdict = "[green]equal[/]" if agree else "[red]NOT equal[/]"
    console.print(f"The weights are {verdict}: largest difference {largest:.1e}.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
