"""A training that is killed in the middle, and goes on as if nothing had happened.

    pip install 'replicax[demo,checkpoint]'
    python examples/resume.py

The program starts itself three times: once without trouble; once to be killed with SIGKILL, which
nobody can catch; and once more, to go on. The losses are the same, bit for bit: weights, optimizer
and the place in the shuffled data are one commit.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "2")  # without accelerators: two virtual devices

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

BATCH = 64  # rows of all replicas together
LEARNING_RATE, MOMENTUM = 0.2, 0.9


def main() -> None:
    """Compare a run that was killed with one that was not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--directory", type=Path, help="train here; for the runs it starts")
    parser.add_argument("--die-at", type=int, help="the step at which the run is killed")
    options = parser.parse_args()
    if options.directory is not None:
        train(options.directory, options.steps, options.die_at)
        return
    with tempfile.TemporaryDirectory() as scratch:
        calm, rough = Path(scratch, "calm"), Path(scratch, "rough")
        start(calm, options.steps)
        dies_at = options.steps * 2 // 3
        status = start(rough, options.steps, "--die-at", str(dies_at))
        print(f"The second run was ended by {signal.Signals(-status).name} at step {dies_at}.")
        start(rough, options.steps)
        expected, found = losses_of(calm), losses_of(rough)
    print(f"It went on, and its last loss is {found[-1]}; without the kill it is {expected[-1]}.")
    assert found == expected


def start(directory: Path, steps: int, *more: str) -> int:
    """Run this program in a process of its own."""
    command = [sys.executable, __file__, "--directory", str(directory), "--steps", str(steps)]
    return subprocess.run([*command, *more], check=False).returncode


def losses_of(directory: Path) -> list[float]:
    """The losses in the log; those of steps that were done twice, by the second time."""
    rows = [json.loads(line) for line in (directory / "log").read_text().splitlines()]
    return [loss for _, loss in sorted(dict(rows).items())]


def train(directory: Path, steps: int, die_at: int | None) -> None:
    """Train until so many steps are done, counted over all runs in this directory."""
    directory.mkdir(exist_ok=True)
    strategy = rx.distribute.MirroredStrategy()
    with strategy.scope():
        weights = rx.Variable(jnp.zeros((64, 10)))
        moment = rx.Variable(jnp.zeros((64, 10)))
    step = rx.Variable(0)
    batches = iter(strategy.experimental_distribute_dataset(make_dataset()))

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            picked = jnp.take_along_axis(jax.nn.log_softmax(x @ weights), y[:, None], axis=1)
            return rx.nn.mean_loss(-picked[:, 0])

        loss, [gradient] = rx.value_and_grad(loss_fn, [weights])()
        gradient = rx.distribute.get_replica_context().all_reduce("SUM", gradient)
        moment.assign(MOMENTUM * moment + gradient)
        weights.assign_sub(LEARNING_RATE * moment)
        return loss

    @rx.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    state: dict[str, Any] = {"weights": weights, "moment": moment, "step": step, "batches": batches}
    with rx.train.Resumable(str(directory / "run"), every=3, **state) as run:
        while int(step) < steps:
            if int(step) == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = float(train_step(next(batches)))
            with (directory / "log").open("a") as log:
                log.write(json.dumps([int(step), loss]) + "\n")
            step.assign_add(1)
            run.step()


def make_dataset() -> Any:
    """The digits of scikit-learn, shuffled anew in every pass."""
    x, y = load_digits(return_X_y=True)
    rows = ((x / 16).astype(np.float32), y.astype(np.int32))
    return rx.data.Dataset.from_tensor_slices(rows).shuffle(2000, seed=1).repeat().batch(BATCH)


if __name__ == "__main__":
    main()
