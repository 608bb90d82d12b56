"""Print the median seconds of all-reduces: of plain JAX, in `run`, and by `reduce`."""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


def plain():
    """Return an all-reduce of plain JAX over the same devices, and its argument."""
    mesh, rows = Mesh(np.array(jax.devices()), ("worker",)), PartitionSpec("worker")
    local = np.ones((1, 1000), np.float32)
    array = jax.make_array_from_process_local_data(NamedSharding(mesh, rows), local)
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "worker"), mesh=mesh, in_specs=rows, out_specs=PartitionSpec()
    )
    return jax.jit(summed), array


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
    psum, rows = plain()
    ways = {
        "plain": lambda: psum(rows),
        "step": lambda: step(x),
        "run": lambda: strategy.run(add_up, args=(x,)),
        "compiled": lambda: compiled_reduce(x),
        "reduce": lambda: strategy.reduce("SUM", outcome, axis=None),
    }
    for name, call in ways.items():
        sys.stdout.write(f"{name}={seconds_of(call):.3f}\n")


if __name__ == "__main__":
    main()
