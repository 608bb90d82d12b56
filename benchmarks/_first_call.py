"""The first call with 64 and with 2 replicas, in a process that has 64 devices.

Prints the seconds of every trace, and of one compilation each, as JSON; then the processor seconds
of whole first calls of a step with Adam on 2 replicas, ours and written by hand.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import replicax as rx
from benchmarks._models import DEEP
from benchmarks._models import MANY as MANY_VARIABLES
from benchmarks._steps import by_hand, per_replica, replicax_step, with_replicax
from benchmarks._timing import Block

MANY, FEW = 64, 2


def main(pairs: int) -> None:
    [cpu] = rx.config.list_physical_devices("CPU")
    rx.config.set_logical_device_configuration(cpu, [rx.config.LogicalDeviceConfiguration()] * MANY)
    sides = {count: _setup(count) for count in (MANY, FEW)}
    traces: dict[int, list[float]] = {MANY: [], FEW: []}
    lowered: dict[int, Any] = {}
    for pair in range(pairs + 1):
        for count in (MANY, FEW) if pair % 2 else (FEW, MANY):
            began = time.perf_counter()
            lowered[count] = _traced(*sides[count])
            traces[count].append(time.perf_counter() - began)
    compiles = {}
    for count in (MANY, FEW):
        began = time.perf_counter()
        lowered[count].compile()
        compiles[count] = time.perf_counter() - began
    # The first of all also fills JAX's own caches.
    found: dict[Any, Any] = {n: {"trace": traces[n][1:], "compile": compiles[n]} for n in traces}
    pairs = max(2, pairs // 3)
    found["adam"] = _alternated(lambda: _adam(sides[FEW]), _adam_by_hand, pairs)
    found["many"] = _alternated(
        _many, lambda: _once(by_hand(jax.devices()[:FEW], MANY_VARIABLES)), pairs
    )
    print(json.dumps(found))


def _alternated(ours: Any, theirs: Any, pairs: int) -> list[list[float]]:
    """Processor seconds of first calls, each of a new function."""
    times: list[list[float]] = [[], []]
    for _ in range(pairs + 1):
        for side, make in zip(times, (ours, theirs), strict=True):
            call = make()
            began = time.process_time()
            jax.block_until_ready(call())
            side.append(time.process_time() - began)
    return [side[1:] for side in times]


def _once(run: Block) -> Callable[[], Any]:
    return lambda: run(1)


def _many() -> Callable[[], Any]:
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(FEW)])
    return _once(with_replicax(strategy, MANY_VARIABLES))


def _setup(count: int) -> tuple[Any, Any, Any]:
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    with strategy.scope():
        weights = [rx.Variable(w) for w in DEEP.weights()]
    x, y = (per_replica(strategy, rows) for rows in DEEP.batch(count))
    return strategy, weights, (x, y)


def _traced(strategy: Any, weights: Any, batch: Any) -> Any:
    """A new function, up to what the compiler takes."""
    step = replicax_step(strategy, DEEP, weights)
    concrete = step.get_concrete_function(*batch)
    return concrete._program.lowered(concrete._arguments.arrays)


def _adam(side: tuple[Any, Any, Any]) -> Callable[[], Any]:
    """A first step with Adam, as users write it: two slots for each of the weights."""
    strategy, _, batch = side
    with strategy.scope():
        weights = [rx.Variable(w) for w in DEEP.weights()]
        slots = [[rx.Variable(np.zeros_like(w)) for w in DEEP.weights()] for _ in range(2)]
        count = rx.Variable(0.0)

    def replica_step(x: Any, y: Any) -> Any:
        loss_fn = lambda: DEEP.loss([w.read_value() for w in weights], x, y)  # noqa: E731
        loss, gradients = rx.value_and_grad(loss_fn, weights)()
        gradients = rx.distribute.get_replica_context().all_reduce("SUM", gradients)
        count.assign_add(1.0)
        for gradient, *variables in zip(gradients, weights, *slots, strict=True):
            old = [v.read_value() for v in variables]
            for v, new in zip(variables, _update(gradient, *old, count.read_value()), strict=True):
                v.assign(new)
        return loss

    step = rx.function(lambda x, y: strategy.run(replica_step, args=(x, y)))

    def first() -> Any:
        step(*batch)  # waited for by its variables: to take results apart is a program of its own
        return [w.cell.value for w in weights]

    return first


def _adam_by_hand() -> Callable[[], Any]:
    mesh = Mesh(jax.devices()[:FEW], ("replica",))
    same, split = PartitionSpec(), PartitionSpec("replica")

    def replica_step(state: Any, count: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(DEEP.loss)(state[0], x, y)
        gradients, count = jax.lax.psum(gradients, "replica"), count + 1
        new = [_update(g, *old, count) for g, *old in zip(gradients, *state, strict=True)]
        return [list(column) for column in zip(*new, strict=True)], count, loss[None]

    specs = {"in_specs": (same, same, split, split), "out_specs": (same, same, split)}
    step = jax.jit(
        jax.shard_map(replica_step, mesh=mesh, check_vma=False, **specs), donate_argnums=(0, 1)
    )
    zeros = [np.zeros_like(w) for w in DEEP.weights()]
    state = (DEEP.weights(), zeros, zeros), np.float32(0)
    placed = jax.device_put(state, NamedSharding(mesh, same), may_alias=False)
    batch = jax.device_put(DEEP.batch(FEW), NamedSharding(mesh, split))
    return lambda: step(*placed, *batch)


def _update(gradient: Any, weight: Any, mean: Any, square: Any, count: Any) -> tuple[Any, Any, Any]:
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient**2
    unbiased = mean / (1 - 0.9**count), square / (1 - 0.999**count)
    return weight - 1e-3 * unbiased[0] / (jnp.sqrt(unbiased[1]) + 1e-7), mean, square


if __name__ == "__main__":
    main(int(sys.argv[1]))
