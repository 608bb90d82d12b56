"""Runs whose replicas hold different shapes, such as after a short last batch.

No single program can serve them, and running op by op is slow. Each replica's function is therefore
compiled separately and runs in its own thread, from which its collectives meet those of the other
replicas. The results are exact: nothing is padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from replicax._src.base.errors import ReplicaError
from replicax._src.base.threads import deferred_signals
from replicax._src.collectives import eager
from replicax._src.compat.jax import ordered_effect
from replicax._src.functions.boundary import Fields, Outputs, replica_value
from replicax._src.functions.jaxpr.cpu_kernels import with_cpu_kernels
from replicax._src.functions.jaxpr.lift import Lifted, lift, number_collectives
from replicax._src.functions.signature import Arguments, flatten_arguments
from replicax._src.state.agreement import agreed_value
from replicax._src.state.cell import Cell
from replicax._src.state.hooks import created_variables
from replicax._src.state.levels import TraceLevel, level
from replicax._src.strategy.links import as_replica
from replicax._src.values.per_replica import is_distributed, is_opaque, is_ragged, pieces
from replicax._src.values.structures import map_in_order, regroup, replicas_with_rows, select
from replicax._src.workers.watchdog import load

if TYPE_CHECKING:
    from replicax._src.strategy.base import StrategyBase
    from replicax._src.topology.mesh import Topology

_log = logging.getLogger("replicax")


class CannotTrace(Exception):  # noqa: N818 - a signal, not an error
    """Raised if the function needs concrete values in a trace: it can only run op by op."""


class _CreatedVariables(CannotTrace):
    """Raised by a trace that created variables: a second trace creates none, and can be cached."""


@dataclass
class RaggedRun:
    """The programs of one replica function for one combination of shapes, by replica."""

    programs: list[_Program] = field(default_factory=list)
    op_by_op: bool = False


def run_ragged(
    strategy: StrategyBase,
    topology: Topology,
    fn: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    key: Any,
) -> Any:
    """Run `fn` on every replica, each compiled separately.

    Raises:
        CannotTrace: If that is not possible; no variable was written.
        ReplicaError: If the replicas would not reach the same collectives.
    """
    calls = [flatten_arguments(*select(call, i)) for i in range(len(topology.local_replicas))]
    shapes = tuple(
        x.form.all_specs for x in jax.tree.leaves(call, is_leaf=is_distributed) if is_ragged(x)
    )
    run = strategy.ragged_runs.find((key, shapes, tuple(c.key for c in calls)), RaggedRun)
    has_rows = replicas_with_rows(call, topology)

    def on_each(body: Callable[[int], Any]) -> list[Any]:
        def work(replica: int) -> Any:
            with as_replica(strategy, topology, replica, has_rows=has_rows[replica]):
                return body(replica)

        with deferred_signals, eager.open_rendezvous(topology) as rendezvous:
            return rendezvous.run(work)

    if run.op_by_op:
        raise CannotTrace
    if not run.programs:
        _log.warning(
            "The replicas of %s hold batches of different sizes, so each is compiled separately."
            " Results are exact; to have one program for all steps, batch with"
            " `drop_remainder=True`.%s",
            strategy,
            ""
            if strategy.reduce_dtype is None
            else f" Gradients are summed without rounding them to {strategy.reduce_dtype}.",
        )
        trace = lambda replica: _Program.trace(fn, calls[replica])  # noqa: E731
        try:
            try:
                programs = on_each(trace)
            except _CreatedVariables:
                programs = on_each(trace)
        except CannotTrace:
            run.op_by_op = True
            raise
        _check_same(programs)
        run.programs = programs
    before = _ValuesBeforeRun(topology)

    def body(replica: int) -> tuple[Any, dict[Cell, Any]]:
        program = run.programs[replica]
        state = [before.read(cell, replica) for cell in program.lifted.reads]
        return program(calls[replica], state)

    rows = on_each(body)
    _commit([writes for _, writes in rows], before, has_rows, topology)
    load.steps += 1
    return regroup([result for result, _ in rows], topology)


def _check_same(programs: list[_Program]) -> None:
    """Raise `ReplicaError` unless all replicas' programs have the same collectives."""
    first = programs[0]
    for replica, other in enumerate(programs):
        if other.collectives != first.collectives:
            raise ReplicaError(
                "The replicas hold batches of different sizes, and the shapes decide which"
                f" collectives they reach: replica 0 {_listed(first.collectives)}, replica"
                f" {replica} {_listed(other.collectives)}. Every replica must call the same"
                " all_reduce, all_gather and merge_call and write the same variables, in the same"
                " order, also if it has no rows: a sum over no rows is 0."
            )


