"""The mesh: the devices of the replicas, and how the code of one replica reaches the others.

Topology: devices -> a mesh of replicas and their logical devices -> shardings.

Partitions: into how many parts an array is cut along each axis -> a spec of logical axes.

Together: what the processes of a topology do at the same time.

Across: how code of one replica reaches the others.

Code inside a compiled replica function reaches them over the mesh. A replica that is compiled by
itself, because its shapes differ from the others', meets them; see ``collectives._eager``.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._blocks import contextmanager
from replicax._errors import PlacementError
from replicax.topology._devices import default_devices, device_name_as, resolve_all
from replicax.workers import _group
from replicax.workers._sockets import GLOO_GREETING, filter_output

REPLICA_AXIS = "replica"


@dataclass(frozen=True)
class Topology:
    """Which devices make which replicas; what every strategy is about.

    Attributes:
        devices: The devices of all replicas of all processes, replica by replica.
        cores: How many of them make one replica.
        kind: What they stand in for, ``"TPU"`` in a simulated slice; empty for what they are.
        assignment: The device assignment that laid them out, if one did.

    Example:
        >>> from replicax.topology._mesh import Topology
        >>> Topology.local(["CPU:0", "CPU:1"]).num_replicas
        2
    """

    devices: tuple[jax.Device, ...]
    cores: int = 1
    kind: str = ""
    assignment: Any = field(default=None, compare=False)

    @classmethod
    def local(cls, devices: Sequence[str | jax.Device] | None = None) -> "Topology":
        """One replica for each of ``devices``; all accelerators, else all CPUs, by default."""
        return cls(resolve_all(devices) if devices else default_devices())

    @property
    def num_replicas(self) -> int:
        """How many copies of the computation run side by side, in all processes."""
        return len(self.devices) // self.cores

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The numbers of this process's replicas."""
        mine = jax.process_index()
        leads = self.devices[:: self.cores]
        return tuple(i for i, d in enumerate(leads) if d.process_index == mine)

    @cached_property
    def leads(self) -> tuple[jax.Device, ...]:
        """The first device of each of this process's replicas."""
        return tuple(self.devices[i * self.cores] for i in self.own)

    @cached_property
    def is_whole(self) -> bool:
        """Whether all replicas are this process's."""
        return len(self.own) == self.num_replicas

    def devices_of(self, replica: int) -> tuple[jax.Device, ...]:
        """All devices of one replica."""
        return self.devices[replica * self.cores : (replica + 1) * self.cores]

    def name_of(self, device: jax.Device) -> str:
        """The full name of one of the devices."""
        return device_name_as(device, self.kind)

    @cached_property
    def logical_axes(self) -> dict[str, int]:
        """The mesh axes of a replica's logical devices, one for each prime factor, with sizes."""
        return {f"l{i}": size for i, size in enumerate(prime_factors(self.cores))}

    @cached_property
    def mesh(self) -> Mesh:
        """The replicas as one mesh axis, and the axes of their logical devices."""
        shape = (self.num_replicas, *self.logical_axes.values())
        grid = np.asarray(self.devices, dtype=object).reshape(shape)
        return Mesh(grid, (REPLICA_AXIS, *self.logical_axes))

    def mesh_of(self, replica: int) -> Mesh:
        """The logical devices of one replica."""
        grid = np.asarray(self.devices_of(replica), dtype=object)
        return Mesh(grid.reshape(tuple(self.logical_axes.values())), tuple(self.logical_axes))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """An array that is cut over the mesh as ``spec`` says."""
        return self.mirrored if spec == PartitionSpec() else NamedSharding(self.mesh, spec)

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """The dimensions of the TPU slice that the replicas fill, if it has several."""
        places: list[Any] = [getattr(d, "coords", None) for d in self.devices]
        if None in places:
            return ()
        cores = [getattr(d, "core_on_chip", 0) for d in self.devices]
        at = [(*place, core) for place, core in zip(places, cores, strict=True)]
        return lines_of(tuple(map(int, np.ptp(at, axis=0) + 1)), self)

    @cached_property
    def mirrored(self) -> NamedSharding:
        """The same value on every replica."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def stacked(self) -> NamedSharding:
        """One row for each replica."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))


