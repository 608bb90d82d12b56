"""One of our workers: reads lines ``name steps``, answers each with the seconds that they took."""

import itertools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

RATE = 0.01
WIDTHS = [784, 512, 512, 10]
BATCH = 64


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    makers = {
        **{f"all_reduce {n}": lambda n=n: all_reduce(strategy, n) for n in (1, 1024, 2**18, 2**22)},
        "MLP": lambda: mlp(strategy),
        "MLP from files": lambda: fed(strategy, rows("FILE")),
        "MLP from memory": lambda: fed(strategy, rows("DATA")),
    }
    steps = {}
    print("ready", file=answers)
    for line in sys.stdin:
        name, count = line.rsplit(maxsplit=1)
        if name not in steps:
            steps[name] = makers[name]()
        began = time.perf_counter()
        for _ in range(int(count)):
            result = steps[name]()
        jax.block_until_ready(strategy.experimental_local_results(result))
        print(time.perf_counter() - began, file=answers)


def all_reduce(strategy, size):
    value = strategy.run(lambda: jnp.ones(size))

    @rx.function
    def step(x):
        context = rx.distribute.get_replica_context
        return strategy.run(lambda x: context().all_reduce("MEAN", x), args=(x,))

    held = [step(value)]

    def one():
        held[0] = step(held[0])
        return held[0]

    return one


def trainer(strategy):
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            (
                rx.Variable((rng.standard_normal((a, b)) * 0.05).astype(np.float32)),
                rx.Variable(np.zeros(b, np.float32)),
            )
            for a, b in itertools.pairwise(WIDTHS)
        ]

    def replica(x, y):
        def loss(ws):
            h = x
            for i, (w, b) in enumerate(ws):
                h = h @ w + b
                h = jax.nn.relu(h) if i < len(ws) - 1 else h
            picked = jnp.take_along_axis(jax.nn.log_softmax(h), y[:, None], 1)
            return -jnp.mean(picked) / strategy.num_replicas_in_sync

        values = [(w.read_value(), b.read_value()) for w, b in weights]
        value, grads = jax.value_and_grad(loss)(values)
        grads = rx.distribute.get_replica_context().all_reduce("SUM", grads)
        for (w, b), (dw, db) in zip(weights, grads, strict=True):
            w.assign_sub(RATE * dw)
            b.assign_sub(RATE * db)
        return value

    @rx.function
    def step(x, y):
        return strategy.run(replica, args=(x, y))

    return step


def mlp(strategy):
    step = trainer(strategy)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, WIDTHS[0])).astype(np.float32)
    y = rng.integers(0, 10, BATCH).astype(np.int32)
    values = strategy.experimental_distribute_values_from_function
    batch = strategy.run(lambda a, b: (a, b), args=(values(lambda _: x), values(lambda _: y)))
    compiled = rx.function(lambda a, b: strategy.run(lambda a, b: (a + 0, b + 0), args=(a, b)))
    held = compiled(*batch)
    return lambda: step(*held)


def rows(policy):
    options = rx.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        rx.data.experimental.AutoShardPolicy, policy if policy == "DATA" else "OFF"
    )
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2 * BATCH * 8, WIDTHS[0])).astype(np.float32)
    y = rng.integers(0, 10, len(x)).astype(np.int32)
    dataset = rx.data.Dataset.from_tensor_slices((x, y)).repeat(100_000).batch(2 * BATCH)
    return dataset.with_options(options)


def fed(strategy, dataset):
    step = trainer(strategy)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    return lambda: step(*next(batches))


if __name__ == "__main__":
    main()
