"""Runs whose replicas hold different shapes, such as after a short last batch.

No single program can serve them, and op by op is slow. So each replica's function is compiled by
itself and runs in its own thread, and its collectives meet the other replicas' from there. The
results are exact: nothing is padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from replicax.collectives import _eager
from replicax.function._captured import own_value
from replicax.function._lift import Lifted, lift
from replicax.function._outputs import Outputs
from replicax.function._signature import Arguments, take_apart
from replicax.strategy._replica_thread import as_replica
from replicax.values._per_replica import is_opaque, pieces
from replicax.values._placement import join
from replicax.values._regroup import regroup, select, who_has_rows
from replicax.variables._agreement import settled
from replicax.variables._cell import Cell
from replicax.variables._creation import births
from replicax.variables._levels import TraceLevel, level

if TYPE_CHECKING:
    from replicax.strategy._base import StrategyBase
    from replicax.topology._mesh import Topology

_log = logging.getLogger("replicax")


class CannotTrace(Exception):  # noqa: N818 - a signal, not an error
    """The function needs values while it is traced: it can only run op by op."""


@dataclass
class RaggedRun:
    """The programs of one replica function for one combination of shapes, by replica."""

    programs: dict[int, _Program] = field(default_factory=dict)
    op_by_op: bool = False


def run_ragged(
    strategy: StrategyBase,
    topology: Topology,
    fn: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    key: Any,
) -> Any:
    """Run ``fn`` on every replica, each compiled by itself.

    Raises:
        CannotTrace: If that is not possible; nothing was written then.
    """
    calls = [take_apart(*select(call, i)) for i in range(len(topology.own))]
    run = strategy.ragged_runs.find((key, tuple(c.key for c in calls)), RaggedRun)
    if run.op_by_op:
        raise CannotTrace
    if not run.programs:
        _log.warning(
            "The replicas of %s hold batches of different sizes, so that each is compiled by"
            " itself. Results are exact; to have one program for all steps, batch with"
            " `drop_remainder=True`.",
            strategy,
        )

    held, has_rows = _Held(topology), who_has_rows(call, topology)

    def body(replica: int) -> tuple[Any, dict[Cell, Any], set[Cell]]:
        with as_replica(strategy, topology, replica, has_rows=has_rows[replica]):
            if replica not in run.programs:
                run.programs[replica] = _Program.trace(fn, calls[replica])
            program = run.programs[replica]
            state = [held.read(cell, replica) for cell in program.lifted.reads]
            return program(calls[replica], state)

    try:
        with _eager.opened(topology) as meeting:
            rows = meeting.hold(body)
    except CannotTrace:
        run.op_by_op = True
        raise
    _commit([w for _, w, _ in rows], rows[0][2], has_rows, topology)
    return regroup([result for result, _, _ in rows], topology)


class _Held:
    """What the replicas hold, taken apart once for all of them."""

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
    unverified: set[Cell]
    jitted: Callable[..., list[Any]]

    @classmethod
    def trace(cls, fn: Callable[..., Any], arguments: Arguments) -> _Program:
        inner, outputs, log = TraceLevel(in_replica=True), Outputs(), []  # type: ignore[var-annotated]

        def body(*arrays: Any) -> list[Any]:
            args, kwargs = arguments.with_arrays(arrays)
            result = jax.tree.map(own_value, fn(*args, **kwargs), is_leaf=is_opaque)
            return outputs.take(result, lambda: None)

        token = births.set(log)
        try:
            lifted = lift(body, arguments.arrays, inner)
        except jax.errors.ConcretizationTypeError as error:
            raise CannotTrace from error
        finally:
            births.reset(token)
        if log:
            raise CannotTrace
        return cls(lifted, outputs, inner.unverified, jax.jit(lifted.call))

    def __call__(
        self, arguments: Arguments, state: list[Any]
    ) -> tuple[Any, dict[Cell, Any], set[Cell]]:
        lifted = self.lifted
        results = _eager.settled(self.jitted(*arguments.arrays, *state))
        result = self.outputs.rebuild(results[: lifted.num_outs], local=False)
        writes = dict(zip(lifted.writes, results[lifted.num_outs :], strict=True))
        return result, writes, self.unverified


def _commit(
    rows: list[dict[Cell, Any]], unverified: set[Cell], has_rows: list[bool], topology: Topology
) -> None:
    columns = {cell: [row[cell] for row in rows] for cell in rows[0]}
    for cell in unverified & set(columns):
        columns[cell] = [settled(cell, columns[cell], has_rows, topology)] * len(rows)
    for cell, values in columns.items():
        if cell.per_replica:
            cell.store(pieces(values, topology))
        elif cell.topology == topology:
            cell.value, cell.owned = join(values, topology), False
        else:
            cell.store(values[0])