@dataclass(frozen=True)
class PlannedTopology(Topology):
    """Replicas that exist on paper: enough to trace and lower a program, not to run it.

    Attributes:
        shape: The dimensions of the slice that the devices fill, and the devices of a chip.
    """

    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, num_devices: int, cores: int, shape: tuple[int, ...] = ()) -> "PlannedTopology":
        """``num_devices`` in replicas of ``cores`` each."""
        return cls((jax.local_devices()[0],) * num_devices, cores, shape=shape)

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """The dimensions of the slice, if the replicas fill it."""
        return lines_of(self.shape, self)

    @cached_property
    def mesh(self) -> Any:
        """The axes and their sizes, without devices."""
        sizes = (self.num_replicas, *self.logical_axes.values())
        names = (REPLICA_AXIS, *self.logical_axes)
        # As `Mesh` has them; from JAX 0.12 on those of an abstract mesh are explicit by default.
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def lines_of(shape: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """The dimensions of a slice of that shape, the last ones first, if the replicas fill it."""
    lengths = tuple(n for n in (*reversed(shape[:-1]), *shape[-1:]) if n > 1)
    is_filled = topology.cores == 1 and prod(lengths) == topology.num_replicas
    return lengths if is_filled and len(lengths) > 1 else ()


def prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors of ``n``, smallest first."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return tuple(factors)


def partition_spec(
    topology: Topology,
    partition_dimensions: Sequence[int],
    shape: Sequence[int],
    *,
    what: str,
    may_repeat: bool = False,
) -> PartitionSpec:
    """How an array is cut over the logical devices of a replica.

    Args:
        topology: The replicas and their logical devices.
        partition_dimensions: Into how many parts it is cut along each axis.
        shape: Its shape.
        what: What it is, for messages.
        may_repeat: Whether fewer parts than logical devices are fine, each then on several.

    Raises:
        PlacementError: Checked in TensorFlow's order: not one number for each axis; an axis that
            cannot be cut into so many equal parts; more or fewer parts than logical devices.

    Example:
        >>> from replicax.topology._mesh import Topology
        >>> from replicax.topology._mesh import partition_spec
        >>> eight = Topology(tuple(jax.devices()), cores=8)
        >>> partition_spec(eight, [1, 2, 4, 1], (1, 8, 8, 3), what="an image")
        P(None, 'l0', ('l1', 'l2'))
    """
    parts = _numbers(partition_dimensions)
    if len(parts) != len(shape):
        raise PlacementError(
            f"partition_dimensions {parts} has {len(parts)} numbers, but {what} has the shape"
            f" {tuple(shape)}: it needs {len(shape)}, one for each axis, with 1 for an axis that is"
            " not cut."
        )
    for axis, (size, count) in enumerate(zip(shape, parts, strict=True)):
        if size % count:
            raise PlacementError(
                f"partition_dimensions {parts} cuts axis {axis} of {what}, of shape"
                f" {tuple(shape)}, into {count} parts, and {size} is not divisible by {count}."
                " Cut another axis, or pad this one."
            )
    total, cores = math.prod(parts), topology.cores
    if total != cores and not (may_repeat and cores % total == 0):
        wanted = "a divisor of" if may_repeat else "equal to"
        raise PlacementError(
            f"partition_dimensions {parts} makes {total} parts; their number must be {wanted} the"
            f" {cores} logical device(s) of a replica. The device assignment of the strategy says"
            " how many there are: rx.tpu.experimental.DeviceAssignment.build(topology,"
            " computation_shape=...)."
        )
    return _spec(topology, parts)


def _numbers(partition_dimensions: Sequence[int]) -> list[int]:
    try:
        numbers: list[Any] = list(partition_dimensions)
    except TypeError:
        numbers = [None]
    if not all(_is_positive(n) for n in numbers):
        raise PlacementError(
            f"partition_dimensions is {partition_dimensions!r}; it must be a list of positive whole"
            " numbers, one for each axis, such as [1, 2, 4, 1]."
        )
    return [int(n) for n in numbers]


def _is_positive(n: object) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and int(n) > 0


def _spec(topology: Topology, parts: Sequence[int]) -> PartitionSpec:
    free = dict(topology.logical_axes)
    entries: list[str | tuple[str, ...] | None] = []
    for count in parts:
        chosen = tuple(_take_axis(free, prime) for prime in prime_factors(count))
        entries.append(chosen if len(chosen) > 1 else chosen[0] if chosen else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _take_axis(free: dict[str, int], size: int) -> str:
    name = next(axis for axis, s in free.items() if s == size)
    del free[name]
    return name


_Finish = Callable[[Any], Any]
# Where workers have met: they connect, and say so, when they first do.
_connected: set[Topology] = set()


def together(topology: Topology, what: str) -> AbstractContextManager[_Finish]:
    """The gate for a computation on all replicas of ``topology``; nothing if all are ours.

    Args:
        topology: Whose replicas compute.
        what: What they compute, in words; the same on all workers.

    Returns:
        A context that gives a function, to be called with the results before the context ends: a
        connection that broke shows only in them.
    """
    return nullcontext(_as_it_is) if topology.is_whole else _gate(topology, what)


@contextmanager
def _gate(topology: Topology, what: str) -> Iterator[_Finish]:
    if topology.devices[0].platform != "cpu":
        with _group.required().collective(what):
            yield _as_it_is  # accelerators compute ahead, and are left to
        return
    is_first = topology not in _connected
    quiet = filter_output(1, GLOO_GREETING) if is_first else nullcontext()
    with _group.required().collective(what), quiet:
        yield jax.block_until_ready
    _connected.add(topology)


def _as_it_is(results: Any) -> Any:
    return results


class Across(Protocol):
    """The collectives that everything else is made of."""

    @abstractmethod
    def index(self) -> Any:
        """This replica's number."""

    @abstractmethod
    def sum(self, xs: list[Any]) -> list[Any]:
        """The sum over all replicas of each array."""

    @abstractmethod
    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """All replicas' arrays, joined along ``axis``."""


class MeshAxis:
    """The replicas are one program, and an axis of its mesh."""

    def index(self) -> Any:
        """Known when the program runs."""
        return jax.lax.axis_index(REPLICA_AXIS)

    def sum(self, xs: list[Any]) -> list[Any]:
        """One all-reduce."""
        return sum_over_mesh(xs)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """One all-gather."""
        if x.size == 0:  # XLA has no all-gather of nothing
            rows = x.shape[axis] * jax.lax.axis_size(REPLICA_AXIS)
            return jnp.zeros((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)
        joined: jax.Array = jax.lax.all_gather(x, REPLICA_AXIS, axis=axis, tiled=True)
        return joined


MESH_AXIS = MeshAxis()


def sum_over_mesh(xs: list[Any], groups: list[list[int]] | None = None) -> list[Any]:
    """The sum over all replicas of each array, inside compiled code.

    Args:
        xs: Arrays; of Python's numbers, which are the same everywhere, the sum is known already.
        groups: The replicas that add up among themselves; all by default.
    """
    seen = [_seen(x) for x in xs]
    sums: list[Any] = jax.lax.psum(seen, REPLICA_AXIS, axis_index_groups=groups)
    return sums


def sum_of_gathered(x: jax.Array) -> jax.Array:
    """The sum over all replicas of an array, made by each of what all others sent it."""
    total: jax.Array = _sum_of_gathered(_seen(x))
    return total


_AT_ONCE = 1 << 16  # bytes


@jax.custom_jvp
def _sum_of_gathered(x: jax.Array) -> jax.Array:
    if x.size * x.dtype.itemsize < _AT_ONCE:
        # To each a copy of its own: they go out side by side, where XLA's all-gather on CPUs hands
        # them round from one process to the next. In steps with larger gradients that took longer.
        copies = jnp.broadcast_to(x, (jax.lax.axis_size(REPLICA_AXIS), *x.shape))
        gathered = jax.lax.all_to_all(copies, REPLICA_AXIS, 0, 0)
    else:
        gathered = jax.lax.all_gather(x, REPLICA_AXIS)
    # All replicas add in one order, and number by number, so that their sums are equal to the bit.
    total: jax.Array = gathered[0]
    for i in range(1, gathered.shape[0]):
        total = total + gathered[i]
    return total


@_sum_of_gathered.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _sum_of_gathered(*primals), jax.lax.psum(*tangents, REPLICA_AXIS)


def _seen(x: Any) -> Any:
    # An array that the function closed over is a constant of this process's program, and another
    # one in other processes'. JAX would multiply it by the number of replicas.
    is_constant = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return jax.lax.optimization_barrier(x) if is_constant and jax.process_count() > 1 else x
