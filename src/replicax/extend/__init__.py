"""Protocols for packages that build on replicax; ``docs/extend.md`` explains each with an example.

Example:
    >>> class FirstTwo(rx.distribute.Strategy):
    ...     def __init__(self):
    ...         super().__init__(rx.extend.Topology.local(["CPU:0", "CPU:1"]))
    >>> FirstTwo().num_replicas_in_sync
    2
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.collectives.cross_device_ops import CollectiveOps
from replicax._src.integrations.registry import Integration, register_integration
from replicax._src.topology.mesh import REPLICA_AXIS, Topology

if TYPE_CHECKING:
    from replicax._src.input.sources import InputSource
    from replicax._src.train.object_graph import Checkpointable

__all__ = [
    "REPLICA_AXIS",
    "Checkpointable",
    "CollectiveOps",
    "InputSource",
    "Integration",
    "Topology",
    "register_integration",
]

__dir__ = __all__.copy

_HOMES = {
    "Checkpointable": "replicax._src.train.object_graph",
    "InputSource": "replicax._src.input.sources",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES)