def _listed(collectives: list[str]) -> str:
    return ", ".join(collectives) or "none"


class _ValuesBeforeRun:
    """The variables' values before the run, split once for all replicas."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._pieces: dict[Cell, tuple[Any, ...]] = {}

    def read(self, cell: Cell, replica: int) -> Any:
        if cell.topology != self._topology:
            return level().read(cell)
        if cell not in self._pieces:
            self._pieces[cell] = cell.pieces()
        return self._pieces[cell][replica]


@dataclass(frozen=True)
class _Program:
    """One replica's function, compiled."""

    lifted: Lifted
    outputs: Outputs
    collectives: list[str]
    jitted: Callable[..., list[Any]]

    @classmethod
    def trace(cls, fn: Callable[..., Any], arguments: Arguments) -> _Program:
        """Trace the function of one replica; raise `CannotTrace` if it needs concrete values."""
        inner, outputs, log = TraceLevel(in_replica=True), Outputs(), []  # type: ignore[var-annotated]
        fields = Fields(arguments.treedef, arguments.leaves)

        def body(*arrays: Any) -> list[Any]:
            args, kwargs = arguments.with_arrays(arrays)
            result = map_in_order(replica_value, fn(*args, **kwargs), is_opaque)
            return outputs.take(result, lambda: None, fields)

        token = created_variables.set(log)
        try:
            lifted = lift(body, arguments.arrays, inner)
        except jax.errors.ConcretizationTypeError as error:
            raise CannotTrace from error
        finally:
            created_variables.reset(token)
        if log:  # a variable with a traced initial value has no value yet
            raise CannotTrace if inner.created else _CreatedVariables
        lifted, collectives = number_collectives(lifted, eager.COLLECTIVES, ordered_effect())
        jitted = jax.jit(lifted.rewritten(with_cpu_kernels).call)
        return cls(lifted, outputs, collectives, jitted)

    def __call__(self, arguments: Arguments, state: list[Any]) -> tuple[Any, dict[Cell, Any]]:
        lifted = self.lifted
        results = eager.wait_if_staged(self.jitted(*arguments.arrays, *state))
        result = self.outputs.rebuild(results[: lifted.num_outs], local=False)
        writes = dict(zip(lifted.writes, results[lifted.num_outs :], strict=True))
        return result, writes


def _commit(
    rows: list[dict[Cell, Any]], before: _ValuesBeforeRun, has_rows: list[bool], topology: Topology
) -> None:
    """Check the replicas' writes and store them; raise without storing if they disagree."""
    written = dict.fromkeys(cell for row in rows for cell in row)
    new: dict[Cell, Any] = {}
    for cell in written:
        if cell.per_replica:
            # A copy that was not written (shapes may decide that) keeps its value.
            values = [r[cell] if cell in r else before.read(cell, i) for i, r in enumerate(rows)]
            new[cell] = pieces(values, topology)
        else:
            _check_all_write(cell, rows)
            new[cell] = agreed_value(cell, [row[cell] for row in rows], has_rows, topology)
    with deferred_signals:  # signals are deferred: all values are stored, or none
        for cell, value in new.items():
            cell.store(value)


def _check_all_write(cell: Cell, rows: list[dict[Cell, Any]]) -> None:
    """Raise `ReplicaError` unless all replicas write the mirrored variable."""
    silent = [i for i, row in enumerate(rows) if cell not in row]
    if silent:
        raise ReplicaError(
            f"Some replicas write variable {cell.name!r} and others, {silent}, do not, because"
            " their batches are of different sizes. Nothing was assigned. Every replica must write"
            " a variable that all share, also if it has no rows; or give each its own copy, with"
            " `synchronization=rx.VariableSynchronization.ON_READ`."
        )
