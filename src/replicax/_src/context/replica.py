"""`ReplicaContext`: the interface of a replica function to its replica and the other replicas."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import ScopeError, warn_user
from replicax._src.base.managers import contextmanager
from replicax._src.base.types import AnyReduceOp, ReduceOp
from replicax._src.collectives.consistency import identify
from replicax._src.collectives.options import CommunicationOptions
from replicax._src.compat.jax import unrecorded
from replicax._src.context.current import (
    AmbientStrategy,
    current,
    entered,
    get_replica_context,
)
from replicax._src.topology.devices import device_name
from replicax._src.topology.mesh import Across
from replicax._src.values.per_replica import is_opaque
from replicax._src.values.reduce import IndexedSlices, is_slices
from replicax._src.values.sharded import check_nothing_packs
from replicax._src.values.structures import map_in_order, unflatten_as

if TYPE_CHECKING:
    from replicax._src.strategy.base import StrategyBase  # the annotation of a public property


_SUM_OF_MEANS = (
    "The gradients of a mean over each replica's own rows are summed over {count} replicas, which"
    " makes them {count} times as large as on one device. Take the mean over the global batch"
    ' instead: make the Keras loss with `reduction="none"` and write `loss ='
    " rx.nn.mean_loss(loss_fn(y, prediction))`."
)
_SUM_OF_JAX_MEANS = (
    "The gradients of {mean}, a mean over each replica's own rows, are summed over {count}"
    " replicas, which makes them {count} times as large as on one device. Take the mean over the"
    " global batch instead: `rx.nn.mean_loss(losses)`, given the loss of each example."
)

_Options = CommunicationOptions | None


class Link(Protocol):
    """The connection of one replica to the others: none, between threads, or in compiled code."""

    @property
    @abstractmethod
    def across(self) -> Across:
        """The collectives of compiled code."""

    @property
    @abstractmethod
    def has_rows(self) -> bool:
        """Whether this replica has any rows of the batch."""

    @property
    @abstractmethod
    def position(self) -> int | None:
        """This replica's index in this process; None in code that is the same for all."""

    @abstractmethod
    def replica_id(self) -> Any:
        """Return this replica's number."""

    @abstractmethod
    def device(self) -> jax.Device:
        """Return the device of this replica; in compiled code, of the first replica."""

    @abstractmethod
    def all_reduce(
        self,
        op: ReduceOp,
        leaves: Sequence[jax.Array],
        options: CommunicationOptions,
        structure: str = "",
    ) -> list[jax.Array]:
        """Return each leaf reduced over all replicas, whose structures must be the same."""

    @abstractmethod
    def all_gather(
        self, x: jax.Array, axis: int, options: CommunicationOptions, structure: str = ""
    ) -> jax.Array:
        """Return all replicas' values concatenated along `axis`."""

    @abstractmethod
    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any, context: ReplicaContext) -> Any:
        """Call `fn` once for all replicas, in cross-replica context."""


