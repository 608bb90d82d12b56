"""The device mesh of the replicas, and collectives over it.

`Topology` maps devices to replicas and builds meshes and shardings. `partition_spec` converts
partition counts to a spec over the logical devices of a replica. `together` wraps computations that
span processes. `Across` is the interface to collectives among replicas: inside one compiled program
they run over the mesh axis (`MeshAxis`); replicas that are compiled separately, because their
shapes differ, synchronize on the host (see ``collectives._eager``).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._src.base.errors import PlacementError
from replicax._src.base.managers import contextmanager
from replicax._src.base.output import GLOO_GREETING, filter_output
from replicax._src.topology.devices import default_devices, device_name_as, resolve_all
from replicax._src.topology.virtual_devices import plan_named_devices
from replicax._src.workers import elastic, group

REPLICA_AXIS = "replica"


@dataclass(frozen=True)
class Topology:
    """The assignment of devices to replicas, on which every strategy is based.

    With several processes, list the devices of all of them, in the same order in every process.

    Attributes:
        devices: The devices of all replicas of all processes, replica by replica.
        cores: The number of devices per replica.
        kind: The kind of device that they simulate, ``"TPU"`` in a simulated slice; else empty.
        assignment: The device assignment that determined the order, if any.
        shards: The number of consecutive replicas over which sharded variables are sharded; 0 for
            all of them.
        axes: The names and sizes of the axes of a replica's devices, whose product is ``cores``.

    Raises:
        PlacementError: Without devices, if a device is listed twice, or if ``cores`` does not
            divide their number, or ``shards`` that of the replicas.

    Example:
        >>> rx.extend.Topology.local(["CPU:0", "CPU:1"]).num_replicas
        2
        >>> rx.extend.Topology(tuple(jax.devices()[:4]), cores=2).num_replicas
        2
    """

    devices: tuple[jax.Device, ...]
    cores: int = 1
    kind: str = ""
    assignment: Any = field(default=None, compare=False)
    shards: int = 0
    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlacementError("A Topology has no devices; it needs at least one.")
        if self.cores < 1 or len(self.devices) % self.cores:
            raise PlacementError(
                f"cores is {self.cores}, and there are {len(self.devices)} devices: each replica"
                " has that many devices, so it must be a positive divisor of their number."
            )
        if self.shards < 0 or self.num_replicas % self.shard_count:
            raise PlacementError(
                f"shards is {self.shards}, and there are {self.num_replicas} replicas: variables"
                " are sharded over that many of them, so it must be a positive divisor of their"
                " number."
            )
        self._check_distinct()

    def _check_distinct(self) -> None:
        if len(set(self.devices)) < len(self.devices):
            twice = next(d for d in self.devices if self.devices.count(d) > 1)
            raise PlacementError(
                f"A Topology has the device {twice} twice; each device can be of one replica."
            )

    @classmethod
    def local(
        cls,
        devices: Sequence[str | jax.Device] | None = None,
        axes: Mapping[str, int] | int = 1,
        shards: int = 0,
    ) -> "Topology":
        """Return replicas on these devices; by default on all accelerators, else all CPU devices.

        Args:
            devices: The devices, replica by replica.
            axes: The number of devices per replica, or the names and sizes of their axes.
            shards: See `Topology`.
        """
        named = checked_axes(axes)
        plan_named_devices(devices)
        chosen = resolve_all(devices) if devices else default_devices()
        return cls(chosen).divided(named, shards)

    def divided(self, axes: Mapping[str, int], shards: int) -> "Topology":
        """Return replicas of several of the devices, in groups of `shards` replicas."""
        cores = prod(axes.values())
        shards = 0 if shards * cores == len(self.devices) else shards
        if cores == 1 and not shards:
            return self
        return replace(self, cores=cores, axes=tuple(axes.items()), shards=shards)

    @property
    def num_replicas(self) -> int:
        """The number of replicas in all processes."""
        return len(self.devices) // self.cores

    @cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The indices of this process's replicas."""
        mine = jax.process_index()
        first = self.devices[:: self.cores]
        return tuple(i for i, d in enumerate(first) if d.process_index == mine)

    @cached_property
    def primary_devices(self) -> tuple[jax.Device, ...]:
        """The first device of each of this process's replicas."""
        return tuple(self.devices[i * self.cores] for i in self.local_replicas)

    @cached_property
    def is_fully_addressable(self) -> bool:
        """Whether all replicas belong to this process."""
        return len(self.local_replicas) == self.num_replicas

    @cached_property
    def is_between_cpus(self) -> bool:
        """Whether the replicas are CPU devices of several processes, which Gloo connects."""
        return not self.is_fully_addressable and self.devices[0].platform == "cpu"

    def rebind(self, devices: tuple[jax.Device, ...]) -> None:
        """Replace the devices of a run whose workers have changed.

        Variables, datasets and strategies share this object, and so see the new devices.
        """
        object.__setattr__(self, "devices", devices)
        for name in [name for name in vars(self) if name not in self.__dataclass_fields__]:
            del vars(self)[name]  # values of cached properties

    def devices_of(self, replica: int) -> tuple[jax.Device, ...]:
        """Return all devices of one replica."""
        return self.devices[replica * self.cores : (replica + 1) * self.cores]

    def name_of(self, device: jax.Device) -> str:
        """Return the full name of one of the devices."""
        return device_name_as(device, self.kind)

    @cached_property
    def logical_axes(self) -> dict[str, int]:
        """The names and sizes of a replica's mesh axes, one for each prime factor of ``cores``."""
        sizes = [size for _, size in self.axes] or [self.cores]
        return {f"l{i}": n for i, n in enumerate(p for size in sizes for p in prime_factors(size))}

    @cached_property
    def named_axes(self) -> dict[str, tuple[str, ...]]:
        """The mesh axes that form each named axis of a replica's devices."""
        rest = iter(self.logical_axes)
        return {name: tuple(next(rest) for _ in prime_factors(size)) for name, size in self.axes}

    @property
    def shard_count(self) -> int:
        """The number of replicas over which sharded variables are sharded."""
        return self.shards or self.num_replicas

    @cached_property
    def mesh(self) -> Mesh:
        """A mesh with one axis for the replicas, and the axes of their logical devices."""
        shape = (self.num_replicas, *self.logical_axes.values())
        grid = np.asarray(self.devices, dtype=object).reshape(shape)
        return Mesh(grid, (REPLICA_AXIS, *self.logical_axes))

    def mesh_of(self, replica: int) -> Mesh:
        """Return the mesh of the logical devices of one replica."""
        grid = np.asarray(self.devices_of(replica), dtype=object)
        return Mesh(grid.reshape(tuple(self.logical_axes.values())), tuple(self.logical_axes))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of ``spec`` over the mesh."""
        return self.mirrored if spec == PartitionSpec() else NamedSharding(self.mesh, spec)

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """The dimensions of the TPU slice that the replicas fill, if there are several; else ()."""
        places: list[Any] = [getattr(d, "coords", None) for d in self.devices]
        if None in places:
            return ()
        cores = [getattr(d, "core_on_chip", 0) for d in self.devices]
        at = [(*place, core) for place, core in zip(places, cores, strict=True)]
        return lines_of(tuple(map(int, np.ptp(at, axis=0) + 1)), self)

    @cached_property
    def mirrored(self) -> NamedSharding:
        """The sharding of a value that is replicated on all replicas."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def stacked(self) -> NamedSharding:
        """The sharding of an array with one row per replica."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))


@dataclass(frozen=True)
class PlannedTopology(Topology):
    """Replicas without devices, on which programs can be traced and lowered, but not run.

    Attributes:
        shape: The dimensions of the slice in chips, and the number of devices per chip.
        device: The kind of device for which Pallas lowers kernels; None for that of this process.
    """

    shape: tuple[int, ...] = ()
    device: AbstractDevice | None = None

    def _check_distinct(self) -> None:
        pass  # one device stands for all

    @classmethod
    def of(
        cls,
        num_devices: int,
        cores: int,
        shape: tuple[int, ...] = (),
        shards: int = 0,
        axes: tuple[tuple[str, int], ...] = (),
    ) -> "PlannedTopology":
        """Return a topology of ``num_devices`` in replicas of ``cores`` each."""
        devices = (jax.local_devices()[0],) * num_devices
        return cls(devices, cores, shape=shape, shards=shards, axes=axes)

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """The dimensions of the slice, if the replicas fill it; else ()."""
        return lines_of(self.shape, self)

    @cached_property
    def mesh(self) -> Any:
        """The abstract mesh: axis names and sizes without devices."""
        sizes = (self.num_replicas, *self.logical_axes.values())
        names = (REPLICA_AXIS, *self.logical_axes)
        # Auto, as in `Mesh`; from JAX 0.12 on the default for an abstract mesh is Explicit.
        types = (AxisType.Auto,) * len(names)
        return AbstractMesh(sizes, names, axis_types=types, abstract_device=self.device)


def lines_of(shape: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    """Return the sizes above 1 of a slice's dimensions, slowest first; () if not filled.

    The replicas fill the slice if each is one device and their number is the product.
    """
    lengths = tuple(n for n in (*reversed(shape[:-1]), *shape[-1:]) if n > 1)
    is_whole = topology.cores == 1 and topology.shard_count == topology.num_replicas
    is_filled = is_whole and prod(lengths) == topology.num_replicas
    return lengths if is_filled and len(lengths) > 1 else ()


def prime_factors(n: int) -> tuple[int, ...]:
    """Return the prime factors of ``n`` in ascending order."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return tuple(factors)


