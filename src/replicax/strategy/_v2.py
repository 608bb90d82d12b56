"""Strategy: the current form of the verbs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import jax

from replicax._enums import ReduceOp
from replicax._lazy import LazyModule, LeavesOut
from replicax.strategy._base import StrategyBase
from replicax.values._per_replica import AnyArray
from replicax.values._reduce import Axis

if TYPE_CHECKING:
    from replicax.data._dataset import Dataset
    from replicax.input import _distribute
else:
    _distribute = LazyModule("replicax.input._distribute")


_T = TypeVar("_T")
_Op = ReduceOp | str
_Two = tuple[_T, _T]
_Three = tuple[_T, _T, _T]


class Strategy(StrategyBase, LeavesOut):
    """A way to spread computation over devices and machines.

    Use one of its kinds: `MirroredStrategy`, `OneDeviceStrategy`, ...

    Example:
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
        "configure": "Pass the cluster to the strategy: `cluster_resolver=...`.",
        "unwrap": "Use `strategy.experimental_local_results(value)`.",
    }

    @overload
    def reduce(self, reduce_op: _Op, value: AnyArray, axis: Axis) -> jax.Array: ...

    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: _Two[AnyArray], axis: Axis
    ) -> _Two[jax.Array]: ...

    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: _Three[AnyArray], axis: Axis
    ) -> _Three[jax.Array]: ...

    @overload
    def reduce(
        self, reduce_op: ReduceOp | str, value: Mapping[str, AnyArray], axis: Axis
    ) -> dict[str, jax.Array]: ...

    @overload
    def reduce(self, reduce_op: _Op, value: Any, axis: Axis) -> Any: ...

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Axis) -> Any:
        """Combine a per-replica value into one.

        Args:
            reduce_op: SUM or MEAN, as the enumeration or as text.
            value: What `run` returned.
            axis: Also reduce over this axis of each replica's value; None for no axis. A mean
                over an axis divides by the true number of entries of all replicas.

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
        """A dataset of the slices of arrays.

        Args:
            numpy_input: An array, or a structure of arrays; a list of arrays is stacked into one.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> len(strategy.experimental_make_numpy_dataset(np.ones(10)))
            10
        """
        return _distribute.numpy_dataset(numpy_input)