class ReplicaContext:
    """The running replica, inside a function passed to `Strategy.run`.

    Get it with `rx.distribute.get_replica_context()`.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     context = rx.distribute.get_replica_context()
        ...     return context.all_reduce("SUM", jnp.ones(()) * context.replica_id_in_sync_group)
        >>> strategy.run(step)
        PerReplica:{
          0: Array(1., dtype=float32),
          1: Array(1., dtype=float32)
        }
    """

    def __init__(self, strategy: AmbientStrategy, link: Link) -> None:
        self._strategy = strategy
        self._link = link
        self._local_means: dict[int, Any] = {}
        self._refusal = ""

    @property
    def strategy(self) -> StrategyBase:
        """The strategy of this replica."""
        return self._strategy  # type: ignore[return-value]

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run this function."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number, from 0: an int32 array, traced in compiled code."""
        return self._link.replica_id()

    @property
    def across(self) -> Across:
        """The collectives with which code compiled for this replica reaches the others."""
        return self._link.across

    @property
    def has_rows(self) -> bool:
        """Whether this replica has any rows of a batch that is short for some."""
        return self._link.has_rows

    @property
    def position(self) -> int | None:
        """This replica's index in this process; None in code that is compiled for all."""
        return self._link.position

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of this replica's devices."""
        return (device_name(self._link.device()),)

    @overload
    def all_reduce(
        self,
        reduce_op: AnyReduceOp,
        value: jax.Array,
        options: CommunicationOptions | None = None,
    ) -> jax.Array: ...

    @overload
    def all_reduce(
        self,
        reduce_op: AnyReduceOp,
        value: list[jax.Array],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]: ...

    @overload
    def all_reduce(
        self,
        reduce_op: AnyReduceOp,
        value: dict[str, jax.Array],
        options: CommunicationOptions | None = None,
    ) -> dict[str, jax.Array]: ...

    @overload
    def all_reduce(self, reduce_op: AnyReduceOp, value: Any, options: _Options = None) -> Any: ...

    def all_reduce(
        self, reduce_op: AnyReduceOp, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce a value over all replicas; all get the result. It is differentiable.

        Args:
            reduce_op: SUM or MEAN, as an enum member or a string.
            value: An array, or a structure of arrays that has the same shapes on all replicas.
                For `rx.IndexedSlices` the rows of all replicas are concatenated.
            options: How to pack and transfer the data.

        Returns:
            The same structure, equal on all replicas.

        Raises:
            ValueError: If the op is unknown.
            TypeError: If a leaf is not an array.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> mean = strategy.run(
            ...     lambda: rx.distribute.get_replica_context().all_reduce(
            ...         "MEAN", {"a": jnp.float32(4)}
            ...     )
            ... )
            >>> float(mean["a"].values[0])
            4.0
        """
        self._require_current("all_reduce")
        self._check_not_refused()
        op = ReduceOp.parse(reduce_op)
        given = options or CommunicationOptions()
        check_nothing_packs(self._strategy.reduce_dtype, bytes_per_pack=given.bytes_per_pack)
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_reducible)
        shown = _shown(treedef)
        if self._local_means and op is ReduceOp.SUM and any(map(self.is_local_mean, leaves)):
            warn_user(_SUM_OF_MEANS.format(count=self.num_replicas_in_sync))
        arrays = [as_array(x, "all_reduce") for x in leaves if not is_slices(x)]
        reduced = iter(self._link.all_reduce(op, arrays, given, shown) if arrays else ())
        results = [
            self._all_joined(op, x, given, shown) if is_slices(x) else next(reduced) for x in leaves
        ]
        return unflatten_as(value, results, _is_reducible)

    def _all_joined(
        self, op: ReduceOp, slices: IndexedSlices, options: CommunicationOptions, structure: str
    ) -> IndexedSlices:
        rows, indices = (
            self._link.all_gather(jnp.asarray(x), 0, options, structure)
            for x in (slices.values, slices.indices)
        )
        joined = IndexedSlices(rows, indices, slices.dense_shape)
        return joined.divided(op, self.num_replicas_in_sync)

    @overload
    def all_gather(self, value: jax.Array, axis: int, options: _Options = None) -> jax.Array: ...

    @overload
    def all_gather(self, value: Any, axis: int, options: _Options = None) -> Any: ...

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate a value of every replica along an axis; all get the result.

        Args:
            value: An array of at least one axis, or a structure of such arrays.
            axis: The axis along which to concatenate; sizes may differ there in eager code.
            options: How to transfer the data.

        Raises:
            ValueError: If the axis does not exist, or sizes differ along another axis.
            NotImplementedError: For `rx.IndexedSlices`, as in TensorFlow.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> rows = strategy.run(
            ...     lambda: rx.distribute.get_replica_context().all_gather(jnp.ones(2), axis=0)
            ... )
            >>> rows.values[1].shape
            (4,)
        """
        self._require_current("all_gather")
        self._check_not_refused()
        given = options or CommunicationOptions()
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_reducible)
        shown = _shown(treedef)

        def gather(leaf: Any) -> jax.Array:
            if is_slices(leaf):
                raise NotImplementedError(
                    "all_gather does not take IndexedSlices, which are rows of an array. Gather"
                    " `slices.values` and `slices.indices`, or use all_reduce, which joins both."
                )
            x = as_array(leaf, "all_gather")
            if not -x.ndim <= axis < x.ndim:
                raise ValueError(
                    f"all_gather along axis={axis} of a value of shape {x.shape}, which has"
                    f" {x.ndim} axes. Add one first: `value[None]`."
                )
            return self._link.all_gather(x, axis % x.ndim, given, shown)

        return unflatten_as(value, [gather(leaf) for leaf in leaves], _is_reducible)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` once for all replicas.

        It runs in cross-replica context and sees each argument as a per-replica value; its result
        is split into components, one for each replica. A gradient tape does not record it.

        Example:
            >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> def step():
            ...     return rx.distribute.get_replica_context().merge_call(
            ...         lambda strategy, x: strategy.reduce("SUM", x, axis=None), (jnp.ones(()),)
            ...     )
            >>> float(strategy.run(step).values[0])
            2.0
        """
        self._require_current("merge_call")
        if not current().tapes:
            return self._link.merge(merge_fn, tuple(args), dict(kwargs or {}), self)
        with entered(tapes=()), unrecorded():
            result = self._link.merge(merge_fn, tuple(args), dict(kwargs or {}), self)
            # Copies cut the connection to the tape, also for arguments that merge_fn returns.
            new = lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x  # noqa: E731
            return map_in_order(new, result, is_opaque)

    def sum_statistics(self, values: list[jax.Array]) -> list[jax.Array]:
        """Sum statistics for normalization over all replicas; `refuse_all_reduce` allows this."""
        return self._link.all_reduce(ReduceOp.SUM, values, CommunicationOptions())

    @contextmanager
    def refuse_all_reduce(self, reason: str) -> Iterator[None]:
        """Raise `ScopeError` with this reason for collectives that the code in the block calls."""
        before, self._refusal = self._refusal, reason
        try:
            yield
        finally:
            self._refusal = before

    def _check_not_refused(self) -> None:
        if self._refusal:
            raise ScopeError(self._refusal)

    def note_local_mean(self, *values: Any) -> None:
        """Record that ``values`` are a mean over this replica's rows, or gradients of one.

        Summing the gradients over the replicas then gives a warning. A value computed from them,
        such as a loss that is divided by the number of replicas, is not recorded.
        """
        if self.num_replicas_in_sync > 1:
            self._local_means.update((id(x), x) for x in values if isinstance(x, jax.Array))

    def is_local_mean(self, value: Any) -> bool:
        """Whether ``value`` was passed to `note_local_mean`."""
        return id(value) in self._local_means

    def warn_summed_means(self, lines: Sequence[str]) -> None:
        """Warn that gradients of means over one replica's rows are summed.

        Means that were passed to `note_local_mean` have a warning of their own: no second one.

        Args:
            lines: Where the means are computed, as "file:line"; "" if that is not known.
        """
        if not self._local_means:  # a Keras loss has its own warning
            known = ", ".join(f"jnp.mean at {line}" for line in lines if line)
            text = _SUM_OF_JAX_MEANS.format(
                mean=known or "jnp.mean", count=self.num_replicas_in_sync
            )
            warn_user(text)

    def __repr__(self) -> str:
        return f"<ReplicaContext of {self._strategy}>"

    def _require_current(self, verb: str) -> None:
        if get_replica_context() is not self:
            raise ScopeError(
                f"{verb} was called on a replica context that is not the current one. Ask for it"
                " where you use it: `rx.distribute.get_replica_context()`, inside the function"
                " given to `strategy.run`; do not keep it from an earlier run, or use it inside"
                " merge_call."
            )


identify(ReplicaContext, type)  # each replica has its own object; they count as the same


def _shown(treedef: Any) -> str:
    """Return a structure as text, to compare between replicas; "" for a single leaf."""
    return "" if treedef == jax.tree.structure(0) else str(treedef)


def _is_reducible(x: Any) -> bool:
    """Whether a collective takes `x` as one value, not as a structure."""
    return is_opaque(x) or is_slices(x)


def as_array(x: Any, verb: str) -> jax.Array:
    """Return `x` as an array for the method `verb`.

    Raises:
        TypeError: If it has no numeric value.
    """
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, int | float | complex | np.ndarray | np.generic) or hasattr(
        x, "__jax_array__"
    ):
        return jnp.asarray(x)
    raise TypeError(
        f"{verb} needs arrays, got {x!r} ({type(x).__name__}). Pass a jax.Array, a NumPy array, a"
        " number, or a structure of them."
    )