def checked_axes(axes: Mapping[str, int] | int) -> dict[str, int]:
    """Return the named axes of the devices of a replica; a number is one axis, ``"tensor"``.

    Raises:
        PlacementError: If it is neither a number nor a mapping of names to numbers.
    """
    if isinstance(axes, Mapping):
        named = dict(axes)
    else:
        named = {} if axes == 1 and not isinstance(axes, bool) else {"tensor": axes}
    if not all(_is_positive(n) and isinstance(name, str) for name, n in named.items()):
        raise PlacementError(
            f"devices_per_replica is {axes!r}; it must be a positive number, or names of axes with"
            " their sizes, such as {'tensor': 4, 'sequence': 2}."
        )
    return {name: int(n) for name, n in named.items()}


def named_spec(
    topology: Topology, names: Sequence[Any], shape: Sequence[int], *, what: str
) -> PartitionSpec:
    """Return the sharding of an array over named axes of the devices of a replica.

    Args:
        topology: The replicas and their devices.
        names: For each axis of the array a name, several, or None; missing ones are None.
        shape: The shape of the array.
        what: A name for the array in messages.

    Raises:
        PlacementError: If there is no such axis, or it is used twice, or does not divide the size.

    Example:
        >>> from replicax._src.topology.mesh import Topology, named_spec
        >>> eight = Topology.local(None, {"tensor": 4, "sequence": 2})
        >>> named_spec(eight, ["sequence", None, "tensor"], (2, 3, 8), what="x")
        P('l2', None, ('l0', 'l1'))
    """
    known, sizes = topology.named_axes, dict(topology.axes)
    entries = [() if n is None else (n,) if isinstance(n, str) else tuple(n) for n in names]
    used = [name for entry in entries for name in entry]
    if not known and topology.cores == 1:
        return PartitionSpec()
    missing = [name for name in used if name not in known]
    if missing or len(set(used)) < len(used):
        problem = f"there is no axis {missing[0]!r}" if missing else "an axis is used twice"
        raise PlacementError(
            f"{what} cannot be sharded over {tuple(names)}: {problem}. The devices of a replica"
            f" have the axes {sizes}; each can shard one axis of an array. They are named with"
            " `devices_per_replica={'tensor': 4, 'sequence': 2}`."
        )
    if len(entries) > len(shape):
        raise PlacementError(f"{what} has the shape {tuple(shape)}, and {len(entries)} names.")
    for size, entry in zip(shape, entries, strict=False):
        count = prod(sizes[name] for name in entry)
        if size % count:
            raise PlacementError(
                f"{what} has the shape {tuple(shape)}, of which {size} is not divisible by the"
                f" {count} devices of axis {' and '.join(entry)}. Shard another axis, or pad."
            )
    axes = [tuple(a for name in entry for a in known[name]) for entry in entries]
    return PartitionSpec(*(a if len(a) > 1 else a[0] if a else None for a in axes))


