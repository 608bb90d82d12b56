"""Policies: the meaning of reading and writing a variable, by declaration and context.

| declared | in a replica                          | across replicas                        |
|----------|---------------------------------------|----------------------------------------|
| plain    | the only copy                         | the only copy                          |
| mirrored | read the local copy; write the        | read the first copy; write all copies  |
|          | aggregate of all replicas' values     |                                        |
| on read  | read and write the local copy         | read the aggregate of all copies;      |
|          |                                       | write copies that aggregate to a value |

Replicas may write a mirrored variable with aggregation NONE only if all write the same value; see
`replicax._src.state.agreement`.
"""

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import ScopeError, VariableError
from replicax._src.base.types import ReduceOp, VariableAggregation
from replicax._src.context.current import current, twins
from replicax._src.state.agreement import agreed_traced_value, agreed_value, equal_shares
from replicax._src.state.cell import Cell, variable_lock
from replicax._src.state.hooks import read
from replicax._src.state.levels import is_staging, level
from replicax._src.state.update import Update
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import InBody, PerReplica, in_body, is_distributed, pieces
from replicax._src.values.placement import is_traced
from replicax._src.values.reduce import first_value, gather_value, reduce_value
from replicax._src.values.replica_functions import local_piece
from replicax._src.workers import elastic

Parts = tuple[Any, ...]


class Policy(Protocol):
    """The meaning of reading and writing one variable."""

    cell: Cell

    @abstractmethod
    def read(self) -> jax.Array:
        """Return the value in the current context."""

    @abstractmethod
    def update(self, parts: Parts, verb: Update) -> None:
        """Write `verb.combine(old, *parts)`, after combining the parts of several replicas.

        Args:
            parts: The caller's arguments: a value, or the indices and values of a sparse update.
            verb: The kind of write.
        """


_log = logging.getLogger("replicax")
_warned = False


def _warn_of_sum(cell: Cell, replica: Any) -> None:
    """Warn once if replicas add to a weight that was created outside of their scope."""
    global _warned
    if _warned or not cell.trainable or not jnp.issubdtype(cell.dtype, jnp.inexact):
        return
    _warned = True
    _log.warning(
        "Variable %r was created outside of the scope of %s, so what each of the %d replicas adds"
        " to it is summed, as in TensorFlow: an update from all-reduced gradients counts %d times."
        " Create the variables of a model in `with strategy.scope():`. A total needs"
        " `trainable=False`. (Shown only once.)",
        cell.name,
        replica.strategy,
        replica.num_replicas_in_sync,
        replica.num_replicas_in_sync,
    )


@final
class PlainPolicy:
    """A single copy: created outside of any scope, or for a single replica.

    When several replicas write it, additions are summed, and other writes must agree.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell

    def read(self) -> jax.Array:
        """Return the value."""
        value: jax.Array = read(self.cell)
        return value

    def update(self, parts: Parts, verb: Update) -> None:
        """Write the value."""
        replica = current().replica
        if replica is None or replica.num_replicas_in_sync == 1:
            write(self.cell, parts, verb)
            return
        adds = verb.kind == "add"
        if adds:
            _warn_of_sum(self.cell, replica)
        aggregation = VariableAggregation.SUM if adds else VariableAggregation.NONE
        topology = replica.strategy.topology
        assert topology is not None

        def merge(_: Any, *merged: Any) -> None:
            # A number that is equal on all replicas is added once by each of them.
            all_values = [
                m * topology.num_replicas if adds and not isinstance(m, PerReplica) else m
                for m in merged
            ]
            write_combined(self.cell, all_values, verb, AggregationRule(aggregation, topology))

        replica.merge_call(merge_for_write(self.cell, verb, merge), parts)


@final
class ComponentPolicy:
    """One replica's copy of a distributed variable; inside compiled code, the local replica's."""

    def __init__(self, cell: Cell, replica: int) -> None:
        self.cell = cell
        self.replica = replica

    def read(self) -> jax.Array:
        """Return the copy."""
        value: jax.Array = level().read_copy(self.cell, self.replica)
        return value

    def update(self, parts: Parts, verb: Update) -> None:
        """Write this copy only."""
        where = level()
        with variable_lock:
            new = verb.combine(None if verb.kind == "replace" else self.read(), *parts)
            where.write_copy(self.cell, self.replica, new)


@final
class MirroredPolicy:
    """The same value on every replica."""

    def __init__(self, cell: Cell, strategy: Any, aggregation: VariableAggregation) -> None:
        self.cell = cell
        self._strategy = strategy
        self._aggregation = aggregation

    def read(self) -> jax.Array:
        """Return this replica's copy; across replicas, the first."""
        value: jax.Array = read(self.cell)
        return value

    def update(self, parts: Parts, verb: Update) -> None:
        """Write all copies; in a replica, write the aggregate of all replicas' values."""
        refuse_other_strategy(self.cell, self._strategy)
        replica = current().replica
        if replica is None:
            self._write(parts, verb, rows=True)
            return

        def merge(_: Any, rows: Any, *merged: Any) -> None:
            if self._aggregation is VariableAggregation.SUM:
                refuse_plain(self.cell, merged)
            assert self.cell.topology is not None
            self._write([per_worker(m, self.cell.topology) for m in merged], verb, rows=rows)

        merge_fn = merge_for_write(self.cell, verb, merge)
        replica.merge_call(merge_fn, (np.bool_(replica.has_rows), *parts))

    def _write(self, parts: Sequence[Any], verb: Update, *, rows: Any) -> None:
        assert self.cell.topology is not None
        how = AggregationRule(self._aggregation, self.cell.topology, rows)
        write_combined(self.cell, parts, verb, how)


