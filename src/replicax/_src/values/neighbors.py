"""Copies of sharded variables' parts with another worker, so that an elastic run can lose one.

With ``REPLICAX_ELASTIC_SHARDS=neighbor`` each worker also has the parts of the worker after it (the
last one, those of the first), as they were after the last step. A resize puts the parts of all
workers that are left together again.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from replicax._src.base.errors import ReplicaxError
from replicax._src.topology.mesh import REPLICA_AXIS, Topology, on_all_replicas
from replicax._src.values.placement import first, per_replica_jit, stack
from replicax._src.values.sharded import ShardLayout
from replicax._src.workers import elastic

VARIABLE = "REPLICAX_ELASTIC_SHARDS"
_CHOICES = ("commit", "neighbor")


@cache
def _are_wanted() -> bool:
    chosen = os.environ.get(VARIABLE) or "commit"
    if chosen not in _CHOICES:
        raise ReplicaxError(
            f"{VARIABLE}={chosen!r} must be 'commit', to restart from the last commit when a worker"
            " with a part of a sharded variable is lost, or 'neighbor', to keep a copy of each"
            " worker's part with another one."
        )
    return chosen == "neighbor"


def is_enabled(topology: Topology | None) -> bool:
    """Whether the workers of an elastic run keep copies of each other's parts."""
    if topology is None or topology.is_fully_addressable or not elastic.is_on():
        return False
    is_simple = topology.cores == 1 and topology.shard_count == topology.num_replicas
    return _are_wanted() and is_simple


def shifted(
    arrays: Sequence[jax.Array], layouts: Sequence[ShardLayout], topology: Topology
) -> tuple[jax.Array, ...]:
    """Return each worker's copies of the next worker's parts; a collective."""
    if not arrays:
        return ()
    moved: tuple[jax.Array, ...] = _shifter(tuple(layouts), topology)(*arrays)
    return moved


@elastic.cached_until_resize
def _shifter(layouts: tuple[ShardLayout, ...], topology: Topology) -> Callable[..., Any]:
    count, each = topology.num_replicas, len(topology.local_replicas)
    pairs = [(i, (i - each) % count) for i in range(count)]
    specs = tuple(layout.spec for layout in layouts)

    def shift(*parts: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.lax.ppermute(part, REPLICA_AXIS, pairs) for part in parts)

    return per_replica_jit(shift, topology, specs, specs)


def parts_on_host(
    stored: jax.Array, copies: jax.Array, topology: Topology
) -> dict[int, np.ndarray]:
    """Return the parts that this worker has: its own, and the copies of the next worker's.

    Args:
        stored: The array of all parts.
        copies: What `shifted` returned for it.
        topology: The replicas that hold it.
    """
    each, count = len(topology.local_replicas), topology.num_replicas
    number = {device: i for i, device in enumerate(topology.devices)}
    found = {
        (number[shard.device] + each) % count: np.array(shard.data)
        for shard in copies.addressable_shards
    }
    return found | {
        number[shard.device]: np.array(shard.data) for shard in stored.addressable_shards
    }


def reassemble(
    parts: Mapping[int, np.ndarray], mine: Sequence[int], layout: ShardLayout, topology: Topology
) -> np.ndarray:
    """Return the whole array, from the parts that the workers contribute; a collective.

    Args:
        parts: The parts that this worker has.
        mine: The parts that it contributes; one worker contributes each.
        layout: The layout of the parts.
        topology: The new replicas.
    """
    one = next(iter(parts.values()))
    # Bytes, so that adding zeros leaves every number as it is.
    rows = np.zeros((layout.count, one.nbytes), np.uint8)
    for i in mine:
        rows[i] = np.frombuffer(parts[i].tobytes(), np.uint8)
    if not topology.is_fully_addressable:
        nothing = np.zeros_like(rows)
        local = [rows, *[nothing] * (len(topology.local_replicas) - 1)]
        with on_all_replicas(topology, "the parts of a sharded variable") as finished:
            rows = np.asarray(first(finished(_adder(topology)(stack(local, topology)))))
    rows = rows.reshape(layout.count, -1)
    joined = [np.frombuffer(row.tobytes(), one.dtype).reshape(one.shape) for row in rows]
    return np.asarray(layout.whole(np.concatenate(joined, axis=layout.axis or 0)))


@elastic.cached_until_resize
def _adder(topology: Topology) -> Callable[[jax.Array], jax.Array]:
    axis = PartitionSpec(REPLICA_AXIS)
    return per_replica_jit(lambda x: jax.lax.psum(x, REPLICA_AXIS), topology, axis, PartitionSpec())