def partition_spec(
    topology: Topology,
    partition_dimensions: Sequence[Any],
    shape: Sequence[int],
    *,
    what: str,
    may_repeat: bool = False,
) -> PartitionSpec:
    """Return the sharding of an array over the logical devices of a replica.

    Args:
        topology: The replicas and their logical devices.
        partition_dimensions: The number of parts along each axis, or names of axes of the devices.
        shape: The shape of the array.
        what: A name for the array in messages.
        may_repeat: Whether fewer parts than logical devices are allowed; parts are then replicated.

    Raises:
        PlacementError: In TensorFlow's order: if there is not one number per axis; if an axis is
            not divisible by its number; if the number of parts is not that of logical devices.

    Example:
        >>> from replicax._src.topology.mesh import Topology
        >>> from replicax._src.topology.mesh import partition_spec
        >>> eight = Topology(tuple(jax.devices()), cores=8)
        >>> partition_spec(eight, [1, 2, 4, 1], (1, 8, 8, 3), what="an image")
        P(None, 'l0', ('l1', 'l2'))
    """
    is_list = hasattr(partition_dimensions, "__iter__")
    if is_list and any(n is None or isinstance(n, str | tuple) for n in partition_dimensions):
        return named_spec(topology, partition_dimensions, shape, what=what)
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
            f" {cores} logical device(s) of a replica. The strategy says how many there are:"
            " MirroredStrategy(devices_per_replica=...), or for TPUStrategy"
            " rx.tpu.experimental.DeviceAssignment.build(topology, computation_shape=...)."
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
    """Assign the logical axes to the parts of each dimension, by prime factors."""
    free = dict(topology.logical_axes)
    entries: list[str | tuple[str, ...] | None] = []
    for count in parts:
        chosen = tuple(_pop_axis(free, prime) for prime in prime_factors(count))
        entries.append(chosen if len(chosen) > 1 else chosen[0] if chosen else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _pop_axis(free: dict[str, int], size: int) -> str:
    name = next(axis for axis, s in free.items() if s == size)
    del free[name]
    return name


_Finish = Callable[[Any], Any]
# Topologies whose processes have connected: Gloo prints a greeting when they first do.
_connected: set[Topology] = set()
elastic.after.register(elastic.DEVICES, _connected.clear)


def on_all_replicas(topology: Topology, what: str) -> AbstractContextManager[_Finish]:
    """Return the context for a computation on all replicas of ``topology``.

    If other processes take part, the computation is a collective of this worker.

    Args:
        topology: The replicas.
        what: A description of the computation; the same on all workers.

    Returns:
        A context manager that yields a function. Call it with the results before the context ends,
        because a broken connection raises only when the results are waited for.
    """
    return nullcontext(_identity) if topology.is_fully_addressable else _collective(topology, what)


@contextmanager
def _collective(topology: Topology, what: str) -> Iterator[_Finish]:
    """Run a computation as a collective; on CPUs, wait for its results."""
    if topology.devices[0].platform != "cpu":
        with group.required().collective(what):
            yield _identity  # accelerators run asynchronously; do not block on them
        return
    is_first = topology not in _connected
    quiet = filter_output(1, GLOO_GREETING) if is_first else nullcontext()
    with group.required().collective(what), quiet:
        yield jax.block_until_ready
    _connected.add(topology)


def _identity(results: Any) -> Any:
    return results


class Across(Protocol):
    """The primitive collectives, on which all others are built."""

    @abstractmethod
    def index(self) -> Any:
        """Return this replica's index."""

    @abstractmethod
    def sum(self, xs: list[Any]) -> list[Any]:
        """Return the sum over all replicas of each array."""

    @abstractmethod
    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """Return all replicas' arrays, concatenated along ``axis``."""


class MeshAxis:
    """Collectives over the replica axis of the mesh, inside one compiled program."""

    def index(self) -> Any:
        """Return this replica's index, a traced value."""
        return jax.lax.axis_index(REPLICA_AXIS)

    def sum(self, xs: list[Any]) -> list[Any]:
        """All-reduce the arrays together."""
        return sum_over_mesh(xs)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """All-gather the array."""
        if x.size == 0:  # XLA does not support empty all-gathers
            rows = x.shape[axis] * jax.lax.axis_size(REPLICA_AXIS)
            return jnp.zeros((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)
        joined: jax.Array = jax.lax.all_gather(x, REPLICA_AXIS, axis=axis, tiled=True)
        return joined


MESH_AXIS = MeshAxis()


def sum_over_mesh(xs: list[Any], groups: list[list[int]] | None = None) -> list[Any]:
    """Return the sum over all replicas of each array, inside compiled code.

    Args:
        xs: Arrays, or Python numbers, which are equal on all replicas and need no communication.
        groups: Groups of replicas that sum among themselves; all replicas by default.
    """
    operands = [_hide_constant(x) for x in xs]
    sums: list[Any] = jax.lax.psum(operands, REPLICA_AXIS, axis_index_groups=groups)
    return sums


def sum_of_gathered(x: jax.Array) -> jax.Array:
    """Return the sum over all replicas of an array: all-gather, then add locally."""
    total: jax.Array = _sum_of_gathered(_hide_constant(x))
    return total


def is_gathered_faster(x: jax.Array, num_replicas: int, most_bytes: int) -> bool:
    """Whether `sum_of_gathered` is faster than an all-reduce between processes on CPUs.

    Args:
        x: The array of one replica.
        num_replicas: The number of replicas.
        most_bytes: The most that a replica may receive.
    """
    size = x.size * x.dtype.itemsize
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    pays = size >= 1024 or (num_replicas == 2 and size > 0)
    return is_float and pays and size * num_replicas <= most_bytes


def sum_between_cpus(x: jax.Array) -> jax.Array:
    """Return the sum over replicas on CPUs of several processes, inside compiled code.

    A small array takes one round trip. An all-reduce of Gloo, which is a ring, takes two.
    """
    if is_gathered_faster(x, jax.lax.axis_size(REPLICA_AXIS), GATHERED_BYTES):
        return sum_of_gathered(x)
    total: jax.Array = sum_over_mesh([x])[0]
    return total


_ALL_TO_ALL_LIMIT = 1 << 16  # bytes below which an all-to-all is faster than an all-gather
GATHERED_BYTES = 1 << 21  # the most that a replica receives, between processes on CPUs


@jax.custom_jvp
def _sum_of_gathered(x: jax.Array) -> jax.Array:
    if x.size * x.dtype.itemsize < _ALL_TO_ALL_LIMIT:
        # An all-to-all of copies sends them in parallel, while XLA's all-gather on CPUs is a ring.
        # In steps with larger gradients the all-to-all took longer.
        copies = jnp.broadcast_to(x, (jax.lax.axis_size(REPLICA_AXIS), *x.shape))
        gathered = jax.lax.all_to_all(copies, REPLICA_AXIS, 0, 0)
    else:
        gathered = jax.lax.all_gather(x, REPLICA_AXIS)
    # All replicas add in the same order, element by element, so that the sums are bit-identical.
    total: jax.Array = gathered[0]
    for i in range(1, gathered.shape[0]):
        total = total + gathered[i]
    return total


@_sum_of_gathered.defjvp
def _(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return _sum_of_gathered(*primals), jax.lax.psum(*tangents, REPLICA_AXIS)


def _hide_constant(x: Any) -> Any:
    # A captured array is a constant of this process's program, and may differ in other processes.
    # JAX would fold its psum into a multiplication by the number of replicas; the barrier hides it.
    is_constant = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return jax.lax.optimization_barrier(x) if is_constant and jax.process_count() > 1 else x