@final
class OnReadPolicy:
    """An independent value on every replica, aggregated by cross-replica reads."""

    def __init__(self, cell: Cell, strategy: Any, aggregation: VariableAggregation) -> None:
        self.cell = cell
        self._strategy = strategy
        self._aggregation = aggregation

    def read(self) -> jax.Array:
        """Return this replica's copy; across replicas, the aggregate of all copies."""
        value = read(self.cell)
        if self._in_own_replica():
            return cast("jax.Array", _only_copy(value))
        if self._aggregation is VariableAggregation.NONE:
            raise VariableError(
                f"Variable {self.cell.name!r} has one value for each replica (synchronization"
                " ON_READ) and aggregation NONE, so it cannot be read across replicas. Give"
                " it an aggregation, read it inside `strategy.run`, or look at each copy with"
                " `strategy.experimental_local_results(variable)`."
            )
        if (known := self._known_total()) is not None:
            return known
        all_values = self._all_copies(value)
        if self._aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            lead: jax.Array = first_value(all_values)
            return lead
        op = ReduceOp.from_variable_aggregation(self._aggregation)
        return reduce_value(op, all_values, None, self._topology)

    def update(self, parts: Parts, verb: Update) -> None:
        """Write this replica's copy; across replicas, write copies that aggregate to the value."""
        refuse_other_strategy(self.cell, self._strategy)
        if verb.kind == "sparse":
            raise NotImplementedError(
                f"Variable {self.cell.name!r} has synchronization ON_READ, and its copies cannot be"
                " changed at single indices. Use `assign`, `assign_add` or `assign_sub`."
            )
        where = level()
        if self._in_own_replica():
            with variable_lock:
                old = _old_value(where, self.cell, verb)
                new = verb.combine(_only_copy(old), *parts)
                where.write(self.cell, PerReplica([new]) if self._is_alone(old) else new)
            return
        shares: Callable[[Any], Sequence[Any]] = lambda _: parts  # noqa: E731
        if self._aggregation is VariableAggregation.SUM:
            self._refuse_addition(verb)
            # The copies are shares of the value, because a read adds them up.
            cut = [equal_shares(jnp.asarray(p, self.cell.dtype), self._topology) for p in parts]
            shares = lambda i: [jnp.where(i == 0, lead, other) for lead, other in cut]  # noqa: E731
        if (body := current().body) is not None:
            old = _old_value(where, self.cell, verb)
            where.write(self.cell, verb.combine(old, *shares(body.across.index())))
            return
        # A traced program is the same in all processes and has the copies of all of them.
        own = range(self._topology.num_replicas) if is_staging() else self._topology.local_replicas
        with variable_lock:
            old = _old_value(where, self.cell, verb)
            olds = (None,) * len(own) if old is None else old.values
            new = [verb.combine(o, *shares(i)) for i, o in zip(own, olds, strict=True)]
            where.write(self.cell, PerReplica(new))
            if elastic.is_on() and where.is_eager and verb.kind == "replace":
                # All workers write the same value, so each knows the copies of the others.
                ids = range(self._topology.num_replicas)
                self.cell.note_copies(
                    lambda: np.stack([np.asarray(verb.combine(None, *shares(i))) for i in ids])
                )

    def _known_total(self) -> jax.Array | None:
        """Return the aggregate without the other workers, if an elastic run has their copies.

        A worker that is lost during such a read does not interrupt it.
        """
        if not elastic.is_on() or not level().is_eager or current().body is not None:
            return None
        total = total_of_copies(self.cell, self._aggregation)
        return None if total is None else jnp.asarray(total)

    def _refuse_addition(self, verb: Update) -> None:
        if verb.kind == "add":
            raise VariableError(
                f"assign_add and assign_sub of variable {self.cell.name!r} (synchronization"
                " ON_READ, aggregation SUM) have no meaning across replicas: which copy should"
                " take the difference? Call them inside `strategy.run`, or use `assign`."
            )

    def _in_own_replica(self) -> bool:
        frame = current()
        return frame.replica is not None and frame.strategy is self._strategy

    def _is_alone(self, old: Any) -> bool:
        """Whether this is the only replica that is left of an elastic run.

        It runs outside of a replica body, where the cell has a per-replica value.
        """
        if self._topology.num_replicas > 1 or current().body is not None:
            return False
        return old is None or isinstance(old, PerReplica)

    def _all_copies(self, value: Any) -> PerReplica:
        if isinstance(value, PerReplica):
            return value
        refuse_other_strategy(self.cell, self._strategy, "read")
        body: Any = current().body  # one replica's value occurs only inside a replica body
        return in_body(value, self._topology, body.across)

    @property
    def _topology(self) -> Topology:
        assert self.cell.topology is not None
        return self.cell.topology


