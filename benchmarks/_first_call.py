"""The first call with 64 and with 2 replicas, in a process that has 64 devices.

Prints the seconds of every trace, and of one compilation each, as JSON.
"""

import json
import sys
import time
from typing import Any

import replicax as rx
from benchmarks._models import DEEP
from benchmarks._steps import per_replica, replicax_step

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
    # The first trace of all also fills JAX's own caches.
    print(json.dumps({n: {"trace": traces[n][1:], "compile": compiles[n]} for n in traces}))


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
