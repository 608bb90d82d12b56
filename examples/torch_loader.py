"""Input from a DataLoader of PyTorch, training on JAX.

    pip install torch 'replicax[demo]'
    REPLICAX_CPU_DEVICES=4 python examples/torch_loader.py

Datasets, transforms and samplers of PyTorch stay as they are, in processes of their own if wanted;
a strategy takes the loader, and divides its batches over the replicas.
"""

# pyright: reportMissingImports=false
import argparse
import os
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "2")  # without accelerators: two virtual devices

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, Subset

import replicax as rx

BATCH = 64  # rows of all replicas together
LEARNING_RATE = 0.3


class Digits(Dataset[Any]):  # type: ignore[misc] # torch is not installed where types are checked
    """Images of PyTorch, one at a time, with a transform."""

    def __init__(self) -> None:
        self.images, self.labels = load_digits(return_X_y=True)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One of them."""
        return torch.from_numpy(self.images[index]).float() / 16, int(self.labels[index])


def main() -> None:
    """Train, and say how many digits are read right."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="rows for so many steps an epoch; all by default")
    options = parser.parse_args()

    torch.manual_seed(0)
    data: Dataset[Any] = Digits()
    if options.steps:
        data = Subset(data, range(options.steps * BATCH))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)

    strategy = rx.distribute.MirroredStrategy()
    batches = strategy.experimental_distribute_dataset(loader)
    with strategy.scope():
        weights = rx.Variable(jnp.zeros((64, 10)))
        accuracy = rx.metrics.SparseCategoricalAccuracy()

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            logits = x @ weights
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
            accuracy.update_state(y, logits)
            return rx.nn.mean_loss(-picked[:, 0])

        loss, [gradient] = rx.value_and_grad(loss_fn, [weights])()
        gradient = rx.distribute.get_replica_context().all_reduce("SUM", gradient)
        weights.assign_sub(LEARNING_RATE * gradient)
        return loss

    @rx.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    for epoch in range(options.epochs):
        losses = [float(train_step(tuple(batch))) for batch in batches]
        right = float(accuracy.result())
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, accuracy {right:.1%}")
        accuracy.reset_state()


if __name__ == "__main__":
    main()