def _only_copy(value: Any) -> Any:
    """Return the copy of the only replica; any other value as it is."""
    return value.values[0] if isinstance(value, PerReplica) else value


def total_of_copies(cell: Cell, aggregation: VariableAggregation) -> np.ndarray | None:
    """Return the aggregate of the known copies of all workers; None if they are not known."""
    copies = cell.all_copies()
    if copies is None or aggregation is VariableAggregation.NONE:
        return None
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return cast("np.ndarray", copies[0])
    if not jnp.issubdtype(cell.dtype, jnp.floating) and (
        aggregation is VariableAggregation.MEAN or not jnp.issubdtype(cell.dtype, jnp.integer)
    ):
        return None
    # In the order of the replicas, so that all workers, and those that join, round alike.
    total = functools.reduce(np.add, copies)
    if aggregation is VariableAggregation.MEAN:
        total = total / np.asarray(len(copies), total.dtype)
    return np.asarray(total, copies.dtype)


def write(cell: Cell, parts: Sequence[Any], verb: Update) -> None:
    """Write `verb.combine(old, *parts)` at the current level."""
    where = level()
    with variable_lock:
        where.write(cell, verb.combine(_old_value(where, cell, verb), *parts))


def _old_value(where: Any, cell: Cell, verb: Update) -> Any:
    """Return the old value if the update needs it."""
    # Without a read, a replaced variable does not become an input of the compiled function.
    return None if verb.kind == "replace" else where.read(cell)


@dataclass(frozen=True)
class Merge:
    """A function for `merge_call` with a description for error messages.

    Attributes:
        purpose: A description of its purpose.
        fn: The function.
        subject: The objects it acts on, by label; they must be the same on all replicas.
        once: Whether it is called once for all replicas even while each is traced separately.
    """

    purpose: str
    fn: Callable[..., Any]
    subject: Mapping[str, Any]
    once: bool = False

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.fn(*args)


def merge_for_write(cell: Cell, verb: Update, fn: Callable[..., Any]) -> Merge:
    """Return the `merge_call` function of a variable's update, which `fn` carries out."""
    purpose = f"a write to variable {cell.name!r} by {verb.name}"
    return Merge(purpose, fn, {"the variable": cell, "the index": verb.part})


def per_worker(part: Any, topology: Topology) -> Any:
    """Wrap a Python number written by this process's replicas: other processes' may differ."""
    is_number = isinstance(part, bool | int | float | complex)
    if topology.is_fully_addressable or not is_number or current().body is not None:
        return part
    return pieces([jnp.asarray(part)] * len(topology.local_replicas), topology)


