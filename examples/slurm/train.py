"""Train under Slurm, interrupted and requeued as often as Slurm likes.

    sbatch examples/slurm/train.sbatch

Slurm announces the end of the time limit with SIGUSR1. All tasks then save at the same step, and
the first requeues the job, which goes on from there. Without Slurm, this program is one worker.
"""

import argparse
import tempfile
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

import replicax as rx

ROWS, FEATURES = 1000, 8
BATCH = 50  # rows of all tasks together


def main() -> None:
    """Train, or go on where the job was interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", help="one that all tasks share; else a temporary one")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()

    strategy = rx.distribute.MultiWorkerMirroredStrategy()  # first of all: the tasks meet here
    dataset = rx.data.Dataset.from_tensor_slices(make_data()).shuffle(ROWS).repeat().batch(BATCH)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        weights = rx.Variable(jnp.zeros(FEATURES))
    step = rx.Variable(0)

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            return rx.nn.mean_loss((x @ weights - y) ** 2)

        loss, [gradient] = rx.value_and_grad(loss_fn, [weights])()
        gradient = rx.distribute.get_replica_context().all_reduce("SUM", gradient)
        weights.assign_sub(0.05 * gradient)
        return loss

    @rx.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    loss: Any = float("nan")
    state: dict[str, Any] = {"weights": weights, "step": step, "batches": batches}
    directory = options.directory or tempfile.mkdtemp()
    with rx.train.Resumable(directory, every=50, **state) as run:
        print(f"restart {run.restarts}, from step {int(step)}", flush=True)
        while int(step) < options.steps:
            loss = train_step(next(batches))
            step.assign_add(1)
            run.step()  # saves and ends here when the end was announced
            time.sleep(options.pause)
    if strategy.is_chief:
        print(f"done at step {int(step)}, loss {float(loss):.4f}", flush=True)


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Points, and a line through them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return x, x @ np.arange(FEATURES, dtype=np.float32)


if __name__ == "__main__":
    main()
