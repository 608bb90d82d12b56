"""Moves strategies, variables and distributed values to the workers that are left.

The Python objects that a program holds stay the same. A mirrored value is copied from this worker's
replica, which has all of it. Of a variable with a value for each replica, every step leaves the
copies of all replicas with each worker (see `Cell.all_copies`), and the new replicas get copies
with the same total. A worker's part of any other value is lost with the worker: variables of that
kind prevent a resize, and results of that kind cannot be read any more.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.compat.jax import concrete
from replicax._src.context.current import entered
from replicax._src.state.cell import NO_COPIES, Cell, on_host
from replicax._src.state.declaration import Awaited, is_planned
from replicax._src.state.policy import total_of_copies
from replicax._src.state.variable import Variable, live_variables
from replicax._src.strategy.base import live_strategies
from replicax._src.values import neighbors
from replicax._src.values.per_replica import Joined, Lost, live_values, mirrored
from replicax._src.values.placement import first, replicate
from replicax._src.values.sharded import ShardLayout
from replicax._src.workers import elastic
from replicax._src.workers.group import required


def _cells() -> list[Cell]:
    found = {id(v.cell): v.cell for v in list(live_variables)}
    return [cell for cell in found.values() if not cell.transient]


def _per_replica_variables() -> list[Variable]:
    """Return the variables with a value for each replica, without their components."""
    found = [v for v in list(live_variables) if v.whole is v and v.cell.per_replica]
    return list({id(v.cell): v for v in found}.values())


def _check() -> None:
    """Raise if a variable would lose the part that the lost worker had.

    Raises:
        CannotResizeError: If so.
    """
    spanning = [s.topology for s in list(live_strategies) if hasattr(s, "move_to_workers")]
    for cell in _cells():
        if is_planned(cell.value) or not any(cell.topology is t for t in spanning):
            continue
        if isinstance(cell.value, Awaited):
            raise elastic.CannotResizeError(
                f"Variable {cell.name!r} still waits for its value from a checkpoint."
            )
        if cell.sharded and not (neighbors.is_enabled(cell.topology) and cell.has_copies):
            raise elastic.CannotResizeError(
                f"Variable {cell.name!r} is sharded, so each worker has only a part of it, and no"
                f" other worker has a copy of that ({neighbors.VARIABLE}=neighbor keeps them, of"
                " variables that steps change)."
            )
    for variable in _per_replica_variables():
        cell = variable.cell
        if not any(cell.topology is t for t in spanning) or isinstance(cell.value, Awaited):
            continue
        if total_of_copies(cell, variable.aggregation) is None:
            raise elastic.CannotResizeError(
                f"Variable {cell.name!r} has a value for each replica (synchronization ON_READ,"
                f" aggregation {variable.aggregation.name}), and this worker does not have the"
                " others' values. They are kept for variables of real numbers that can be added up"
                " (SUM, MEAN or ONLY_FIRST_REPLICA) and are written by steps, or outside of"
                " replicas."
            )


def _check_join() -> None:
    """Raise if a worker that joins cannot get its part of a variable.

    Raises:
        CannotResizeError: If so.
    """
    for cell in _cells():
        if cell.sharded:
            raise elastic.CannotResizeError(
                f"Variable {cell.name!r} is sharded, and workers cannot join then."
            )


class _Moved:
    """Host copies of all values, from the time between the old and the new devices."""

    def __init__(self) -> None:
        self._cells: list[tuple[Cell, Any, Any]] = []
        self._values: list[tuple[Any, Any]] = []
        self._totals: list[tuple[Variable, np.ndarray]] = []
        self._parts: list[tuple[Cell, ShardLayout, dict[int, np.ndarray]]] = []

    def save(self) -> None:
        """Copy the values to the host, and drop the old arrays."""
        if self._cells or self._values or self._totals or self._parts:
            return  # another worker was lost while the group re-formed
        self._save_totals()
        self._save_cells()
        for value in live_values():
            form = value.stored
            if isinstance(form, Joined):
                self._values.append((value, _to_host(form.array)))
            elif form.topology is not None and not form.topology.is_fully_addressable:
                self._values.append((value, None))

    def _save_totals(self) -> None:
        for variable in _per_replica_variables():
            cell = variable.cell
            total = total_of_copies(cell, variable.aggregation)
            if total is not None and not isinstance(cell.value, Awaited):
                self._totals.append((variable, total))
                cell.value = None

    def _save_cells(self) -> None:
        for cell in _cells():
            if cell.value is None or isinstance(cell.value, Awaited | tuple):
                continue
            if (layout := cell.shard_layout) is not None and neighbors.is_enabled(cell.topology):
                assert cell.topology is not None
                parts = neighbors.parts_on_host(cell.value, cell.copies[1](), cell.topology)
                self._parts.append((cell, layout, parts))
                cell.value, cell.copies = None, NO_COPIES
            elif not is_planned(cell.value):
                self._cells.append((cell, *_to_host(cell.value)))
                cell.value = None
                cell.forget_verdict()

    def restore(self) -> None:
        """Put the values on the new devices."""
        cells, self._cells = self._cells, []
        for cell, array, keys in cells:
            x = _from_host(array, keys)
            moved = x if cell.topology is None else replicate(x, cell.topology, cell.spec)
            cell.value, cell.owned = moved, False
        self._restore_sharded()
        totals, self._totals = self._totals, []
        with concrete(), entered(strategy=None, replica=None, level=None, body=None, tapes=()):
            for variable, total in totals:
                variable.assign(total)
        values, self._values = self._values, []
        for value, copy in values:
            topology = value.stored.topology
            value.captured = None
            if copy is None:
                value.stored = Lost(topology)
            else:
                value.stored = mirrored(replicate(_from_host(*copy), topology), topology).stored

    def _restore_sharded(self) -> None:
        """Put sharded variables together from the workers' parts, and shard them again.

        Raises:
            CannotResizeError: If all workers that had one of the parts are lost.
        """
        cells, self._parts = self._parts, []
        if not cells:
            return
        _, layout, parts = cells[0]  # the others have the same parts
        group = required()
        order = [[cell.name, str(old)] for cell, old, _ in cells]
        answers = group.agree("the parts of sharded variables", [sorted(parts), order])
        if any(theirs != order for _, theirs in answers):
            raise elastic.CannotResizeError(
                "The workers do not have the same sharded variables in the same order of creation,"
                " so their parts cannot be put together again."
            )
        there = [numbers for numbers, _ in answers]
        givers = {i: rank for rank, some in reversed(list(enumerate(there))) for i in some}
        if len(givers) < layout.count:
            raise elastic.CannotResizeError(
                "Two workers that were next to each other are lost, and with them a part of each"
                " sharded variable."
            )
        mine = [i for i, rank in givers.items() if rank == group.facts.index]
        for cell, old, own in cells:
            topology = cell.topology
            assert topology is not None
            whole = neighbors.reassemble(own, mine, old, topology)
            new = cell.shard_layout
            assert new is not None
            cell.value, cell.owned = new.spread(whole, topology), False


def _to_host(x: jax.Array) -> tuple[np.ndarray, Any]:
    """Return a copy of a mirrored array, and the implementation of random keys or None."""
    local = first(x)
    is_keys = jnp.issubdtype(local.dtype, jax.dtypes.prng_key)
    return np.array(on_host(local)), jax.random.key_impl(local) if is_keys else None


def _from_host(array: np.ndarray, keys: Any) -> jax.Array:
    x = jnp.asarray(array)
    return x if keys is None else jax.random.wrap_key_data(x, impl=keys)


def _move_strategies() -> None:
    for strategy in list(live_strategies):
        strategy.host_driven_programs.clear()
        strategy.host_driven_runs.clear()
        strategy.ragged_runs.clear()
        move = getattr(strategy, "move_to_workers", None)
        if move is not None:
            move()


def _tell_users() -> None:
    for strategy in list(live_strategies):
        for call in list(getattr(strategy, "resize_callbacks", ())):
            call(strategy)


_moved = _Moved()
_USERS = elastic.SERVICES + 1
elastic.check.register(elastic.VALUES, _check)
elastic.check_join.register(elastic.VALUES, _check_join)
elastic.before.register(elastic.VALUES, _moved.save)
elastic.after.register(elastic.DEVICES, _move_strategies)
elastic.after.register(elastic.VALUES, _moved.restore)
elastic.after.register(_USERS, _tell_users)
