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

    Each variable has a copy on every device, and the copies are kept equal; or, sharded, each
    device holds a part of it.

    Args:
        devices: Their names, such as ``["GPU:0", "GPU:1"]``; all GPUs by default, else all CPU
            devices. To try several without hardware, set the environment variable
            ``REPLICAX_CPU_DEVICES=4``.
        cross_device_ops: How to combine values; `NcclAllReduce` by default.
        variable_policy: ``"mirrored"``, or ``"sharded"``: every variable of more than 16 KiB, of
            the model and of its optimizer, lies in equal parts on the devices. Reading it gathers
            the parts; a gradient is added up so that each device gets its part. Programs stay as
            they are, and so do their numbers, while the memory of the state is divided by the
            number of devices.

    Raises:
        ValueError: If a device does not exist, is named twice, or is of another kind; or if there
            is no such policy.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas_in_sync
        2
        >>> sharded = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy="sharded")
        >>> with sharded.scope():
        ...     v = rx.Variable(jnp.zeros((256, 256)))
        >>> [part.data.shape for part in v.cell.array().addressable_shards]
        [(128, 256), (128, 256)]
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        variable_policy: str = "mirrored",
    ) -> None:
        super().__init__(Topology.local(devices), cross_device_ops, variable_policy)
