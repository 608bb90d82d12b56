"""`ShardLayout`: the layout of an array that is sharded over the replicas in equal shards.

The array is sharded along one axis. Arrays of three or more dimensions are usually stacks of equal
layers: they keep their first axis whole, so that each layer can be gathered alone. Others are
sharded along their first axis. Where the number of replicas divides no such axis, the array is
flattened and padded at the end. The padding is never read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.topology.mesh import REPLICA_AXIS, Topology, on_all_replicas
from replicax._src.values.placement import (
    WHOLE,
    first,
    fresh_copy,
    on_device,
    per_replica_jit,
)
from replicax._src.workers.elastic import cached_until_resize

Shape = tuple[int, ...]

# Variables up to this size stay replicated: a gather would cost more than the memory saved.
SMALL_BYTES = 16 * 1024
# A stack whose layers have fewer elements for each replica is sharded as any other array: its
# shards would be thin slivers, which TPUs pad to whole tiles.
_SMALL_LAYER = 64


@dataclass(frozen=True)
class ShardLayout:
    """The layout of an array that is sharded over the replicas.

    Attributes:
        shape: The shape of the whole array.
        count: The number of replicas.
        lines: The dimensions of the TPU slices that they fill; see `Topology.lines`.
        axis: The axis that is sharded, or None if the array is stored flat; -1 to choose it.
        groups: The number of groups of `count` replicas, each of which has the whole array.
        logical: The sharding over the devices of each replica.

    Example:
        >>> from replicax._src.values.sharded import ShardLayout
        >>> [ShardLayout(shape, 4).part_shape for shape in [(8, 3), (3, 3), (4, 64, 64)]]
        [(2, 3), (3,), (4, 16, 64)]
    """

    shape: Shape
    count: int
    lines: Shape = ()
    axis: int | None = -1
    groups: int = 1
    logical: PartitionSpec = WHOLE

    def __post_init__(self) -> None:
        if self.axis == -1:
            axis = sharded_axis(self.shape, self.count, self.logical)
            object.__setattr__(self, "axis", axis)

    @property
    def is_flat(self) -> bool:
        """Whether the array is stored flat and padded."""
        return self.axis is None

    @property
    def is_plain(self) -> bool:
        """Whether the array is stored in its own shape, once."""
        return self.axis is not None and self.groups == 1

    @cached_property
    def part_shape(self) -> Shape:
        """The shape of one replica's shard."""
        if self.axis is None:
            return (-(-prod(self.shape) // self.count),)
        return _scaled(self.shape, self.axis, self.shape[self.axis] // self.count)

    @cached_property
    def stored_shape(self) -> Shape:
        """The shape of all shards of all groups, concatenated."""
        axis = self.axis or 0
        return _scaled(self.part_shape, axis, self.part_shape[axis] * self.count * self.groups)

    @cached_property
    def spec(self) -> PartitionSpec:
        """The partition of the stored array."""
        return PartitionSpec(*(None,) * (self.axis or 0), REPLICA_AXIS)

    @cached_property
    def full_spec(self) -> PartitionSpec:
        """The partition of the stored array, over the devices of each replica too."""
        entries = [*self.logical, *(None,) * len(self.shape)]
        if self.axis is None or self.logical == WHOLE:
            return self.spec
        entries[self.axis] = REPLICA_AXIS
        return PartitionSpec(*entries[: len(self.shape)])

    @property
    def of_body(self) -> "ShardLayout":
        """The layout in the code of one replica, where XLA partitions over logical devices."""
        return replace(self, logical=WHOLE)

    @property
    def is_stack(self) -> bool:
        """Whether each replica has its shard of every index of the first axis."""
        return bool(self.axis)

    @property
    def layer(self) -> "ShardLayout":
        """The layout of one layer of a stack."""
        assert self.axis
        return replace(self, shape=self.shape[1:], axis=self.axis - 1)

    def stored(self, x: Any) -> Any:
        """Convert a whole array to the stored form: flat and padded, once for each group."""
        if self.is_plain:
            return x
        if isinstance(x, np.ndarray):
            one = np.pad(x.ravel(), (0, self.missing)) if self.is_flat else x
            return np.concatenate([one] * self.groups, axis=self.axis or 0)
        return _named(self, to_whole=False)(x)

    def whole(self, stored: Any) -> Any:
        """Convert a stored array to the whole array."""
        return stored if self.is_plain else _named(self, to_whole=True)(stored)

    @property
    def missing(self) -> int:
        """The number of elements of padding."""
        return self.part_shape[0] * self.count - prod(self.shape) if self.is_flat else 0

    def _of_group(self, x: Any) -> Any:
        """Return the concatenation of the shards of one group."""
        return jnp.pad(x.ravel(), (0, self.missing)) if self.is_flat else x

    # For code of one replica, inside a compiled program.

    def local_shard(self, x: jax.Array) -> jax.Array:
        """Return this replica's shard of a whole array."""
        axis = self.axis or 0
        rows = self.part_shape[axis]
        at = self._index() * rows
        return jax.lax.dynamic_slice_in_dim(self._of_group(x), at, rows, axis)

    def _index(self) -> jax.Array:
        """Return the number of this replica's shard."""
        replica = jax.lax.axis_index(REPLICA_AXIS)
        return replica if self.groups == 1 else replica % self.count

    @property
    def members(self) -> list[list[int]] | None:
        """The replicas of each group; None if there is one group."""
        every = np.arange(self.count * self.groups).reshape(self.groups, self.count)
        return None if self.groups == 1 else every.tolist()

    def is_inside(self) -> jax.Array:
        """Return which elements of this replica's shard are not padding; the array is flat."""
        rows = self.part_shape[0]
        at = self._index() * rows
        return at + jnp.arange(rows) < prod(self.shape)

    def gathered(self, part: jax.Array) -> jax.Array:
        """Return the whole array, all-gathered from the replicas' shards."""
        axis = self.axis or 0
        joined: jax.Array = jax.lax.all_gather(
            part, REPLICA_AXIS, axis=axis, tiled=True, axis_index_groups=self.members
        )
        return joined[: prod(self.shape)].reshape(self.shape) if self.is_flat else joined

    def reduce_scatter(self, x: jax.Array, dtype: Any = None) -> jax.Array:
        """Return this replica's shard of the sum of all replicas' arrays (a reduce-scatter).

        Wider floating-point numbers are rounded to `dtype`, if it is given, for the sum.

        On a slice of two or more dimensions it scatters along one dimension after the other, as the
        TPU compiler does for an all-reduce over all of them.
        """
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        if dtype is not None and is_float and x.dtype.itemsize > np.dtype(dtype).itemsize:
            return self.reduce_scatter(x.astype(dtype)).astype(x.dtype)
        part: jax.Array = self._of_group(x)
        if self.groups > 1:
            return self._reduce_scatter_in_groups(part)
        numbers = np.arange(self.count).reshape(self.lines or (self.count,))
        for axis, length in enumerate(numbers.shape):
            groups = np.moveaxis(numbers, axis, -1).reshape(-1, length).tolist()
            chosen = groups if self.lines else None
            part = jax.lax.psum_scatter(
                part,
                REPLICA_AXIS,
                scatter_dimension=self.axis or 0,
                axis_index_groups=chosen,
                tiled=True,
            )
        return part

    def _reduce_scatter_in_groups(self, x: jax.Array) -> jax.Array:
        """Reduce-scatter within each group, then all-reduce the shards between the groups."""
        part = jax.lax.psum_scatter(
            x,
            REPLICA_AXIS,
            scatter_dimension=self.axis or 0,
            axis_index_groups=self.members,
            tiled=True,
        )
        peers = np.asarray(self.members).T.tolist()
        total: jax.Array = jax.lax.psum(part, REPLICA_AXIS, axis_index_groups=peers)
        return total

    # For code outside of a compiled program.

    def spread(self, x: Any, topology: Topology) -> jax.Array:
        """Shard a whole array over the replicas' devices, in buffers not shared with `x`."""
        own, where = self.stored(fresh_copy(x)), NamedSharding(topology.mesh, self.full_spec)
        if topology.is_fully_addressable:
            placed: jax.Array = jax.device_put(own, where)
            return placed
        return jax.make_array_from_callback(own.shape, where, lambda index: own[index])

    def collected(
        self, stored: jax.Array, topology: Topology, device: jax.Device, what: str
    ) -> jax.Array:
        """Return the whole array on one device; a collective if there are several processes.

        Args:
            stored: The stored array, of all shards.
            topology: The topology of the replicas that hold it.
            device: One of this process's devices.
            what: Its description in messages.
        """
        if topology.is_fully_addressable:
            return on_device(self.whole(on_device(stored, device)), device)
        with on_all_replicas(topology, f"the value of {what}") as finished:
            joined = finished(_gatherer(self, topology)(stored))
        return on_device(first(joined), device)


def sharded_axis(shape: Shape, count: int, logical: PartitionSpec = WHOLE) -> int | None:
    """Return the axis along which an array is sharded; None if there is none that is free."""
    if logical != WHOLE:
        taken = [*logical, *(None,) * len(shape)]
        free = [i for i, n in enumerate(shape) if taken[i] is None and n % count == 0]
        # Of a stack of layers, each can be gathered alone if the first axis stays whole.
        return max(free, key=lambda i: (i > 0 or len(shape) < 3, shape[i]), default=None)
    is_stack = len(shape) > 2 and prod(shape[1:]) >= _SMALL_LAYER * count
    inner = [i for i in range(1, len(shape)) if is_stack and shape[i] % count == 0]
    # The last axis is the slowest to gather, because it is contiguous in memory.
    if inner:
        return max(inner, key=lambda i: (i < len(shape) - 1, shape[i], -i))
    return 0 if shape and shape[0] % count == 0 else None


def _scaled(shape: Shape, axis: int, length: int) -> Shape:
    return (*shape[:axis], length, *shape[axis + 1 :])


def is_sharded(variable_policy: str) -> bool:
    """Whether a strategy shards its variables.

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


def check_shards(shards: Any, variable_policy: str) -> None:
    """Check the number of replicas over which variables are sharded.

    Raises:
        ValueError: If it is not positive, or variables are not sharded.
    """
    if shards is None:
        return
    if isinstance(shards, bool) or not isinstance(shards, int | np.integer) or shards < 1:
        raise ValueError(f"shards must be a positive number of replicas, got {shards!r}.")
    if not is_sharded(variable_policy):
        raise ValueError(
            f"shards={shards} is the number of replicas over which variables are sharded, and"
            f' variable_policy is {variable_policy!r}. Use variable_policy="sharded".'
        )


def checked_reduce_dtype(dtype: Any, variable_policy: str) -> np.dtype[Any] | None:
    """Return the type in which a strategy sums gradients of sharded variables; None if not set.

    Raises:
        ValueError: If it is not a floating-point type, or if variables are not sharded.
    """
    if dtype is None:
        return None
    if not is_sharded(variable_policy):
        raise ValueError(
            f"reduce_dtype={dtype!r} is the type in which gradients of sharded variables are"
            f" summed, and variable_policy is {variable_policy!r}. Use"
            ' variable_policy="sharded", or convert the gradients before `all_reduce`.'
        )
    try:
        found: np.dtype[Any] | None = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"reduce_dtype must be a floating-point type such as 'bfloat16', got {dtype!r}."
        )
    return found


def check_nothing_packs(reduce_dtype: Any, **choices: Any) -> None:
    """Check that gradients are summed where `reduce_dtype` holds, in reduce-scatters.

    Args:
        reduce_dtype: The type in which a strategy sums gradients; None if it is not set.
        choices: What makes gradients be packed or moved in another way, by the argument's name.

    Raises:
        ValueError: If it is set, and so is one of the choices.
    """
    given = [f"{name}={value!r}" for name, value in choices.items() if value]
    if reduce_dtype is not None and given:
        raise ValueError(
            f"reduce_dtype={str(reduce_dtype)!r} is the type of the reduce-scatters of gradients,"
            f" and {given[0]} sums gradients in another way, in the type that they have. Leave out"
            " one of the two."
        )


def is_sharded_over_replicas(
    x: Any, variable_policy: str, topology: Topology | None, logical: PartitionSpec = WHOLE
) -> bool:
    """Whether a variable of the shape and dtype of `x` is sharded: only large ones are.

    If it is sharded over the logical devices of a replica, another axis must be free.
    """
    if not is_sharded(variable_policy) or topology is None or topology.shards == 1:
        return False
    if logical != WHOLE and sharded_axis(tuple(x.shape), topology.shard_count, logical) is None:
        return False
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return bool(x.shape) and not is_key and prod(x.shape) * np.dtype(x.dtype).itemsize > SMALL_BYTES


@cached_until_resize
def _gatherer(layout: ShardLayout, topology: Topology) -> Callable[[jax.Array], jax.Array]:
    gather = per_replica_jit(layout.gathered, topology, layout.spec, PartitionSpec())
    # XLA may leave the result sharded over the devices of a replica; `first` needs whole copies.
    everywhere = NamedSharding(topology.mesh, PartitionSpec())
    return gather if topology.cores == 1 else jax.jit(gather, out_shardings=everywhere)


@cache
def _named(layout: ShardLayout, *, to_whole: bool) -> Callable[[jax.Array], jax.Array]:
    """Return the conversion, jitted under a name that `without_round_trips` finds in a jaxpr."""

    def stored(x: jax.Array) -> jax.Array:
        one = jnp.pad(x.ravel(), (0, layout.missing)) if layout.is_flat else x
        return jnp.concatenate([one] * layout.groups, axis=layout.axis or 0)

    def whole(x: jax.Array) -> jax.Array:
        length = prod(layout.shape) if layout.axis is None else layout.shape[layout.axis]
        one = jax.lax.slice_in_dim(x, 0, length, axis=layout.axis or 0)
        return one.reshape(layout.shape)

    chosen = whole if to_whole else stored
    chosen.__name__ = chosen.__qualname__ = WHOLE_NAME if to_whole else STORED_NAME
    return jax.jit(chosen)


WHOLE_NAME, STORED_NAME = "replicax_whole", "replicax_stored"
