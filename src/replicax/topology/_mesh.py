"""Topology: devices -> a mesh of replicas and their logical devices -> shardings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.topology._devices import default_devices, device_name_as, resolve_all

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
    def mirrored(self) -> NamedSharding:
        """The same value on every replica."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def stacked(self) -> NamedSharding:
        """One row for each replica."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))


def prime_factors(n: int) -> tuple[int, ...]:
    """The prime factors of ``n``, smallest first."""
    factors, p = [], 2
    while n > 1:
        while n % p == 0:
            factors.append(p)
            n //= p
        p += 1
    return tuple(factors)
