"""Strategy methods about devices.

- `DescriptionMethods`: a description of a strategy for people.
- `MeshMethods`: the mesh of a strategy, and distributed values as global arrays, for use in plain
  JAX code. Nothing is copied: these are the arrays that compiled steps take and return.
- `LogicalDeviceMethods`: the sharding of a value over the devices of one replica. The methods are
  annotations that change no result; XLA's partitioner decides which device holds and computes which
  shard, and inserts the communication.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from replicax._src.base.errors import PlacementError
from replicax._src.base.rendering import Sheet
from replicax._src.collectives.cross_device_ops import CrossDeviceOps
from replicax._src.context.current import entered
from replicax._src.state.levels import Storage, level
from replicax._src.state.variables import value_of, variable_of
from replicax._src.topology.devices import shown_devices
from replicax._src.topology.mesh import REPLICA_AXIS, Topology, named_spec, partition_spec
from replicax._src.values.per_replica import (
    Distributed,
    Joined,
    PerReplica,
    is_distributed,
    stacked,
)
from replicax._src.values.placement import WHOLE, is_traced, private
from replicax._src.values.replica_functions import stacked_array


class DescriptionMethods:
    """Methods that describe a strategy."""

    variable_policy: str

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """The topology: which devices form which replica; None for the default strategy."""

    @property
    @abstractmethod
    def devices_or_default(self) -> Topology:
        """The topology; for the default strategy, JAX's default device."""

    @property
    @abstractmethod
    def cross_device_ops(self) -> CrossDeviceOps:
        """The algorithm that combines values of several replicas."""

    def describe(self) -> Sheet:
        """Describe devices, replicas, workers, mesh and policies.

        The result prints as text; `rich.print` shows it in colour, a notebook as a table.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> strategy.describe()
            MirroredStrategy
              replicas       2 in sync
              devices        2 x cpu
              workers        this process
              mesh           replica=2
              variables      mirrored: a copy on each replica, kept equal
              cross-replica  NcclAllReduce
             replica  devices
             0        CPU:0
             1        CPU:1
        """
        topology = self.devices_or_default
        kinds = [device.device_kind for device in topology.devices]
        cores = topology.cores
        of = f", of {cores} logical devices each" if cores > 1 else ""
        facts = (
            ("replicas", f"{topology.num_replicas} in sync{of}"),
            ("devices", ", ".join(f"{kinds.count(k)} x {k}" for k in dict.fromkeys(kinds))),
            ("workers", _workers(topology)),
            ("mesh", ", ".join(f"{name}={size}" for name, size in topology.mesh.shape.items())),
            ("variables", self._variables()),
            ("cross-replica", type(self.cross_device_ops).__name__),
        )
        rows = tuple(
            (str(i), shown_devices(topology.devices_of(i), most=8, kind=topology.kind))
            for i in range(topology.num_replicas)
        )
        return Sheet(self._kind(), facts, ("replica", "devices"), rows)

    def _variables(self) -> str:
        if self.topology is None:
            return "plain: no strategy is in use"
        if self.variable_policy == "sharded":
            shards = self.topology.shard_count
            several = shards < self.topology.num_replicas
            where = f"each group of {shards} replicas" if several else "the replicas"
            return f"sharded: those above 16 KiB lie in equal parts on {where}"
        return "mirrored: a copy on each replica, kept equal"

    def _repr_html_(self) -> str:
        return self.describe().to_html()

    def _kind(self) -> str:
        return type(self).__name__.removeprefix("Experimental")

    def __repr__(self) -> str:
        topology = self.topology
        count, cores = (topology.num_replicas, topology.cores) if topology else (1, 1)
        of = f" of {cores} logical devices" if cores > 1 else ""
        return f"<{self._kind()} of {count} replica{'s' if count > 1 else ''}{of}>"


def _workers(topology: Topology) -> str:
    processes = sorted({device.process_index for device in topology.devices})
    if len(processes) == 1:
        return "this process"
    own = ", ".join(map(str, topology.local_replicas))
    return f"{len(processes)}; this is worker {_own_process(topology)}, with replicas {own}"


def _own_process(topology: Topology) -> int:
    return int(topology.primary_devices[0].process_index) if topology.primary_devices else -1


class MeshMethods:
    """The mesh of a strategy, and distributed values as arrays over it."""

    @property
    @abstractmethod
    def devices_or_default(self) -> Topology:
        """The topology: which devices form which replica."""

    @property
    def mesh(self) -> Mesh:
        """The devices as a JAX mesh: an axis ``"replica"``, then the axes of logical devices.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> dict(strategy.mesh.shape)
            {'replica': 2}
        """
        return self.devices_or_default.mesh

    def array(self, value: Any) -> jax.Array:
        """Return a distributed value or a variable as one array over `mesh`, without a copy.

        Args:
            value: A per-replica value of equal shapes, which gives an array with a row for each
                replica, sharded over the axis ``"replica"``; or a value that is equal on all
                replicas, such as a variable, which gives the replicated array.

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
        """Return the per-replica value whose components are the rows of an array; see `array`.

        Args:
            array: An array whose first axis has one entry per replica. If it is sharded over the
                axis ``"replica"`` of `mesh`, nothing is copied.

        Raises:
            ValueError: If its first axis has another size.

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
        rows = array if is_traced(array) else jax.device_put(private(array), topology.stacked)
        return stacked(rows, topology)


