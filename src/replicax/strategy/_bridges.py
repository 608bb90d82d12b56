"""Bridges to hand-written JAX: a strategy's mesh, and distributed values as global arrays.

Nothing is copied on the way: they are the arrays that compiled steps take and give.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import jax
from jax.sharding import Mesh

from replicax._errors import PlacementError
from replicax.context._current import entered
from replicax.topology._mesh import Topology
from replicax.values._per_replica import (
    Joined,
    PerReplica,
    is_distributed,
    stacked,
)
from replicax.values._pieces import stacked_array
from replicax.values._placement import is_traced
from replicax.variables._held import variable_of
from replicax.variables._levels import Storage, level


class Bridges:
    """The mesh, and values as arrays over it."""

    @property
    @abstractmethod
    def devices_or_default(self) -> Topology:
        """Which devices make which replicas."""

    @property
    def mesh(self) -> Mesh:
        """The devices as JAX sees them: an axis ``"replica"``, then those of logical devices.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> dict(strategy.mesh.shape)
            {'replica': 2}
        """
        return self.devices_or_default.mesh

    def array(self, value: Any) -> jax.Array:
        """A distributed value or a variable as one array over `mesh`, without a copy.

        Args:
            value: A per-replica value of equal shapes, which gives an array with a row for each
                replica, cut over the axis ``"replica"``; or what is the same on all replicas, such
                as a variable, which gives the replicated array.

        Raises:
            TypeError: If it is neither.
            ValueError: If the components differ in shape.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> ids = strategy.run(
            ...     lambda: rx.distribute.get_replica_context().replica_id_in_sync_group
            ... )
            >>> "replica" in strategy.array(ids).sharding.spec
            True
            >>> with strategy.scope():
            ...     v = rx.Variable(jnp.ones(3))
            >>> strategy.array(v).is_fully_replicated
            True
        """
        topology = self.devices_or_default
        variable = variable_of(value)
        if variable is not None:
            return _of_cell(variable.cell)
        if not is_distributed(value):
            raise TypeError(
                f"strategy.array needs a distributed value or a variable, got"
                f" {type(value).__name__}. A plain array is one already:"
                " `jax.device_put(x, NamedSharding(strategy.mesh, PartitionSpec()))` puts it on"
                " all devices."
            )
        with entered(strategy=self):
            form = value.form
            return form.array if isinstance(form, Joined) else stacked_array(value, topology)

    def per_replica(self, array: jax.Array) -> PerReplica:
        """The per-replica value whose components are the rows of an array; see `array`.

        Args:
            array: Its first axis is as long as there are replicas. If it is cut over the axis
                ``"replica"`` of `mesh`, nothing is copied.

        Raises:
            ValueError: If its first axis is not that long.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.per_replica(jnp.array([[1, 2], [3, 4]]))
            PerReplica:{
              0: Array([1, 2], dtype=int32),
              1: Array([3, 4], dtype=int32)
            }
        """
        topology = self.devices_or_default
        if not array.ndim or array.shape[0] != topology.num_replicas:
            raise PlacementError(
                f"An array of shape {array.shape} has no row for each of the"
                f" {topology.num_replicas} replicas. Its first axis must be that long; a global"
                " batch is cut with `x.reshape(strategy.num_replicas_in_sync, -1, *x.shape[1:])`."
            )
        rows = array if is_traced(array) else jax.device_put(array, topology.stacked)
        return stacked(rows, topology)


def _of_cell(cell: Any) -> jax.Array:
    where = level()
    seen: Any = where.read(cell)  # which notes that the array is in other hands now
    if isinstance(where, Storage):
        held: jax.Array = cell.array()
        return held
    return stacked_array(seen, cell.topology) if isinstance(seen, PerReplica) else seen
