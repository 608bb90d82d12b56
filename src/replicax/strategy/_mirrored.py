"""MirroredStrategy: one replica for each device of this process."""

from collections.abc import Sequence
from typing import final

import jax

from replicax.collectives._cross_device_ops import CrossDeviceOps
from replicax.strategy._v2 import Strategy
from replicax.topology._mesh import Topology


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each variable has a copy on every device, and the copies are kept equal.

    Args:
        devices: Their names, such as ``["GPU:0", "GPU:1"]``; all GPUs by default, else all CPU
            devices. To try several without hardware, set the environment variable
            ``REPLICAX_CPU_DEVICES=4``.
        cross_device_ops: How to combine values; `NcclAllReduce` by default.

    Raises:
        ValueError: If a device does not exist, is named twice, or is of another kind.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas_in_sync
        2
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        super().__init__(Topology.local(devices), cross_device_ops)
