"""Steps of an elastic run in functions: repeat them without a lost worker, run them in Python.

A compiled program commits its step in two phases by itself; see `replicax._src.workers.elastic`. A
call that Python runs, because the replicas' batches have different sizes for example, is a step as
a whole: `run_as_step` undoes its changes if a worker is lost before all workers have finished it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax._src.base.threads import deferred_signals
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.context.current import current
from replicax._src.state.cell import Cell, on_host, run_atomically, variable_lock
from replicax._src.values.origins import is_rebuildable, rebuilt
from replicax._src.values.per_replica import is_opaque
from replicax._src.workers import elastic
from replicax._src.workers.group import required
from replicax._src.workers.watchdog import load

_MAX_COPIED_BYTES = 1 << 18  # of values of single replicas, which the hub sends to all workers


def repeat_if_interrupted(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return ``call(args, kwargs)``; if a worker of an elastic run is lost, call it again.

    Arguments that were divided over the workers are divided over those that are left.
    """
    if not elastic.is_on():
        return call(args, kwargs)
    with elastic.call():
        return _repeat(call, args, kwargs)


def _repeat(
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    while True:
        before = elastic.completed()
        try:
            return call(args, kwargs)
        except elastic.StepInterrupted as interrupted:
            check = functools.partial(_check_movable, args, kwargs)
            recovery = elastic.recover(interrupted, before, check)
        elastic.free_old_backends()  # the frames of the exception, which is gone now, had arrays
        if recovery.is_committed:
            return recovery.result
        if any(map(is_rebuildable, jax.tree.leaves((args, kwargs), is_leaf=is_opaque))):
            args, kwargs = jax.tree.map(rebuilt, (args, kwargs), is_leaf=is_opaque)


def _check_movable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if an argument would lose the part that a lost worker had.

    Raises:
        CannotResizeError: If so.
    """
    for x in jax.tree.leaves((args, kwargs), is_leaf=is_opaque):
        is_array = isinstance(x, jax.Array) and not is_opaque(x)
        is_divided = is_array and not x.is_fully_addressable and not x.is_fully_replicated
        if is_divided and not is_rebuildable(x):
            raise elastic.CannotResizeError(
                f"An argument of shape {x.shape} is divided over the workers, and the lost worker"
                " had a part of it."
            )


def run_as_step(run: Callable[[], Any]) -> Any:
    """Return ``run()``, code of a function in Python; in an elastic run, as one step.

    Raises:
        StepInterrupted: If a worker was lost; the variables and iterators are unchanged.
    """
    if not elastic.is_supported() or current().journal is not None or current().level is not None:
        return run()
    return run_atomically(lambda: _PythonStep().run(run))


class _PythonStep:
    """One call of a function that Python runs; its variables are in the journal of the frame."""

    def __init__(self) -> None:
        self._journal = current().journal
        # Elements that the call takes stay in their iterators until the step is committed.
        self._journal.taken = {}
        self._collectives, self._steps = elastic.completed(), load.steps

    def run(self, run: Callable[[], Any]) -> Any:
        """Run the call, wait for the other workers, and commit."""
        try:
            result = run()
        except WorkerLostError as error:
            raise self._interruption(error) from error
        if elastic.completed() == self._collectives:  # only this worker may have called it
            self._consume()
            return result
        new = {cell: cell.value for cell in self._journal}
        try:
            self._share_copies([cell for cell in new if cell.per_replica])
        except WorkerLostError as error:
            interrupted = self._interruption(error)
            # Without the values of the other replicas the step cannot be committed.
            if isinstance(interrupted, elastic.StepInterrupted) and not any(
                cell.per_replica for cell in new
            ):
                interrupted.commit = functools.partial(self._commit, new, result)
            raise interrupted from error
        self._consume()
        return result

    def _interruption(self, error: WorkerLostError) -> WorkerLostError:
        """Return the error to raise for a lost worker."""
        load.steps = self._steps
        return elastic.interruption(error) if self._journal.is_repeatable else error

    def _share_copies(self, cells: list[Cell]) -> None:
        """Wait for the other workers, and exchange the values of single replicas with them.

        A resize needs the values of all replicas. Large ones are not exchanged: then a lost worker
        means a restart.
        """
        mine = {cell.name: [on_host(x) for x in cell.pieces()] for cell in cells}
        size = sum(x.nbytes for copies in mine.values() for x in copies)
        is_exchanged = len(mine) == len(cells) and size <= _MAX_COPIED_BYTES
        encoded = {name: [x.tobytes().hex() for x in copies] for name, copies in mine.items()}
        answers = required().agree("the end of a step", encoded if is_exchanged else {})
        for cell in cells:
            if all(cell.name in answer for answer in answers):
                texts = [text for answer in answers for text in answer[cell.name]]
                cell.note_copies(functools.partial(_stacked, cell, texts))

    def _commit(self, new: dict[Cell, Any], result: Any) -> Any:
        """Store the values of an undone step after all, and return its result."""
        with deferred_signals, variable_lock:
            for cell, value in new.items():
                cell.value, cell.owned = value, False
            self._consume()
        load.steps = self._steps + 1
        return result

    def _consume(self) -> None:
        with deferred_signals:
            for iterator, count in self._journal.taken.items():
                iterator.consume(count)


def _stacked(cell: Cell, texts: list[str]) -> np.ndarray:
    rows = [np.frombuffer(bytes.fromhex(text), cell.dtype).reshape(cell.shape) for text in texts]
    return np.stack(rows)
