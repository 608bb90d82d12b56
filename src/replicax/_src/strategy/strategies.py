"""The strategies of one process: Strategy, MirroredStrategy, OneDeviceStrategy and the default."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final, overload

import jax

from replicax._src.base.errors import requires
from replicax._src.base.lazy import LazyModule, LeavesOut
from replicax._src.base.types import AnyReduceOp, VariablePolicy
from replicax._src.cluster.detection import others
from replicax._src.collectives.cross_device_ops import CrossDeviceOps
from replicax._src.strategy.base import StrategyBase
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import AnyArray
from replicax._src.values.reduce import Axis
from replicax._src.values.sharded import check_nothing_packs, check_shards
from replicax._src.workers.group import current

if TYPE_CHECKING:
    from replicax._src.data.dataset import Dataset
    from replicax._src.input import distribute
else:
    distribute = LazyModule("replicax._src.input.distribute")


_log = logging.getLogger("replicax")

_T = TypeVar("_T")
_Two = tuple[_T, _T]
_Three = tuple[_T, _T, _T]


class Strategy(StrategyBase, LeavesOut):
    """A way to distribute computation over devices and machines.

    Use one of its subclasses: `MirroredStrategy`, `OneDeviceStrategy`, ... Derive from it to write
    a strategy of your own: its devices are all that it has to choose.

    Args:
        topology: The devices of each replica, as an `rx.extend.Topology`.
        cross_device_ops: How to combine values; `NcclAllReduce` by default.
        variable_policy: ``"mirrored"`` or ``"sharded"``, see `MirroredStrategy`.

    Example:
        >>> class EveryOtherDevice(rx.distribute.Strategy):
        ...     def __init__(self):
        ...         super().__init__(rx.extend.Topology(tuple(jax.devices()[::2])))
        >>> EveryOtherDevice().num_replicas_in_sync
        4
        >>> isinstance(rx.distribute.get_strategy(), rx.distribute.Strategy)
        True
    """

    left_out: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("experimental_run", "group", "make_dataset_iterator", "make_input_fn_iterator"),
            "It is a verb of TensorFlow 1: use `strategy.run` and"
            " `strategy.experimental_distribute_dataset`, or a strategy of"
            " `rx.compat.v1.distribute`.",
        ),
        "colocate_vars_with": "Use `strategy.extended.colocate_vars_with(variable)`.",
        "distribute_dataset": "Write `experimental_distribute_dataset`.",
        "experimental_run_v2": "Write `run`, which is its name since TensorFlow 2.2.",
        "num_replicas": "Write `num_replicas_in_sync`.",
        "configure": "Pass the cluster to the strategy: `cluster_resolver=...`.",
        "unwrap": "Use `strategy.experimental_local_results(value)`.",
    }

    @overload
    def reduce(self, reduce_op: AnyReduceOp, value: AnyArray, axis: Axis) -> jax.Array: ...

    @overload
    def reduce(
        self, reduce_op: AnyReduceOp, value: _Two[AnyArray], axis: Axis
    ) -> _Two[jax.Array]: ...

    @overload
    def reduce(
        self, reduce_op: AnyReduceOp, value: _Three[AnyArray], axis: Axis
    ) -> _Three[jax.Array]: ...

    @overload
    def reduce(
        self, reduce_op: AnyReduceOp, value: Mapping[str, AnyArray], axis: Axis
    ) -> dict[str, jax.Array]: ...

    @overload
    def reduce(self, reduce_op: AnyReduceOp, value: Any, axis: Axis) -> Any: ...

    @requires("axis", 3, "axis=None reduces over the replicas; axis=0 over all rows too.")
    def reduce(self, reduce_op: AnyReduceOp, value: Any, axis: Axis) -> Any:
        """Reduce a per-replica value to one value.

        Args:
            reduce_op: SUM or MEAN, as an enum member or a string.
            value: A result of `run`.
            axis: Also reduce over this axis of each replica's value; None for no axis. A mean
                over an axis divides by the total number of entries of all replicas.

        Returns:
            One value of the same structure, on the current device.

        Raises:
            RuntimeError: Inside a replica function.
            ValueError: If the op or the axis does not exist, or shapes differ without an axis.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> per_replica = rx.distribute.PerReplica([jnp.arange(4.0), jnp.arange(4.0, 6.0)])
            >>> float(strategy.reduce("MEAN", per_replica, axis=0))
            2.5
        """
        return self.reduce_value(reduce_op, value, axis)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Dataset:
        """Return a dataset of the slices of arrays.

        Args:
            numpy_input: An array, or a structure of arrays; a list of arrays is stacked into one.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> len(strategy.experimental_make_numpy_dataset(np.ones(10)))
            10
        """
        return distribute.numpy_dataset(numpy_input)


# A list or tuple: one text is no sequence of names.
Devices = list[str] | list[jax.Device] | tuple[str | jax.Device, ...]


@final
class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each variable has a copy on every device, and the copies are kept equal; or, sharded, each
    device holds a shard of it.

    Args:
        devices: Their names, such as ``["GPU:0", "GPU:1"]``; all GPUs by default, else all CPU
            devices. To try several without hardware, set the environment variable
            ``REPLICAX_CPU_DEVICES=4``.
        cross_device_ops: How to combine values; `NcclAllReduce` by default.
        variable_policy: ``"mirrored"``, or ``"sharded"``: every variable of more than 16 KiB, of
            the model and of its optimizer, is sharded evenly over the devices. Reading it is an
            all-gather; gradients are reduce-scattered. Programs and their results do not change,
            while the memory of the state is divided by the number of devices.
        reduce_dtype: The type in which gradients of sharded variables are summed, such as
            ``"bfloat16"``, which halves the bytes sent; by default the type that they have. Each
            replica's gradient is rounded to it before the sum. Only compiled steps do that:
            eager replicas raise an error, and a batch of which replicas have different numbers
            of rows is summed without rounding.
        devices_per_replica: How many consecutive devices form a replica: a number, or the names
            and sizes of their axes, such as ``{"tensor": 4, "sequence": 2}``. A replica's arrays
            are sharded over them by an `rx.tpu.LayoutMap` and `constrain`.
        shards: Over how many consecutive replicas variables are sharded; all by default. With
            fewer, each group of that many replicas holds all variables.

    Raises:
        ValueError: If a device does not exist, is named twice, or is of another platform; if there
            is no such policy, or no such type; or if numbers do not divide those of the devices.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas_in_sync
        2
        >>> sharded = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy="sharded")
        >>> with sharded.scope():
        ...     v = rx.Variable(jnp.zeros((256, 256)))
        >>> [part.data.shape for part in sharded.array(v).addressable_shards]
        [(128, 256), (128, 256)]
        >>> pairs = rx.distribute.MirroredStrategy(devices_per_replica={"tensor": 2})
        >>> pairs
        <MirroredStrategy of 4 replicas of 2 logical devices>
    """

    def __init__(  # noqa: PLR0913
        self,
        devices: Devices | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        variable_policy: VariablePolicy = "mirrored",
        *,
        reduce_dtype: Any = None,
        devices_per_replica: int | Mapping[str, int] = 1,
        shards: int | None = None,
    ) -> None:
        warn_of_others("MirroredStrategy")
        check_shards(shards, variable_policy)
        check_nothing_packs(reduce_dtype, cross_device_ops=cross_device_ops)
        topology = Topology.local(devices, devices_per_replica, shards or 0)
        super().__init__(topology, cross_device_ops, variable_policy, reduce_dtype)


