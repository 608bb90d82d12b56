"""Keras and NNX under a strategy against those by hand: ``python -m benchmarks.with_keras``.

    python -m benchmarks.with_keras [--tensorflow PYTHON] [--quick]

``PYTHON`` is an interpreter that can import tensorflow; without it its rows are left out. Two
virtual CPU devices; what each row means is in docs/benchmarks.md.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

os.environ["REPLICAX_CPU_DEVICES"] = "2"
os.environ["KERAS_BACKEND"] = "jax"

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax as rx
from benchmarks._keras_models import BATCH, STEPS, classification, many, mlp, resnet, transformer
from benchmarks._keras_models import data as rows_of
from benchmarks._timing import Block, Comparison, Spread, block, compare
from benchmarks.core import tensorflow

keras: Any = rx.keras


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed table of Keras.")
    parser.add_argument("--tensorflow", metavar="PYTHON")
    parser.add_argument("--quick", action="store_true", help="a tenth of the pairs, to try it out")
    options = parser.parse_args()
    share = 10 if options.quick else 1
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    print("\nKeras on two virtual CPU devices\n")
    print("| what | measured (median, quartiles) | at most | ours, ms | theirs, ms |")
    print("|---|---|---|---|---|")
    for name, make in (("MLP", mlp), ("transformer", transformer)):
        for way in ("shard_map", "jit"):
            theirs = by_hand(make, mapped=way == "shard_map")
            found = compare(custom(strategy, make), theirs, pairs=40 // share)
            _show(f"custom loop of {name} / stateless_call by hand, {way}", found, 1.03)
        found = compare(fit(strategy, make), fit_in_parallel(make), pairs=20 // share, seconds=0)
        _show(f"fit of {name} / DataParallel", found, 1.0)
    found = compare(nnx_loop(strategy), nnx_by_hand(), pairs=40 // share)
    _show("NNX loop of MLP / nnx.jit by hand, shard_map", found, 1.03)
    found = compare(*thousand_variables(strategy), pairs=40 // share)
    spread, times = found.difference, (1e3 * median(t) for t in (found.ours, found.theirs))
    shown = f"{1e3 * spread.median:+.3f} ms ({1e3 * spread.low:.3f}..{1e3 * spread.high:.3f})"
    _line("step of 1,000 Keras variables - rx variables", shown, "+0.1 ms", *times)
    if options.tensorflow:
        _against_tensorflow(strategy, options.tensorflow, share)
    ratios = first_calls(strategy, pairs=1 if options.quick else 3, small=options.quick)
    _show("first compiled call of ResNet50 / plain Keras", ratios, 1.3)


def _show(what: str, found: Comparison, target: float) -> None:
    if len(found.ours) > 1:
        ratio = found.ratio
    else:
        once = found.ours[0] / found.theirs[0]
        ratio = Spread(once, once, once)
    shown = f"{ratio.median:.2f} ({ratio.low:.2f}..{ratio.high:.2f})"
    _line(what, shown, f"{target:.2f}", 1e3 * median(found.ours), 1e3 * median(found.theirs))


def _line(what: str, shown: str, target: str, ours: float, theirs: float) -> None:
    print(f"| {what} | {shown} | {target} | {ours:.2f} | {theirs:.2f} |", flush=True)


# Custom loops.


def custom(strategy: Any, make: Callable[[Any], Any]) -> Block:
    """The loop of the tutorials."""
    with strategy.scope():
        model, optimizer = make(keras), keras.optimizers.Adam()
        by_row = classification(keras, reduction="none")
        optimizer.build(model.trainable_variables)

    def step_fn(x: Any, y: Any) -> Any:
        with rx.GradientTape() as tape:
            losses = by_row(y, model(x, training=True))
            loss = rx.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    step = rx.function(
        lambda batch: strategy.reduce("SUM", strategy.run(step_fn, args=batch), axis=None)
    )
    dataset = rx.data.Dataset.from_tensors(rows_of(make, BATCH))
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    return _ended_by_losses(lambda: step(batch))


def _ended_by_losses(step: Callable[[], Any]) -> Block:
    """Blocks of a step that wait for its last loss.

    Not for the variables: what was read of one is the reader's, and copied before the next step.
    """
    losses: list[Any] = []

    def once() -> None:
        losses[:] = [step()]

    return block(once, lambda: jax.block_until_ready(losses))


def by_hand(make: Callable[[Any], Any], *, mapped: bool) -> Block:
    """The same as Keras's guide for JAX has it: state handed around, arrays with shardings.

    Gradients are computed for each device's rows and added up, or for all rows, which XLA divides.
    """
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    whole, cut = PartitionSpec(), PartitionSpec("rows")
    same, split = NamedSharding(mesh, whole), NamedSharding(mesh, cut)
    model, optimizer = make(keras), keras.optimizers.Adam()
    by_row = classification(keras, reduction="none")
    optimizer.build(model.trainable_variables)

    def loss_of(weights: Any, others: Any, x: Any, y: Any) -> Any:
        predictions, others = model.stateless_call(weights, others, x, training=True)
        return by_row(y, predictions).sum() / BATCH, others

    def gradients_of(weights: Any, others: Any, x: Any, y: Any) -> Any:
        grad = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), gradients = grad(weights, others, x, y)
        return (*(jax.lax.psum((loss, gradients), "rows") if mapped else (loss, gradients)), others)

    compute = gradients_of
    if mapped:
        specs = {"in_specs": (whole, whole, cut, cut), "out_specs": whole}
        compute = jax.shard_map(gradients_of, mesh=mesh, check_vma=False, **specs)

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, others, slots = state
        loss, gradients, others = compute(weights, others, x, y)
        weights, slots = optimizer.stateless_apply(slots, gradients, weights)
        return (weights, others, slots), loss

    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = [jax.device_put(tuple([v.value for v in group] for group in groups), same)]
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(same, same))
    x, y = jax.device_put(rows_of(make, BATCH), split)

    def once() -> Any:
        state[0], loss = compiled(state[0], x, y)
        return loss

    return _ended_by_losses(once)


# NNX.


class Net(nnx.Module):
    """784-512-512-10."""

    def __init__(self) -> None:
        sizes, rngs = (784, 512, 512, 10), nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: Any) -> Any:
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)

    def loss(self, x: Any, y: Any) -> Any:
        """Of some rows, their part of that of the batch."""
        return optax.softmax_cross_entropy_with_integer_labels(self(x), y).sum() / BATCH


def nnx_loop(strategy: Any) -> Block:
    """A module and its optimizer, closed over."""
    with strategy.scope():
        model = Net()
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step_fn(x: Any, y: Any) -> Any:
        loss, gradients = nnx.value_and_grad(lambda m: m.loss(x, y))(model)
        optimizer.update(model, gradients)
        return loss

    step = rx.function(
        lambda batch: strategy.reduce("SUM", strategy.run(step_fn, args=batch), axis=None)
    )
    dataset = rx.data.Dataset.from_tensors(rows_of(mlp, BATCH))
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    return _ended_by_losses(lambda: step(batch))


def nnx_by_hand() -> Block:
    """The same with `nnx.jit`, and gradients of each device's rows added up in a `shard_map`."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    whole, cut = PartitionSpec(), PartitionSpec("rows")
    model = Net()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    for part in (model, optimizer):
        nnx.update(part, jax.device_put(nnx.state(part), NamedSharding(mesh, whole)))

    @partial(nnx.jit, donate_argnums=(0, 1))
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        graph, state = nnx.split(model)

        def gradients_of(state: Any, x: Any, y: Any) -> Any:
            grad = jax.value_and_grad(lambda state: nnx.merge(graph, state).loss(x, y))
            return jax.lax.psum(grad(state), "rows")

        specs: Any = {"in_specs": (whole, cut, cut), "out_specs": whole}
        compute: Any = jax.shard_map(gradients_of, mesh=mesh, check_vma=False, **specs)
        loss, gradients = compute(state, x, y)
        optimizer.update(model, gradients)
        return loss

    x, y = jax.device_put(rows_of(mlp, BATCH), NamedSharding(mesh, cut))
    return _ended_by_losses(lambda: step(model, optimizer, x, y))


