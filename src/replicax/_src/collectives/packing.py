"""Packing: concatenate many small arrays into few flat ones for a collective, and split them.

Each collective has a fixed cost, and XLA does not combine small ones on every platform. Packing
large arrays costs a copy and gains nothing, so by default only small arrays are packed.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.topology.mesh import GATHERED_BYTES, is_gathered_faster
from replicax._src.values.sharded import SMALL_BYTES

_KIB = 1024
_MIB = 1024 * _KIB


@dataclass(frozen=True)
class Packing:
    """The default packing of arrays for a collective.

    Attributes:
        small_bytes: The largest array that shares a pack.
        pack_bytes: The largest pack.
        in_place: Whether arrays are written into the pack one after the other, or concatenated.
        gathered_bytes: The most that a replica may receive if a pack is sent to all replicas and
            summed locally instead of all-reduced. Packs below 1 KiB are not, except between two
            replicas.
    """

    small_bytes: int
    pack_bytes: int
    in_place: bool
    gathered_bytes: int = 0

    def is_gathered(self, pack: jax.Array, num_replicas: int) -> bool:
        """Whether each replica receives all packs and sums them locally."""
        return is_gathered_faster(pack, num_replicas, self.gathered_bytes)


# Measured in training steps on idle machines (docs/benchmarks.md). Within a process, where the
# collectives run among other work, 50 layers with gradients of 64 KiB: 16.4 ms with none of them
# packed, 12.6 in packs of 4 MiB, 12.2 of 1 MiB, 13.4 of 256 KiB.
WITHIN_PROCESS = Packing(128 * _KIB, _MIB, in_place=False)
# Between processes on CPUs each collective waits for the network, so packing also pays for larger
# arrays, unless XLA concatenates them, which it does element by element: an MLP with gradients of
# 1.6 and 1.0 MB took 18.8 ms packed as above, 33.6 concatenated into one pack, 12.9 written into
# it; a transformer 67, 42 and 42. From 4 MiB on, arrays are faster unpacked.
# XLA's all-reduce is Gloo's ring there, which goes round twice with parts of the data, its
# all-gather once with all of it; in its all-to-all (for less than 64 KiB) each sends to each at
# once. Time of an all-to-all of copies and a sum, relative to all-reduce, 2 workers: 4 bytes 0.6,
# 256 bytes to 64 KiB 0.4 to 0.5; 4 workers: 4 bytes 3.4, 4 KiB 0.4. All-gather, 2 workers: 1.2, 0.6
# to 0.8, 1 MiB 0.9, 4 MiB 1.2; 4 workers: 5.4, 0.7. A CNN with 200 KB of gradients took 1.25 of its
# step with an all-to-all.
BETWEEN_PROCESSES = Packing(2 * _MIB, 4 * _MIB, in_place=True, gathered_bytes=GATHERED_BYTES)


def for_sharded_variables(packing: Packing) -> Packing:
    """Return the packing for gradients of sharded variables, which are not packed."""
    return replace(packing, small_bytes=SMALL_BYTES, gathered_bytes=0)


def packed(
    collective: Callable[[list[jax.Array]], Sequence[jax.Array]],
    leaves: Sequence[jax.Array],
    *,
    bytes_per_pack: int = 0,
    num_packs: int = 1,
    packing: Packing = WITHIN_PROCESS,
) -> list[jax.Array]:
    """Apply an elementwise `collective` to `leaves`, in packs.

    Args:
        collective: Combines each array of a list with the other replicas' array at its index.
        leaves: The arrays to combine.
        bytes_per_pack: The largest pack; 0 packs only small arrays.
        num_packs: Without `bytes_per_pack`: 0 packs nothing, more than 1 splits all arrays
            evenly into that many packs.
        packing: The size limits, and how a pack is built.
    """
    packs = plan_packs([_size(x) for x in leaves], bytes_per_pack, num_packs, packing)
    join = _write_in_place if packing.in_place else _concatenate
    combined = collective([_join([leaves[i] for i in pack], join) for pack in packs])
    places = _places(combined, [[leaves[i].size for i in pack] for pack in packs])
    results: list[jax.Array | None] = [None] * len(leaves)
    for pack, flat, starts in zip(packs, combined, places, strict=True):
        for i, x in zip(pack, _unpack(flat, starts, [leaves[i] for i in pack]), strict=True):
            results[i] = x
    return results  # type: ignore[return-value]


def plan_packs(
    sizes: Sequence[tuple[str, int]],
    bytes_per_pack: int,
    num_packs: int,
    packing: Packing = WITHIN_PROCESS,
) -> list[list[int]]:
    """Return packs of array indices for arrays given as (dtype, bytes); each is in one pack."""
    if not bytes_per_pack and num_packs == 0:
        return [[i] for i in range(len(sizes))]
    # Packs hold one dtype each, in the order of the arrays, so all replicas plan the same packs.
    limit = bytes_per_pack or packing.pack_bytes
    by_count = not bytes_per_pack and num_packs > 1
    if by_count:
        limit = max(1, -(-sum(n for _, n in sizes) // num_packs))
    only_small = not bytes_per_pack and num_packs == 1
    packs: list[list[int]] = []
    open_packs: dict[str, tuple[list[int], int]] = {}
    for i, (dtype, size) in enumerate(sizes):
        if only_small and size > packing.small_bytes:
            packs.append([i])
            continue
        pack, used = open_packs.get(dtype, (None, 0))
        # A pack of limited size ends before the limit; one of a fixed number of packs, after it.
        full = used >= limit if by_count else used + size > limit
        if pack is None or full:
            pack, used = [], 0
            packs.append(pack)
        pack.append(i)
        open_packs[dtype] = (pack, used + size)
    return packs


def _size(x: jax.Array) -> tuple[str, int]:
    return str(x.dtype), x.size * x.dtype.itemsize


_Join = Callable[[list[jax.Array]], jax.Array]


def _join(arrays: list[jax.Array], join: _Join) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else join([jax.lax.reshape(x, (x.size,)) for x in arrays])


def _concatenate(arrays: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(arrays)


def _write_in_place(arrays: list[jax.Array]) -> jax.Array:
    # Each dynamic_update_slice updates the padded buffer in place and copies in bulk, while XLA on
    # CPUs concatenates element by element.
    first, *others = arrays
    flat = jnp.pad(first, (0, sum(x.size for x in others)))
    at = first.size
    for x in others:
        flat = jax.lax.dynamic_update_slice_in_dim(flat, x, at, 0)
        at += x.size
    return flat


def _places(
    flat: Sequence[jax.Array], sizes: Sequence[Sequence[int]]
) -> list[Sequence[int | jax.Array]]:
    """Return the offset of each array in its pack, for arrays of these sizes in packs `flat`."""
    starts: list[Sequence[int | jax.Array]] = [
        [0, *itertools.accumulate(pack[:-1])] for pack in sizes
    ]
    # Larger offsets do not fit into int32.
    most = np.iinfo(np.int32).max
    several = [i for i, s in enumerate(starts) if len(s) > 1 and 0 < flat[i].size <= most]
    if several:
        known = tuple(np.int32(at) for i in several for at in starts[i])
        offsets = iter(_runtime_offsets(known, flat[several[-1]]))
        for i in several:
            starts[i] = list(itertools.islice(offsets, len(starts[i])))
    return starts


def _unpack(
    flat: jax.Array, starts: Sequence[int | jax.Array], like: Sequence[jax.Array]
) -> list[jax.Array]:
    """Split a pack into arrays shaped like those in `like`."""
    if len(like) == 1:
        return [flat]
    if not flat.size:
        return [flat.reshape(x.shape) for x in like]
    parts = zip(starts, like, strict=True)
    return [jax.lax.reshape(_slice_at(flat, at, x.size), x.shape) for at, x in parts]


def _slice_at(flat: jax.Array, at: int | jax.Array, size: int) -> jax.Array:
    if isinstance(at, int):
        return jax.lax.slice_in_dim(flat, at, at + size)
    return jax.lax.dynamic_slice(flat, (at,), (size,), allow_negative_indices=False)


def _runtime_offsets(numbers: tuple[np.int32, ...], flat: jax.Array) -> tuple[jax.Array, ...]:
    """Return `numbers` as values that the CPU compiler cannot treat as constants.

    Code that processes equal arrays of a pack, such as optimizer steps of equal layers, then takes
    the offsets as arguments, and XLA compiles it once; with constant offsets it compiles one copy
    per array. (On CPUs XLA drops an `optimization_barrier` before it looks for equal code, hence
    the `cond`.) Both branches return the same numbers.
    """
    # The condition is a number that XLA does not know; `real`, as complex numbers have no order.
    offsets: Any = jax.lax.platform_dependent(
        flat[0].real > 0,
        cpu=lambda chosen: jax.lax.cond(chosen, lambda: numbers, lambda: numbers),
        default=lambda _: numbers,
    )
    return tuple(offsets)
