"""The v1 form of TPUStrategy."""

from typing import Any, final

from replicax._enums import ReduceOp
from replicax.compat.v1._strategies import Strategy
from replicax.strategy._tpu import OnSlice
from replicax.topology._device_assignment import DeviceAssignment
from replicax.topology._system import TPUClusterResolver
from replicax.values._reduce import Axis


@final
class TPUStrategy(OnSlice, Strategy):
    """Synchronous training on a TPU slice; see `rx.distribute.TPUStrategy`.

    Args:
        tpu_cluster_resolver: The TPU; that of this machine by default.
        steps_per_run: Accepted for TensorFlow's sake; `rx.scan` takes several steps in one call.
        device_assignment: Which cores form which replica; one replica on each core by default.

    Example:
        >>> rx.compat.v1.distribute.experimental.TPUStrategy().num_replicas_in_sync
        8
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        steps_per_run: int | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        self.steps_per_run = steps_per_run or 1
        super().__init__(tpu_cluster_resolver, device_assignment)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis = None) -> Any:
        """Combine a per-replica value into one, in the memory of the host."""
        return OnSlice.reduce(self, reduce_op, value, axis)
