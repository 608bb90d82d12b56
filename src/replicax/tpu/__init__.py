"""TPU slices: memory and compile checks ahead of time, layouts, and ``experimental`` names.

Example:
    >>> rx.tpu.experimental.Topology(
    ...     mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]
    ... ).num_tpus_per_task
    2
"""

from replicax._src.collectives.options import XLAOptions
from replicax._src.preflight.preflight import preflight, preflight_sweep
from replicax._src.preflight.report import PreflightReport, Sweep
from replicax._src.state.declaration import LayoutMap, planning
from replicax.tpu import experimental

__all__ = [
    "LayoutMap",
    "PreflightReport",
    "Sweep",
    "XLAOptions",
    "experimental",
    "planning",
    "preflight",
    "preflight_sweep",
]

__dir__ = __all__.copy