def thousand_variables(strategy: Any) -> tuple[Block, Block]:
    """A step that changes each of 1,000 small variables, as Keras's and as ours."""
    with strategy.scope():
        theirs = many(keras)
        ours = [rx.Variable(np.zeros(8, np.float32)) for _ in theirs]
    blocks = []
    for variables in (theirs, ours):

        def change(variables: Any = variables) -> None:
            for v in variables:
                v.assign_add(np.ones(8, np.float32))

        step = rx.function(lambda change=change: strategy.run(change))
        finish = lambda v=variables[-1]: np.asarray(v)  # noqa: E731
        blocks.append(block(step, finish))
    return blocks[0], blocks[1]


# fit.


def fit(strategy: Any, make: Callable[[Any], Any]) -> Block:
    """An epoch of `fit` in a scope."""
    with strategy.scope():
        return _fit(make)


def fit_in_parallel(make: Callable[[Any], Any]) -> Block:
    """An epoch of `fit` under Keras's own distribution."""
    parallel = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    with parallel.scope():
        run = _fit(make)

    def block_of(steps: int) -> float:
        with parallel.scope():
            return run(steps)

    return block_of


def _fit(make: Callable[[Any], Any]) -> Block:
    model = make(keras)
    model.compile("adam", classification(keras))
    x, y = rows_of(make, BATCH * STEPS)
    return block(lambda: model.fit(x, y, BATCH, verbose=0, shuffle=False))


def _against_tensorflow(strategy: Any, python: str, share: int) -> None:
    with tensorflow(python, "_tensorflow_keras.py") as answer:
        if answer is None:
            print(f"| {python} has no TensorFlow | | | | |")
            return
        for name, make in (("MLP", mlp), ("transformer", transformer)):
            theirs = lambda steps, name=name: answer(name, steps)  # noqa: E731
            found = compare(fit(strategy, make), theirs, pairs=20 // share, seconds=0)
            _show(f"fit of {name} / TensorFlow Keras", found, 0.7)


# The first call.


def first_calls(strategy: Any, *, pairs: int, small: bool) -> Comparison:
    """Seconds of the first training step, of models that were never called before."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        with strategy.scope():
            times[0].append(_first_call(small))
        times[1].append(_first_call(small))
    return Comparison(*times)


def _first_call(small: bool) -> float:  # noqa: FBT001
    gc.collect()
    model = resnet(keras, small=small)
    model.compile("sgd", classification(keras))
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 64, 64, 3), np.float32)
    began = time.perf_counter()
    model.train_on_batch(x, np.zeros(4, np.int32))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
