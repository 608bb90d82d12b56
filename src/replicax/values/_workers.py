"""Values of replicas in several processes: what each process holds -> what all know.

Every function here is a collective: all workers call it, in the same order. Tensors travel by XLA;
the hub only carries shapes.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, PartitionSpec, use_abstract_mesh

from replicax._enums import ReduceOp
from replicax.topology._mesh import REPLICA_AXIS, Topology
from replicax.topology._together import together
from replicax.values._in_body import apply_in_body
from replicax.values._per_replica import PerReplica, pieces
from replicax.values._placement import join, own_copy, per_replica_jit
from replicax.workers import _group

_PARTS = (1 << 12, 1 << 17, 1 << 22)  # words; few sizes, so that few programs are compiled
_ALONE = AbstractMesh((), ())
_REPEATS = 4  # more parts of one size take longer than one of the next


def sum_across(op: ReduceOp, parts: Sequence[Any], topology: Topology) -> jax.Array:
    """The sum or mean over all replicas of ``parts``: each a sum, and how many entries it is of."""
    sums, counts = zip(*parts, strict=True)
    values = [pieces([jnp.asarray(s) for s in sums], topology)]
    if op is ReduceOp.MEAN:
        values.append(pieces([jnp.int32(c) for c in counts], topology))
    totals = [m.values[0] for m in apply_in_body(_sum, values, topology)]
    total: jax.Array = totals[0] if op is ReduceOp.SUM else totals[0] / totals[1]
    return total


def all_shapes(
    shapes: Sequence[tuple[int, ...]], topology: Topology, what: str
) -> list[tuple[int, ...]]:
    """The shapes that all replicas hold, of which this process knows its own."""
    if topology.is_whole:
        return list(shapes)
    told = _group.required().agree(f"the shapes of {what}", [list(s) for s in shapes])
    return [tuple(s) for one in told for s in one]


def gather_across(
    parts: Sequence[Any], axis: int, sizes: Sequence[int], topology: Topology
) -> tuple[jax.Array, ...]:
    """All replicas' values joined along ``axis``, on each of this process's devices.

    Args:
        parts: What this process's replicas hold.
        axis: Where to join.
        sizes: How long the value of each replica, of all processes, is there.
        topology: Where the replicas live.
    """
    longest = max(sizes)
    padded = [_padded(jnp.asarray(p), axis, longest) for p in parts]
    (rows,) = apply_in_body(_gather, [pieces(padded, topology)], topology)
    return tuple(_cut(r, axis, sizes) for r in rows.values)


def from_first(x: Any, topology: Topology, what: str) -> jax.Array:
    """What worker 0 holds, to the bit; the others' values only say shape and dtype.

    Args:
        x: An array, with the same shape and dtype on all workers.
        topology: Whose workers.
        what: What it is, in words.
    """
    if topology.is_whole:
        return jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        numbers = from_first(jax.random.key_data(x), topology, what)
        keys: jax.Array = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        return keys
    host = np.asarray(x)
    aval = f"{host.dtype}{list(host.shape)}"
    words = np.frombuffer(host.tobytes() + b"\0" * (-host.nbytes % 4), np.uint32)
    # Not part of a replica function that is being traced here.
    with together(topology, f"the value of worker 0 for {what}, {aval}"), use_abstract_mesh(_ALONE):
        sent = [_send(part, topology) for part in _parts(words)]
    data = np.concatenate(sent).tobytes() if sent else b""
    return own_copy(np.frombuffer(data[: host.nbytes], host.dtype).reshape(host.shape))


def first_of_all(value: PerReplica, topology: Topology) -> Any:
    """The first replica's component, of all processes."""
    own = value.values[0]
    if topology.is_whole:
        return own
    return from_first(jnp.asarray(own), topology, "the first replica's value")


def equal_across(digest: str, topology: Topology, what: str) -> bool:
    """Whether all workers have the same digest of something."""
    return topology.is_whole or len(set(_group.required().agree(what, digest))) == 1


def _sum(leaves: list[jax.Array]) -> list[jax.Array]:
    summed: list[jax.Array] = jax.lax.psum(leaves, REPLICA_AXIS)
    return summed


def _gather(leaves: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.all_gather(x, REPLICA_AXIS) for x in leaves]


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    missing = size - x.shape[axis]
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _cut(rows: jax.Array, axis: int, sizes: Sequence[int]) -> jax.Array:
    parts = [jax.lax.slice_in_dim(rows[i], 0, n, axis=axis) for i, n in enumerate(sizes)]
    return jnp.concatenate(parts, axis=axis)


def _parts(words: np.ndarray) -> Iterator[np.ndarray]:
    """The words in parts of the sizes above, the last one filled up."""
    at = 0
    while at < len(words):
        left = len(words) - at
        size = next((n for n in _PARTS if left <= _REPEATS * n), _PARTS[-1])
        part = words[at : at + size]
        yield np.pad(part, (0, size - len(part)))
        at += size


def _send(words: np.ndarray, topology: Topology) -> np.ndarray:
    rows = np.zeros((len(topology.own), len(words)), np.uint32)
    if topology.own[0] == 0:  # the others add nothing
        rows[0] = words
    sent = _sender(topology)(join(list(rows), topology))
    return np.asarray(sent.addressable_data(0))


@cache
def _sender(topology: Topology) -> Any:
    return per_replica_jit(
        lambda row: jax.lax.psum(row, REPLICA_AXIS), topology, PartitionSpec(), PartitionSpec()
    )
