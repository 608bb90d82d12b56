"""The TPU slice of this program, real or simulated: its devices and their mesh coordinates."""

import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from replicax._src.base.errors import PlacementError
from replicax._src.cluster.detection import resolve_cluster
from replicax._src.topology.device_assignment import DeviceAssignment
from replicax._src.topology.devices import simulate_tpus
from replicax._src.topology.mesh import Topology
from replicax._src.topology.tpu_generations import SliceShape
from replicax._src.topology.tpu_topology import TPUTopology
from replicax._src.topology.virtual_devices import TPU_VARIABLE
from replicax._src.topology.worker_devices import join_workers

_log = logging.getLogger("replicax")


@dataclass(frozen=True)
class Slice:
    """The devices of one TPU system.

    Attributes:
        topology: Their coordinates, and the process of each.
        devices: The devices, ordered by process.
        is_simulated: Whether they are CPU devices in place of TPUs.
    """

    topology: TPUTopology
    devices: tuple[jax.Device, ...]
    is_simulated: bool

    @classmethod
    def find(cls) -> "Slice":
        """Return the TPUs that JAX has; else a simulation on virtual CPU devices."""
        if tpus := _tpus():
            return cls(_real_topology(tpus), tpus, is_simulated=False)
        return _simulated()

    def laid_out(self, assignment: DeviceAssignment | None) -> Topology:
        """Return the replicas of an assignment; by default one replica per device.

        Raises:
            PlacementError: If the assignment was made for another slice.
        """
        kind = "TPU" if self.is_simulated else ""
        if assignment is None:
            return Topology(self.devices, kind=kind)
        if not isinstance(assignment, DeviceAssignment):
            raise PlacementError(
                f"device_assignment is a {type(assignment).__name__}; it must be what"
                " rx.tpu.experimental.DeviceAssignment.build(topology, ...) returns."
            )
        other = assignment.topology
        if not (
            np.array_equal(other.mesh_shape, self.topology.mesh_shape)
            and np.array_equal(other.device_coordinates, self.topology.device_coordinates)
        ):
            raise PlacementError(
                f"The device assignment is made for {other}, and this program runs on"
                f" {self.topology}. Build it from what"
                " rx.tpu.experimental.initialize_tpu_system(resolver) returned."
            )
        at = dict(zip(_core_coordinates(self.topology), self.devices, strict=True))
        cores = assignment.core_assignment.reshape(-1, 4).tolist()
        devices = tuple(at[tuple(core)] for core in cores)
        return Topology(devices, assignment.num_cores_per_replica, kind, assignment)


def current_slice() -> Slice:
    """Return the slice that `start_slice` found last; call it if it has not been called."""
    return _started[0] if _started else start_slice()


def start_slice() -> Slice:
    """Join the other hosts of the slice, find the TPUs, and log if they are simulated.

    Raises:
        ClusterError: If not all hosts of the slice join.
    """
    join_workers(resolve_cluster())
    found = Slice.find()
    if found.is_simulated:
        here = [d for d in found.devices if d.process_index == jax.process_index()]
        simulate_tpus(here)
        _log.info(
            "No TPU here: a slice of %d TPU devices, mesh %s, is simulated on virtual CPU devices.",
            len(found.devices),
            "x".join(map(str, found.topology.mesh_shape)),
        )
    _started[:] = [found]
    return found


def forget_slice() -> None:
    """Forget the slice that `start_slice` found, and end its simulation."""
    _started.clear()
    simulate_tpus(())


_started: list[Slice] = []


def _tpus() -> tuple[jax.Device, ...]:
    jax.local_devices()  # raises the actual reason if a backend fails to initialize
    try:
        return _by_process(jax.devices("tpu"))
    except RuntimeError:  # JAX has no TPU backend
        return ()


def _by_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    return tuple(sorted(devices, key=lambda d: (d.process_index, d.id)))


def _real_topology(tpus: Sequence[jax.Device]) -> TPUTopology:
    """Return the topology of TPUs, with coordinates from 0."""
    places = np.array([[*d.coords, d.core_on_chip] for d in tpus], dtype=np.int32)
    places -= places.min(axis=0)  # the coordinates of a part of a pod do not start at 0
    shape = (places.max(axis=0) + 1).tolist()
    tasks = len({d.process_index for d in tpus})
    return TPUTopology(mesh_shape=shape, device_coordinates=places.reshape(tasks, -1, 4))


def _simulated() -> Slice:
    """Return a slice of virtual CPU devices."""
    cpus = _by_process(jax.devices("cpu"))
    name = os.environ.get(TPU_VARIABLE, "").strip()
    shape = SliceShape.parse(name).mesh_shape if name else _default_mesh(len(cpus))
    needed = int(np.prod(shape))
    if needed > len(cpus):
        raise PlacementError(
            f"{TPU_VARIABLE}={name} has {needed} devices, and JAX has started with {len(cpus)}"
            f" virtual CPU device(s). Set {TPU_VARIABLE} before `import replicax` and leave out"
            f" REPLICAX_CPU_DEVICES, or set that to {needed}."
        )
    chosen = cpus[:needed]
    tasks = len({d.process_index for d in chosen})
    places = np.array(_coordinates_in_id_order(shape), dtype=np.int32).reshape(tasks, -1, 4)
    topology = TPUTopology(mesh_shape=shape, device_coordinates=places)
    return Slice(topology, chosen, is_simulated=True)


def _default_mesh(devices: int) -> tuple[int, int, int, int]:
    """Return a mesh with two cores per chip if possible, and chips in a nearly square plane."""
    on_chip = 2 if devices % 2 == 0 else 1
    chips = devices // on_chip
    y = max(n for n in range(1, int(chips**0.5) + 1) if chips % n == 0)
    return chips // y, y, 1, on_chip


def _coordinates_in_id_order(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all coordinates of a mesh in the order of TPU ids: core fastest, then x, y, z."""
    x, y, z, on_chip = shape
    order = itertools.product(range(z), range(y), range(x), range(on_chip))
    return [(i, j, k, core) for k, j, i, core in order]


def _core_coordinates(topology: TPUTopology) -> list[tuple[int, ...]]:
    return [tuple(core) for core in topology.device_coordinates.reshape(-1, 4).tolist()]
