"""Cut: one array of any shape, held in equal parts by the replicas.

Along its first axis where the replicas divide that; otherwise as a flat array, filled up at its
end. What fills it up is never looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax.topology._mesh import REPLICA_AXIS, Topology, together
from replicax.values._placement import first, on_device, own_copy, per_replica_jit

Shape = tuple[int, ...]

SPEC = PartitionSpec(REPLICA_AXIS)
# What is not larger stays whole on every replica: to gather it costs more than to hold it.
SMALL_BYTES = 16 * 1024


@dataclass(frozen=True)
class Cut:
    """How an array lies on the replicas.

    Attributes:
        shape: The shape of the whole array.
        count: Among how many replicas.
        lines: The dimensions of the TPU slices that they fill; see `Topology.lines`.

    Example:
        >>> from replicax.values._cut import Cut
        >>> Cut((8, 3), 4).part_shape, Cut((3, 3), 4).part_shape
        ((2, 3), (3,))
    """

    shape: Shape
    count: int
    lines: Shape = ()

    @cached_property
    def is_flat(self) -> bool:
        """Whether the stored array has another shape than the whole one."""
        return not self.shape or self.shape[0] % self.count != 0

    @cached_property
    def part_shape(self) -> Shape:
        """The shape of one replica's part."""
        if self.is_flat:
            return (-(-prod(self.shape) // self.count),)
        return (self.shape[0] // self.count, *self.shape[1:])

    @cached_property
    def stored_shape(self) -> Shape:
        """The shape of all parts, joined."""
        rows, *rest = self.part_shape
        return (rows * self.count, *rest)

    def stored(self, x: Any) -> Any:
        """The whole array as it is stored."""
        if not self.is_flat:
            return x
        if isinstance(x, np.ndarray):
            return np.pad(x.ravel(), (0, self._missing))
        return _named(self, to_whole=False)(x)

    def whole(self, stored: Any) -> Any:
        """The whole array, of the stored one."""
        return _named(self, to_whole=True)(stored) if self.is_flat else stored

    @property
    def _missing(self) -> int:
        return self.stored_shape[0] - prod(self.shape)

    # In code of one replica, inside a compiled program.

    def own(self, x: jax.Array) -> jax.Array:
        """This replica's part of a whole array."""
        rows = self.part_shape[0]
        at = jax.lax.axis_index(REPLICA_AXIS) * rows
        return jax.lax.dynamic_slice_in_dim(self.stored(x), at, rows)

    def gathered(self, part: jax.Array) -> jax.Array:
        """The whole array, of all replicas' parts."""
        joined: jax.Array = jax.lax.all_gather(part, REPLICA_AXIS, tiled=True)
        whole: jax.Array = self.whole(joined)
        return whole

    def own_sum(self, x: jax.Array) -> jax.Array:
        """This replica's part of the sum of all replicas' arrays.

        Of a slice of two or more dimensions it is made along one after the other, as the compiler
        for TPUs makes a sum of the whole out of one that goes over all of them.
        """
        part: jax.Array = self.stored(x)
        numbers = np.arange(self.count).reshape(self.lines or (self.count,))
        for axis, length in enumerate(numbers.shape):
            groups = np.moveaxis(numbers, axis, -1).reshape(-1, length).tolist()
            chosen = groups if self.lines else None
            part = jax.lax.psum_scatter(part, REPLICA_AXIS, axis_index_groups=chosen, tiled=True)
        return part

    # Outside of it.

    def spread(self, x: Any, topology: Topology) -> jax.Array:
        """A whole array in its parts, each on its replica's device, in memory of its own."""
        own, where = self.stored(own_copy(x)), NamedSharding(topology.mesh, SPEC)
        if topology.is_whole:
            placed: jax.Array = jax.device_put(own, where)
            return placed
        return jax.make_array_from_callback(own.shape, where, lambda index: own[index])

    def collected(
        self, stored: jax.Array, topology: Topology, device: jax.Device, what: str
    ) -> jax.Array:
        """The whole array on one device; of several processes all must ask.

        Args:
            stored: All parts.
            topology: Whose replicas hold them.
            device: One of this process's devices.
            what: What it is, in words.
        """
        if topology.is_whole:
            return on_device(self.whole(on_device(stored, device)), device)
        with together(topology, f"the value of {what}") as finished:
            joined = finished(_gatherer(self, topology)(stored))
        return on_device(first(joined), device)


def is_sharded(variable_policy: str) -> bool:
    """Whether a strategy's variables are held in parts.

    Raises:
        ValueError: If there is no such policy.
    """
    if variable_policy not in ("mirrored", "sharded"):
        raise ValueError(
            f"There is no variable_policy {variable_policy!r}. Use 'mirrored', where every replica"
            " holds all of each variable, or 'sharded', where each of N holds 1/N of it and gathers"
            " it to read it."
        )
    return variable_policy == "sharded"


def is_cut(x: Any, variable_policy: str) -> bool:
    """Whether a variable of the shape and dtype of ``x`` is held in parts: if it is large."""
    if not is_sharded(variable_policy):
        return False
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return bool(x.shape) and not is_key and prod(x.shape) * np.dtype(x.dtype).itemsize > SMALL_BYTES


@cache
def _gatherer(cut: Cut, topology: Topology) -> Callable[[jax.Array], jax.Array]:
    return per_replica_jit(cut.gathered, topology, SPEC, PartitionSpec())


@cache
def _named(cut: Cut, *, to_whole: bool) -> Callable[[jax.Array], jax.Array]:
    """To the whole array or back, with a name by which a jaxpr shows it; see `cancelled`."""

    def stored(x: jax.Array) -> jax.Array:
        return jnp.pad(x.ravel(), (0, cut.stored_shape[0] - prod(cut.shape)))

    def whole(x: jax.Array) -> jax.Array:
        return x[: prod(cut.shape)].reshape(cut.shape)

    chosen = whole if to_whole else stored
    chosen.__name__ = chosen.__qualname__ = WHOLE_NAME if to_whole else STORED_NAME
    return jax.jit(chosen)


WHOLE_NAME, STORED_NAME = "replicax_whole", "replicax_stored"
