"""`StrategyExtended`: strategy methods for libraries, as a thin view of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from replicax._src.base.errors import DivergenceError, ScopeError
from replicax._src.base.managers import contextmanager
from replicax._src.base.types import AnyReduceOp, ReduceOp
from replicax._src.collectives.options import CommunicationOptions, checked_pairs
from replicax._src.context.current import current, entered, strategy_scope
from replicax._src.state.agreement import agreed_value
from replicax._src.state.cell import Cell
from replicax._src.state.declaration import laid_out_like
from replicax._src.state.levels import TraceLevel, level
from replicax._src.state.variables import required_variable, value_of, variable_of
from replicax._src.strategy.distribute_methods import (
    MultiStepContext,
    is_plain,
    plain_to_per_replica,
)
from replicax._src.values.per_replica import Mirrored, PerReplica, is_distributed
from replicax._src.values.replica_functions import local_piece
from replicax._src.values.structures import map_in_order, regroup, select

if TYPE_CHECKING:
    from replicax._src.strategy.base import StrategyBase
    from replicax._src.topology.mesh import Topology


class StrategyExtended:
    """Additional methods of a strategy, for authors of optimizers and other libraries.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.extended.worker_devices[1]
        '/job:localhost/replica:0/task:0/device:CPU:1'
    """

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that compute."""
        return self._device_names("worker_devices")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold variables."""
        return self._device_names("parameter_devices")

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether the replicas' batches must have one shape; True if each has several devices."""
        topology = self._strategy.topology
        return topology is not None and topology.cores > 1

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every worker runs its own program, as with multi-worker strategies."""
        return self._strategy.between_graph

    @property
    def num_hosts(self) -> int:
        """The number of processes that the replicas belong to."""
        topology = self._strategy.topology
        return 1 if topology is None else len({d.process_index for d in topology.devices})

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints; with several workers, only the chief does."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries; with several workers, only the chief does."""
        return self._strategy.is_chief

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Deprecated name of `Strategy.run`."""
        return self._strategy.run(fn, args, kwargs)

    def reduce_to(
        self,
        reduce_op: AnyReduceOp,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce a per-replica value and put the result at its destination.

        Args:
            reduce_op: SUM or MEAN.
            value: A per-replica value.
            destinations: A variable, a distributed value, a device's name or a list of names.
            options: How to pack and transfer the data.
        """
        with self._cross_replica("reduce_to"):
            value = self._from_workers(reduce_op, value)
            return self._strategy.cross_device_ops.reduce(reduce_op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: AnyReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce several per-replica values at once; see `reduce_to`."""
        with self._cross_replica("batch_reduce_to"):
            ops, pairs = self._strategy.cross_device_ops, value_destination_pairs
            pairs = [(self._from_workers(reduce_op, v), d) for v, d in checked_pairs(pairs)]
            return ops.batch_reduce(reduce_op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copy a value to all destinations."""
        with self._cross_replica("broadcast_to"):
            if current().body is not None or not self._strategy.wraps_single:
                return tensor
            return self._strategy.cross_device_ops.broadcast(tensor, destinations)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(copy, *args, **kwargs)`` for every copy of a variable.

        Args:
            var: The variable.
            fn: Called with one copy of it, and with its component of each distributed argument.
            args: Further arguments.
            kwargs: Further keyword arguments.
            group: Whether to return one structure with mirrored values, or the tuple of the
                results for each copy.
        """
        replica = current().replica
        if replica is not None and replica.num_replicas_in_sync > 1:
            return replica.merge_call(
                lambda _, *a, **k: self.update(var, fn, a, k, group), args, kwargs
            )
        variable, call = required_variable(var, "update"), (tuple(args), dict(kwargs or {}))
        with self._cross_replica("update"), _check_copies_agree(variable.cell):
            return self._for_each(variable.components, fn, call, group=group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once for each device of `non_slot_devices`."""
        with self._cross_replica("update_non_slot"):
            parts = [None] * len(self._devices("update_non_slot"))
            call = (tuple(args), dict(kwargs or {}))
            return self._for_each(parts, lambda _, *a, **k: fn(*a, **k), call, group=group)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """Return all devices: a variable that is no slot of another one is on each of them."""
        return self.parameter_devices

    def read_var(self, v: Any) -> Any:
        """Return the value of a variable, in the current context."""
        return required_variable(v, "read_var").read_value()

    def value_container(self, value: Any) -> Any:
        """Return the variable of which ``value`` is a copy, or ``value`` itself."""
        variable = variable_of(value)
        return value if variable is None else variable.whole

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable was created in this strategy's scope."""
        variable = variable_of(v)
        return variable is not None and variable.distribute_strategy is self._strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Create variables colocated with another one: those of its shape are sharded like it.

        Raises:
            ValueError: If the other variable belongs to another strategy.
        """
        other = variable_of(colocate_with_variable)
        if other is None or other.distribute_strategy is not self._strategy:
            raise ValueError(
                f"colocate_vars_with needs a variable made in the scope of {self._strategy}, got"
                f" {colocate_with_variable!r}."
            )
        with laid_out_like(other.cell):
            yield

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """Return a dataset of array slices; see `Strategy.experimental_make_numpy_dataset`."""
        return self._strategy.experimental_make_numpy_dataset(numpy_input)  # type: ignore[attr-defined]

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> MultiStepContext:
        """Run ``fn`` on the next elements of an iterator; `rx.scan` is the modern alternative.

        Args:
            fn: Takes a context, to which it passes outputs, and an element.
            iterator: An iterator of the strategy, for example from `make_dataset_iterator`.
            iterations: The number of steps to run.
            initial_loop_values: Accepted for compatibility with TensorFlow: Python runs the loop.

        Returns:
            The context, with the outputs.

        Raises:
            OutOfRangeError: If the iterator has fewer elements.

        Example:
            >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> iterator = strategy.make_dataset_iterator(rx.data.Dataset.range(8).batch(2))
            >>> def step(context, batch):
            ...     doubled = strategy.run(lambda x: 2 * x, args=(batch,))
            ...     context.set_last_step_output("sum", doubled, reduce_op="SUM")
            >>> context = strategy.extended.experimental_run_steps_on_iterator(step, iterator, 3)
            >>> context.last_step_outputs["sum"].tolist()  # of [4] and [5]
            [18]
        """
        context = MultiStepContext()
        with self._cross_replica("experimental_run_steps_on_iterator"):
            for _ in range(iterations):
                fn(context, iterator.get_next())
        return context

    def _for_each(
        self, parts: Sequence[Any], fn: Callable[..., Any], call: Any, *, group: bool
    ) -> Any:
        """Call `fn` once per copy, in the form that fits the context."""
        if current().body is not None:
            args, kwargs = map_in_order(local_piece, call, is_distributed)
            result = _value(fn(parts[0], *args, **kwargs))
            return result if group else (result,) * len(parts)
        if len(parts) > 1 and isinstance(level(), TraceLevel):
            grouped = self._strategy.run(_CopyUpdate(fn, parts[0]), *call)
            if not group:
                return self._strategy.experimental_local_results(grouped)
            return _as_mirrored(grouped)
        results = []
        for i, part in enumerate(parts):
            args, kwargs = select(call, i)
            results.append(fn(part, *args, **kwargs))
        if not group:
            return tuple(results)
        topology = self._strategy.topology
        if topology is None or len(parts) == 1:
            return results[0]
        return _as_mirrored(regroup([_value(r) for r in results], topology))

    def _from_workers(self, reduce_op: AnyReduceOp, value: Any) -> Any:
        """Convert a plain value to a per-replica value of all workers; return others unchanged."""
        topology = self._strategy.topology
        if topology is None or topology.is_fully_addressable or not is_plain(value):
            return value
        op = ReduceOp.parse(reduce_op)
        return plain_to_per_replica(
            value, topology, f"reduce_to({op.name})", once=op is ReduceOp.SUM
        )

    @contextmanager
    def _cross_replica(self, verb: str) -> Iterator[None]:
        """Enter the strategy's cross-replica context; raise `ScopeError` in a replica."""
        frame = current()
        if frame.replica is not None and frame.replica.num_replicas_in_sync > 1:
            raise ScopeError(
                f"`strategy.extended.{verb}` needs the cross-replica context, but was called"
                " inside a replica function. Use it inside `merge_call`."
            )
        if self._strategy.topology is None:
            yield
        elif frame.body is not None:
            with entered(strategy=self._strategy, replica=None):
                yield
        else:
            with strategy_scope(self._strategy):
                yield

    def _device_names(self, what: str) -> tuple[str, ...]:
        devices, topology = self._devices(what), self._strategy.topology
        assert topology is not None
        return tuple(map(topology.name_of, devices))

    def _devices(self, what: str) -> tuple[jax.Device, ...]:
        topology: Topology | None = self._strategy.topology
        if topology is None:
            raise ScopeError(
                f"{what} is not defined for the default strategy, which computes wherever JAX"
                " does. Use a MirroredStrategy or a OneDeviceStrategy."
            )
        return topology.primary_devices


@contextmanager
def _check_copies_agree(cell: Cell) -> Iterator[None]:
    """Compare the copies of a mirrored variable that the block wrote, as compiled code does."""
    before = cell.value
    yield
    if not level().is_eager or cell.per_replica or cell.topology is None or cell.value is before:
        return
    copies = cell.pieces()
    try:
        cell.store(agreed_value(cell, copies, [True] * len(copies), None))
    except DivergenceError:
        cell.value = before
        raise


@dataclass(frozen=True)
class _CopyUpdate:
    """An update of every copy of a variable in compiled code, as one run of `fn` per copy."""

    fn: Callable[..., Any]
    copy: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with entered(replica=None, body=current().replica):
            return _value(self.fn(self.copy, *args, **kwargs))


def _value(result: Any) -> Any:
    """Return the result of an update, with variables replaced by their values."""
    return map_in_order(value_of, result, lambda x: False)


def _as_mirrored(value: Any) -> Any:
    """Mark the results for all copies as mirrored: they are equal because the copies are."""
    return map_in_order(
        lambda x: Mirrored.of(x.form) if isinstance(x, PerReplica) else x, value, is_distributed
    )
