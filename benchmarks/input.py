"""From host to devices: feeding, and steps after a short batch. ``python -m benchmarks.input``.

Everything is a ratio of two things timed alternately in one run; see ``_timing``.
"""

import gc
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import replicax as rx
from benchmarks._models import MODELS
from benchmarks._timing import Spread, block, compare


def main() -> None:
    """Print the table."""
    rx.config.set_logical_device_configuration(
        rx.config.list_physical_devices("CPU")[0], [rx.config.LogicalDeviceConfiguration()] * 8
    )
    table = Table(title="Input, as ratios (median, quartiles)")
    for heading in ("what", "ratio", "target"):
        table.add_column(heading)
    table.add_row(
        "distributing to 8 devices / one device_put of the bytes", _shown(_feed()), "<= 1.2"
    )
    first, warm = _ragged()
    table.add_row("50 layers: first ragged step / first usual step", f"{first:.2f}", "<= 3")
    table.add_row("50 layers: warm ragged step / usual step", _shown(warm), "<= 4")
    table.add_row("memory after 50 epochs / after 5", f"{_memory():.3f}", "flat")
    Console().print(table)


def _feed() -> Spread:
    """A pass over an in-memory set on 8 devices, against putting the same batches there."""
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(8)])
    images = np.random.default_rng(0).random((8192, 28, 28), np.float32)
    dataset = rx.data.Dataset.from_tensor_slices(images).batch(1024)
    dist = strategy.experimental_distribute_dataset(dataset)
    sharding = strategy.topology.stacked

    def ours() -> None:
        for element in dist:
            jax.block_until_ready(element.form.array)

    def theirs() -> None:
        for start in range(0, len(images), 1024):
            rows = images[start : start + 1024].copy().reshape(8, 128, 28, 28)
            jax.block_until_ready(jax.device_put(rows, sharding))

    return compare(block(ours), block(theirs), pairs=20, seconds=0.2).ratio


def _ragged() -> tuple[float, Spread]:
    """Training steps of a deep network on a full and on a short batch."""
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    model = next(m for m in MODELS if "50" in m.name)
    with strategy.scope():
        weights = [rx.Variable(w) for w in model.weights()]

    @rx.function
    def train(batch: object) -> object:
        def step(x: jax.Array, y: jax.Array) -> jax.Array:
            def loss() -> jax.Array:
                return model.loss([w.value() for w in weights], x, y)

            value, gradients = rx.value_and_grad(loss, weights)()
            gradients = rx.distribute.get_replica_context().all_reduce("MEAN", gradients)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.assign_sub(0.001 * gradient)
            return value

        return strategy.run(step, args=batch)

    x, y = model.batch(2)
    rows = len(x) - 1
    data = rx.data.Dataset.from_tensor_slices((x, y))
    (full,) = strategy.experimental_distribute_dataset(data.batch(len(x)))
    (short,) = strategy.experimental_distribute_dataset(data.take(rows).batch(rows))

    def timed(batch: object) -> float:
        began = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(train(batch)))
        return time.perf_counter() - began

    usual = timed(full)
    ragged = timed(short)
    wait = lambda: jax.block_until_ready(weights[0].cell.array())  # noqa: E731
    warm = compare(block(lambda: train(short), wait), block(lambda: train(full), wait), pairs=20)
    return ragged / usual, warm.ratio


def _memory() -> float:
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x = np.zeros((512, 1024), np.float32)
    dist = strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices(x).shuffle(512).batch(64)
    )

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    for epoch in range(50):
        for _ in dist:
            pass
        if epoch == 4:
            early = resident()
    return resident() / early


def _shown(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


if __name__ == "__main__":
    main()
