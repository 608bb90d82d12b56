"""What many tests of replicas need."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx


def mirrored(count: int, first: int = 0, **options: Any) -> Any:
    """A strategy on ``count`` devices, from number ``first``."""
    return rx.distribute.MirroredStrategy(jax.devices()[first : first + count], **options)


def context() -> Any:
    """The replica context of the code that runs."""
    return rx.distribute.get_replica_context()


def replica_id() -> Any:
    """The number of the replica that runs, as a float."""
    return jnp.float32(1) * context().replica_id_in_sync_group


def eagerly(strategy: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn`` on every replica, op by op."""
    return strategy.run(fn, args=args)


def compiled(strategy: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn`` on every replica, in one compiled program."""
    return rx.function(lambda *given: strategy.run(fn, args=given))(*args)


WAYS = [eagerly, compiled]


def components(value: Any) -> list[Any]:
    """Each replica's component as plain Python."""
    return [np.asarray(v).tolist() for v in value.values]


def local(strategy: Any, value: Any) -> list[Any]:
    """What each replica of this process holds, as plain Python; one replica's value may be bare."""
    return [np.asarray(x).tolist() for x in strategy.experimental_local_results(value)]


def per_replica(strategy: Any, values: Any) -> Any:
    """A per-replica value of these components, each on its replica's device."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: jax.device_put(
            values[c.replica_id_in_sync_group],
            strategy.topology.devices[c.replica_id_in_sync_group],
        )
    )
