"""The cost of two-phase commits without a loss: ``python -m tests.chaos.elastic_cost``.

Two workers of one elastic run alternate between two programs of the same step: one that commits in
two phases, and one as without ``--elastic``. So both meet the same load of the machine. Prints the
median time of a step of each, for steps of several lengths, and the median of the differences
between neighbors.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import replicax as rx

SOURCES = Path(rx.__file__).parents[1]
# Rows of a batch, and the width of two square layers.
SIZES = [(64, 256), (256, 512), (1024, 1024), (4096, 1024)]
_MARK = "elastic_cost "


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps for each size")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    _say("| parameters | a step | with `--elastic` | difference |")
    _say("| --- | --- | --- | --- |")
    for rows, width in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            said = _run(options, rows, width, folder)
        plain, elastic, difference = map(float, said.split(_MARK)[1].split()[:3])
        _say(
            f"| {2 * width * width / 1e6:.1f} M | {plain * 1e3:.1f} ms | {elastic * 1e3:.1f} ms |"
            f" {difference * 1e3:+.2f} ms, {difference / plain:+.1%} |"
        )


def _run(options, rows, width, folder):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(SOURCES)}
    command = [sys.executable, "-m", "replicax", "launch", "--elastic"]
    command += ["--workers", f"1:{options.workers}", __file__, "worker"]
    command += [str(rows), str(width), str(options.pairs)]
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=1800, check=True
    )
    return done.stdout


def _say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def worker(rows, width, pairs):
    """Take pairs of steps, and print the medians of their times."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    from replicax._src.workers import elastic  # noqa: PLC0415

    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    chance = np.random.default_rng(0)

    def new_step():
        with strategy.scope():
            layers = [
                rx.Variable(jnp.asarray(chance.normal(size=(width, width)) / 30, "float32"))
                for _ in range(2)
            ]

        def replica_step(x):
            def loss_fn():
                out = jnp.tanh(x @ layers[0].value()) @ layers[1].value()
                return rx.nn.compute_average_loss(jnp.square(out).mean(1), global_batch_size=rows)

            loss, gradients = rx.value_and_grad(loss_fn, layers)()
            gradients = rx.distribute.get_replica_context().all_reduce("SUM", gradients)
            for w, g in zip(layers, gradients, strict=True):
                w.assign_sub(0.01 * g)
            return loss

        @rx.function
        def step(x):
            return strategy.reduce("SUM", strategy.run(replica_step, args=(x,)), axis=None)

        return step

    data = chance.normal(size=(rows, width)).astype("float32")
    batch = next(iter(strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensors(data))))
    in_two_phases, plain = new_step(), new_step()
    in_two_phases(batch)
    is_supported, elastic.is_supported = elastic.is_supported, lambda: False
    plain(batch)
    elastic.is_supported = is_supported
    seconds = []
    for i in range(2 * pairs + 10):
        began = time.perf_counter()
        jax.block_until_ready((in_two_phases, plain)[i % 2](batch))
        seconds.append(time.perf_counter() - began)
    times = np.reshape(seconds[10:], (-1, 2))
    if strategy.is_chief:
        medians = np.median(times[:, 1]), np.median(times[:, 0])
        _say(f"{_MARK}{medians[0]} {medians[1]} {np.median(times[:, 0] - times[:, 1])}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*map(int, sys.argv[2:]))
    else:
        main()
