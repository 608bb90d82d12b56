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

    Example:
        >>> from replicax.topology._mesh import Topology
        >>> Topology.local(["CPU:0", "CPU:1"]).num_replicas
        2
    """

    devices: tuple[jax.Device, ...]

    @classmethod
    def local(cls, devices: Sequence[str | jax.Device] | None = None) -> "Topology":
        """One replica for each of ``devices``; all accelerators, else all CPUs, by default."""
        return cls(resolve_all(devices) if devices else default_devices())

    @property
    def num_replicas(self) -> int:
        """How many copies of the computation run side by side."""
        return len(self.devices)

    @cached_property
    def mesh(self) -> Mesh:
        """The devices as one mesh axis."""
        return Mesh(np.asarray(self.devices, dtype=object), (REPLICA_AXIS,))

    @cached_property
    def mirrored(self) -> NamedSharding:
        """The same value on every replica."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def stacked(self) -> NamedSharding:
        """One row for each replica."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))