@dataclass(frozen=True)
class AggregationRule:
    """How the values that the replicas write are combined.

    Attributes:
        aggregation: The aggregation.
        topology: The topology of the replicas.
        rows: Whether the replicas have any input rows: one flag, or one per replica.
    """

    aggregation: VariableAggregation
    topology: Topology
    rows: Any = True


def write_combined(cell: Cell, parts: Sequence[Any], verb: Update, how: AggregationRule) -> None:
    """Combine all replicas' `parts` as `how` describes, and write the result to all copies."""
    if not any(isinstance(p, PerReplica) for p in parts):
        write(cell, parts, verb)
    elif how.aggregation is VariableAggregation.NONE:
        _write_agreed(cell, parts, verb, how)
    else:
        write(cell, [_combine(p, how, verb) for p in parts], verb)


def write_own(cell: Cell, value: Any, replica: Any) -> None:
    """Write one replica's `value` to a mirrored variable; all replicas must write the same."""
    topology = replica.strategy.topology
    verb = Update("assign", "replace", lambda _, new: new)

    def merge(_: Any, rows: Any, values: Any) -> None:
        how = AggregationRule(VariableAggregation.NONE, topology, rows)
        write_combined(cell, [values], verb, how)

    merge_fn = merge_for_write(cell, verb, merge)
    replica.merge_call(merge_fn, (np.bool_(replica.has_rows), value))


def _combine(part: Any, how: AggregationRule, verb: Update) -> Any:
    """Combine one argument of all replicas by the aggregation; sparse updates are concatenated."""
    aggregation, topology = how.aggregation, how.topology
    if not isinstance(part, PerReplica):
        return part
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return first_value(part)
    op = ReduceOp.from_variable_aggregation(aggregation)
    if verb.kind != "sparse":
        return reduce_value(op, part, None, topology)
    joined = gather_value(part, 0, topology)
    # The parts are indices and values; only values have a mean.
    is_values = op is ReduceOp.MEAN and jnp.issubdtype(joined.dtype, jnp.inexact)
    return joined / topology.num_replicas if is_values else joined


def _write_agreed(cell: Cell, parts: Sequence[Any], verb: Update, how: AggregationRule) -> None:
    """Write a value on which all replicas must agree."""
    where = level()
    if any(isinstance(p, PerReplica) and isinstance(p.form, InBody) for p in parts):
        # Whether they agree is checked when the replica function ends.
        cell.note_line()
        write(cell, [local_piece(p) if is_distributed(p) else p for p in parts], verb)
        return
    count = next(len(p.values) for p in parts if isinstance(p, PerReplica))
    rows, *columns = [
        p.values if isinstance(p, PerReplica) else (p,) * count for p in (how.rows, *parts)
    ]
    # The comparison below waits for other workers, which must not happen under the lock.
    with (
        variable_lock
        if verb.kind != "replace" and how.topology.is_fully_addressable
        else nullcontext()
    ):
        old = _old_value(where, cell, verb)
        values = [verb.combine(old, *row) for row in zip(*columns, strict=True)]
        if any(map(is_traced, values)):
            where.write(cell, agreed_traced_value(where, cell, values))
        else:
            where.write(cell, agreed_value(cell, values, rows, how.topology))


def refuse_plain(cell: Cell, parts: Sequence[Any]) -> None:
    """Refuse a Python number assigned by all replicas to a variable with aggregation SUM.

    Raises:
        VariableError: If a part is one plain value for all replicas.
    """
    for part in parts:
        if not isinstance(part, PerReplica):
            raise VariableError(
                f"Every replica assigned the plain number {part!r} to variable {cell.name!r},"
                " whose aggregation is SUM: it could mean the number, or the number times the"
                f" replicas. Assign an array, `jnp.asarray({part!r})`, to have them added up, or"
                " assign outside of `strategy.run`."
            )


def refuse_other_strategy(cell: Cell, strategy: Any, used: str = "assigned") -> None:
    """Refuse to use a variable under a strategy that did not create it.

    Raises:
        ScopeError: If another strategy is current.
    """
    frame = current()
    if frame.strategy is not None and frame.strategy is not strategy:
        raise ScopeError(
            f"Variable {cell.name!r} belongs to {strategy} and cannot be {used} in a scope or run"
            f" of {frame.strategy}. Create it in the scope of the strategy that uses it."
            f"{twins(strategy, frame.strategy)}"
        )
