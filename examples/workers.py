"""Train a small network on several workers; the chief alone shows the progress.

On one machine:

    replicax launch --workers 3 examples/workers.py

Every worker runs this program. It reads its part of the data, and all keep the same weights.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

import replicax as rx

ROWS, FEATURES, CLASSES = 6000, 20, 4
BATCH = 120  # rows of all workers together
LEARNING_RATE = 0.2


def main() -> None:
    """Train, and say how often the network is right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=ROWS // BATCH, help="of each epoch")
    options = parser.parse_args()

    strategy = rx.distribute.MultiWorkerMirroredStrategy()  # first of all: the workers meet here
    inputs, labels = make_data()
    dataset = rx.data.Dataset.from_tensor_slices((inputs, labels)).shuffle(ROWS).batch(BATCH)
    dataset = dataset.take(options.steps)
    batches = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        weights = rx.Variable(jnp.zeros((FEATURES, CLASSES)))
        right = rx.Variable(
            0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def replica_step(x: Any, y: Any) -> None:
        def loss(w: Any) -> tuple[Any, Any]:
            scores = x @ w
            picked = jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1)
            return -jnp.sum(picked) / BATCH, jnp.sum(jnp.argmax(scores, axis=1) == y)

        grad, count = jax.grad(loss, has_aux=True)(weights.read_value())
        context = rx.distribute.get_replica_context()
        weights.assign_sub(LEARNING_RATE * context.all_reduce("SUM", grad))
        right.assign_add(count)

    @rx.function
    def train_step(batch: Any) -> None:
        strategy.run(replica_step, args=batch)

    console = Console(quiet=not strategy.is_chief)
    for epoch in range(options.epochs):
        right.assign(0)
        for batch in track(batches, f"epoch {epoch + 1}", options.steps, console=console):
            train_step(batch)
        share = int(right.read_value()) / (
            options.steps * BATCH
        )  # adds up all workers: every worker must read it
        console.print(f"epoch {epoch + 1}: {share:.1%} right, on {strategy.num_replicas_in_sync}")
    rx.debug.check_in_sync([weights])


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Points around four centres, and which of them each belongs to."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, FEATURES))
    labels = rng.integers(0, CLASSES, ROWS)
    inputs = centres[labels] + rng.normal(size=(ROWS, FEATURES)) * 1.5
    return inputs.astype(np.float32), labels.astype(np.int32)


if __name__ == "__main__":
    main()
