"""The verbs about logical devices: how a value lies on the devices of one replica.

They are annotations: no number changes. What changes is which device holds and computes which
part, by XLA's partitioner, which also puts in the communication that this takes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax._errors import PlacementError
from replicax.topology._mesh import REPLICA_AXIS, Topology, partition_spec
from replicax.values._per_replica import DistributedValues
from replicax.values._placement import WHOLE, is_traced
from replicax.variables._held import value_of, variable_of
from replicax.variables._levels import Storage, level


class LogicalDeviceVerbs:
    """Split, replicate and assign over logical devices; for `TPUStrategy`."""

    # Whether the replicas of this kind of strategy can own several devices.
    has_logical_devices = False

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """Which devices make which replicas."""

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Cut a value into parts, one on each logical device of a replica.

        Inside a replica function or an `rx.function`, what is computed from the value is computed
        in parts too. Outside, the returned array lies in parts on the devices; a variable made
        from it keeps that layout, and a variable given here is laid out so and returned.

        Args:
            tensor: An array, or a variable.
            partition_dimensions: Into how many parts it is cut along each axis; their product is
                the number of logical devices of a replica.

        Returns:
            The same value, annotated.

        Raises:
            ValueError: If there is not one number for each axis, a size is not divisible by its
                number, or the product is not the number of logical devices; in this order.
            NotImplementedError: If this is not a `TPUStrategy`.

        Example:
            >>> topology = rx.tpu.experimental.initialize_tpu_system()
            >>> one = rx.tpu.experimental.DeviceAssignment.build(topology, [2, 2, 2])
            >>> strategy = rx.distribute.experimental.TPUStrategy(device_assignment=one)
            >>> @rx.function
            ... def step(images):
            ...     images = strategy.experimental_split_to_logical_devices(images, [1, 2, 4, 1])
            ...     return images.sum()
            >>> float(strategy.run(step, args=(jnp.ones((1, 8, 8, 3)),)))
            192.0
        """
        topology = self._logical_topology("experimental_split_to_logical_devices")
        shape = _shape(tensor)
        spec = partition_spec(topology, partition_dimensions, shape, what="the tensor")
        return annotate(tensor, spec, topology)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Have the whole of a value on every logical device of a replica.

        Args:
            tensor: An array, or a variable.

        Returns:
            The same value, annotated.

        Raises:
            NotImplementedError: If this is not a `TPUStrategy`.

        Example:
            >>> strategy = rx.distribute.TPUStrategy()
            >>> strategy.experimental_replicate_to_logical_devices(jnp.ones(2)).tolist()
            [1.0, 1.0]
        """
        topology = self._logical_topology("experimental_replicate_to_logical_devices")
        _shape(tensor)
        return annotate(tensor, WHOLE, topology)

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Have a value on one logical device of a replica.

        XLA compiles one program for all devices (SPMD), in which no device can be left out: the
        value is computed on every logical device, the wanted one among them. So this promises that
        the device has the whole value, and not that the others are spared; to spread work, split.

        Args:
            tensor: An array, or a variable.
            logical_device_id: The number of the device, counted from 0.

        Returns:
            The same value, annotated.

        Raises:
            ValueError: If a replica has no logical device of that number.
            NotImplementedError: If this is not a `TPUStrategy`.

        Example:
            >>> strategy = rx.distribute.TPUStrategy()
            >>> strategy.experimental_assign_to_logical_device(jnp.ones(2), 0).tolist()
            [1.0, 1.0]
        """
        topology = self._logical_topology("experimental_assign_to_logical_device")
        is_number = isinstance(logical_device_id, int | np.integer)
        if not is_number or not 0 <= logical_device_id < topology.cores:
            raise PlacementError(
                f"There is no logical device {logical_device_id!r}: the device assignment gives"
                f" each replica {topology.cores}, numbered from 0 to {topology.cores - 1}."
            )
        _shape(tensor)
        return annotate(tensor, WHOLE, topology)

    def _logical_topology(self, verb: str) -> Topology:
        if not self.has_logical_devices or self.topology is None:
            raise NotImplementedError(
                f"`{verb}` is a verb of rx.distribute.TPUStrategy, and this is {self}, whose"
                " replicas have one device each. TPUStrategy runs without TPUs too: it simulates a"
                " slice on virtual CPU devices (REPLICAX_CPU_DEVICES=8)."
            )
        return self.topology


def annotate(tensor: Any, spec: PartitionSpec, topology: Topology) -> Any:
    """``tensor``, laid out over the logical devices of each replica as ``spec`` says."""
    where = level()
    if isinstance(where, Storage) and not is_traced(tensor):
        return _placed(tensor, spec, topology)
    value = jnp.asarray(value_of(tensor))
    if topology.cores == 1:
        return value
    where.uses(topology, "an annotation for logical devices")
    # Inside the replicas' program its mesh is the one in force, and may be named by axes alone.
    inside = REPLICA_AXIS in jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.with_sharding_constraint(value, spec if inside else topology.sharding(spec))


def _placed(tensor: Any, spec: PartitionSpec, topology: Topology) -> Any:
    variable = variable_of(tensor)
    if variable is not None:
        if variable.topology != topology or variable.cell.per_replica:
            raise PlacementError(
                f"Variable {variable.name!r} has no layout over the logical devices of this"
                " strategy: it was made outside of its scope, or is synchronized ON_READ."
            )
        variable.cell.lay_out(spec)
        return tensor
    if topology.cores == 1:
        return jnp.asarray(tensor)
    return jax.device_put(tensor, topology.sharding(spec))


def _shape(tensor: Any) -> tuple[int, ...]:
    if isinstance(tensor, DistributedValues):
        raise PlacementError(
            "A per-replica value has a part on each replica already. Annotate each replica's part,"
            " inside the function that `strategy.run` calls."
        )
    variable = variable_of(tensor)
    return tuple(np.shape(tensor)) if variable is None else variable.shape
