"""Cross-device ops: an all-reduce algorithm of one's own.

    python examples/extend/cross_device_ops.py

This one sends gradients as bfloat16, which halves the traffic, and adds them as float32.
"""

import os
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "4")  # without accelerators: virtual devices

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx


class CompressedAllReduce(rx.extend.CollectiveOps):
    """Gather bfloat16 copies of all replicas' arrays, and add them on every replica."""

    def sum_replicas(
        self, leaves: list[jax.Array], options: object, topology: rx.extend.Topology
    ) -> list[jax.Array]:
        """Return the sum of each array over the replicas; it runs inside compiled code."""

        def compressed_sum(x: jax.Array) -> Any:
            sent = x.astype("bfloat16")
            return jax.lax.all_gather(sent, rx.extend.REPLICA_AXIS).astype(x.dtype).sum(0)

        return [compressed_sum(x) for x in leaves]


strategy = rx.distribute.MirroredStrategy(cross_device_ops=CompressedAllReduce())
third = jnp.full(3, 1 / 3)


def mean() -> Any:
    """Return the mean over the replicas."""
    return strategy.run(lambda: rx.distribute.get_replica_context().all_reduce("MEAN", third))


for means in mean(), rx.function(mean)():  # eager, and compiled
    print(means.values[0])
    np.testing.assert_array_equal(means.values[0], third.astype("bfloat16").astype("float32"))
