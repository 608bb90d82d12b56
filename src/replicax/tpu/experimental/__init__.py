"""Topologies of TPU slices, and the placement of replicas on them.

Example:
    >>> topology = rx.tpu.experimental.Topology(
    ...     mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]
    ... )
    >>> rx.tpu.experimental.DeviceAssignment.build(topology, num_replicas=2).num_replicas
    2
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.topology.device_assignment import DeviceAssignment, DeviceOrderMode
from replicax._src.topology.tpu_system import (
    HardwareFeature,
    TPUSystemMetadata,
    initialize_tpu_system,
    shutdown_tpu_system,
)
from replicax._src.topology.tpu_topology import TPUTopology as Topology

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "HardwareFeature",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

__dir__ = __all__.copy

_ABSENT = {
    "embedding": (
        "Tables live in the memory of the devices: write an `rx.Variable` and `table[ids]`, cut"
        " over logical devices with `rx.tpu.LayoutMap`, and an optimizer of Optax or Keras."
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