@cache
def warn_of_others(name: str) -> None:
    """Warn once if the environment shows other workers, which strategy ``name`` does not use."""
    if current() is None and (found := others()):
        _log.warning(
            "%s trains on the devices of this process only: every process that makes one trains a"
            " separate model. For one model on all of them use MultiWorkerMirroredStrategy. %s",
            name,
            found,
        )


@final
class OneDeviceStrategy(Strategy):
    """All variables and all computation on one device; useful to test a program.

    Args:
        device: Its name, such as ``"GPU:0"``.

    Example:
        >>> strategy = rx.distribute.OneDeviceStrategy("CPU:0")
        >>> float(strategy.run(lambda x: x * 2, args=(jnp.float32(3),)))
        6.0
    """

    @requires("device", 1, 'for example `OneDeviceStrategy("CPU:0")`, or "GPU:0".')
    def __init__(self, device: str | jax.Device) -> None:
        warn_of_others("OneDeviceStrategy")
        super().__init__(Topology.local([device]))

    @property
    def wraps_single(self) -> bool:
        """False: the values of its only replica are plain."""
        return False

    def _configured(self, config_proto: Any) -> Any:
        return copy.deepcopy(config_proto)


@final
class DefaultStrategy(Strategy):
    """One replica, wherever JAX computes; `get_strategy` returns it outside of any scope."""

    def __init__(self) -> None:
        super().__init__(None)

    def _configured(self, config_proto: Any) -> Any:
        return copy.deepcopy(config_proto)

    def __repr__(self) -> str:
        return "<the default strategy>"
