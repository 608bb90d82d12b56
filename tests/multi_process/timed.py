"""Print the median seconds of an all-reduce and of `reduce`, compiled and not."""

import statistics
import sys
import time

import jax
import jax.numpy as jnp

import replicax as rx

strategy = rx.distribute.MultiWorkerMirroredStrategy()


def add_up(x):
    return rx.distribute.get_replica_context().all_reduce("SUM", x)


@rx.function
def step(x):
    return strategy.run(add_up, args=(x,))


@rx.function
def compiled_reduce(x):
    return strategy.reduce("SUM", strategy.run(lambda: x * 2), axis=None)


def seconds_of(call):
    found = []
    for _ in range(8):
        begin = time.perf_counter()
        jax.block_until_ready(strategy.experimental_local_results(call()))
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def main():
    x = jnp.ones(1000)
    outcome = strategy.run(lambda: x * 2)
    ways = {
        "step": lambda: step(x),
        "run": lambda: strategy.run(add_up, args=(x,)),
        "compiled": lambda: compiled_reduce(x),
        "reduce": lambda: strategy.reduce("SUM", outcome, axis=None),
    }
    for name, call in ways.items():
        sys.stdout.write(f"{name}={seconds_of(call):.3f}\n")


if __name__ == "__main__":
    main()