def _of_cell(cell: Any) -> jax.Array:
    where = level()
    seen: Any = where.read(cell)  # also marks the array as shared, so it is not donated
    if isinstance(where, Storage):
        array: jax.Array = cell.array()
        return array
    return stacked_array(seen, cell.topology) if isinstance(seen, PerReplica) else seen


class LogicalDeviceMethods:
    """Split, replicate and assign values over the logical devices of replicas."""

    # Whether replicas of this strategy can have several devices.
    has_logical_devices = False

    @property
    @abstractmethod
    def topology(self) -> Topology | None:
        """The topology: which devices form which replica."""

    def constrain(self, x: Any, *names: str | Sequence[str] | None) -> Any:
        """Shard a value over named axes of the devices of a replica.

        An annotation, which changes no result: XLA's partitioner shards the computations on the
        value too. Use it on activations, in the functions of a model.
        If replicas have one device, it does nothing, so that the model runs anywhere.

        Args:
            x: An array, or a variable, which is resharded.
            *names: For each axis of `x` the name of an axis of ``devices_per_replica``, several
                names, or None; those left out are None.

        Returns:
            The same value, annotated.

        Raises:
            ValueError: If there is no such axis, or it does not divide the size.

        Example:
            >>> axes = {"tensor": 2, "sequence": 2}
            >>> strategy = rx.distribute.MirroredStrategy(devices_per_replica=axes)
            >>> @rx.function
            ... def attend(x):
            ...     return strategy.constrain(x, None, "sequence", "tensor").sum()
            >>> total = strategy.run(attend, (jnp.ones((1, 4, 8)),))
            >>> float(strategy.reduce("MEAN", total, axis=None))
            32.0
        """
        topology = self.topology
        if topology is None or topology.cores == 1:
            return x
        spec = named_spec(topology, names, _shape(x), what="the value")
        return annotate(x, spec, topology)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Shard a value over the logical devices of a replica.

        Inside a replica function or an `rx.function`, computations on the value are sharded too.
        Outside, the returned array is sharded over the devices; a variable created from it keeps
        that layout, and a variable passed here is resharded and returned.

        Args:
            tensor: An array, or a variable.
            partition_dimensions: The number of shards along each axis; their product is the number
                of logical devices of a replica.

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
        """Replicate a value over the logical devices of a replica.

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
        """Place a value on one logical device of a replica.

        XLA compiles one program for all devices (SPMD), which cannot leave out a device: the value
        is computed on every logical device, including the requested one. So this guarantees that
        the device has the whole value, not that the others do no work; to distribute work, split.

        Args:
            tensor: An array, or a variable.
            logical_device_id: The number of the device, from 0.

        Returns:
            The same value, annotated.

        Raises:
            ValueError: If a replica has no logical device with that number.
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
                f"`{verb}` is for replicas of several devices, as of rx.distribute.TPUStrategy, and"
                f" this is {self}, whose replicas have one device each. Make it with"
                " `devices_per_replica=...`. TPUStrategy runs without TPUs too: it simulates a"
                " slice on virtual CPU devices (REPLICAX_CPU_DEVICES=8)."
            )
        return self.topology


def annotate(tensor: Any, spec: PartitionSpec, topology: Topology) -> Any:
    """Return `tensor` with the sharding `spec` over the logical devices of each replica."""
    where = level()
    if isinstance(where, Storage) and not is_traced(tensor):
        return _placed(tensor, spec, topology)
    value = jnp.asarray(value_of(tensor))
    if topology.cores == 1:
        return value
    where.uses(topology, "an annotation for logical devices")
    # Inside the replicas' program its mesh is already active, and a spec alone must be used.
    inside = REPLICA_AXIS in jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.with_sharding_constraint(value, spec if inside else topology.sharding(spec))


def _placed(tensor: Any, spec: PartitionSpec, topology: Topology) -> Any:
    """Reshard a variable or an array outside of a trace."""
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
        return jnp.asarray(private(tensor))
    return jax.device_put(private(tensor), topology.sharding(spec))


def _shape(tensor: Any) -> tuple[int, ...]:
    if isinstance(tensor, Distributed):
        raise PlacementError(
            "A per-replica value has a part on each replica already. Annotate each replica's part,"
            " inside the function that `strategy.run` calls."
        )
    variable = variable_of(tensor)
    return tuple(np.shape(tensor)) if variable is None else variable.shape
