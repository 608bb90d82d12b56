"""Topology: devices -> one mesh axis of replicas -> shardings."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.topology._devices import default_devices, resolve_all

REPLICA_AXIS = "replica"


@dataclass(frozen=True)
class Topology:
    """Which devices make which replicas; what every strategy is about.

    Attributes:
        devices: The devices of all replicas of all processes, replica by replica.
        cores: How many of them make one replica.

    Example:
        >>> from replicax.topology._mesh import Topology
        >>> Topology.local(["CPU:0", "CPU:1"]).num_replicas
        2
    """

    devices: tuple[jax.Device, ...]
    cores: int = 1

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

    @cached_property
    def mesh(self) -> Mesh:
        """The replicas as one mesh axis, and their logical devices as one for each prime factor."""
        factors = prime_factors(self.cores)
        grid = np.asarray(self.devices, dtype=object).reshape(self.num_replicas, *factors)
        return Mesh(grid, (REPLICA_AXIS, *(f"l{i}" for i in range(len(factors)))))

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
