"""Topologies of TPU slices, and how replicas are laid out on them.

Example:
    >>> topology = rx.tpu.experimental.Topology(
    ...     mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]
    ... )
    >>> rx.tpu.experimental.DeviceAssignment.build(topology, num_replicas=2).num_replicas
    2
"""

from replicax.topology._device_assignment import DeviceAssignment, DeviceOrderMode
from replicax.topology._system import initialize_tpu_system, shutdown_tpu_system
from replicax.topology._tpu_topology import Topology

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

__dir__ = __all__.copy
