"""A strategy of one's own: it chooses devices; everything else is inherited.

    python examples/extend/own_strategy.py

This one takes the free half of a machine's devices and joins them in pairs: each replica has two
logical devices.
"""

import os

os.environ.setdefault("REPLICAX_CPU_DEVICES", "8")  # without accelerators: virtual devices

import jax
import jax.numpy as jnp

import replicax as rx


class PairsStrategy(rx.distribute.Strategy):
    """One replica for each pair of devices from ``first`` on."""

    def __init__(self, first: int = 0) -> None:
        devices = tuple(jax.devices()[first:])
        super().__init__(rx.extend.Topology(devices, cores=2))


strategy = PairsStrategy(first=4)
with strategy.scope():
    total = rx.Variable(0.0)


@rx.function
def step(x: jax.Array) -> jax.Array:
    """Add the sum of all replicas' numbers to a mirrored variable."""

    def replica_step() -> None:
        total.assign_add(rx.distribute.get_replica_context().all_reduce("SUM", x))

    strategy.run(replica_step)
    return total.read_value()


print(strategy.num_replicas_in_sync, "replicas:", strategy.topology)
assert strategy.num_replicas_in_sync == 2
assert float(step(jnp.float32(3.0))) == 6.0
