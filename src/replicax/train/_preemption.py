"""Preemption: a machine that will be taken away -> one checkpoint of all workers, and the end.

All workers save between the same two steps. Whoever is told (by SIGTERM, SIGUSR1 or SIGUSR2) tells
the others through a thread beside the training; then each holds its next step until it is known how
many steps any of them has begun. That is where all save: a step that one worker has begun needs the
others, and nobody can begin a later one meanwhile. A step that does not end, as its input does not
come, is given up after some time: the program ends with the commits that there are.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from replicax._errors import ReplicaxError
from replicax.cluster import _requeue
from replicax.state._variable import Variable
from replicax.train._checkpoint import Checkpoint, finish_all
from replicax.train._manager import CheckpointManager
from replicax.train._reader import log
from replicax.workers import _group, _leases

# SIGUSR1 and SIGUSR2 are what Slurm sends ahead of the end: `--signal=USR1@90`, submitit's USR2.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_OTHERWISE = -1  # no signal, but the program itself said that the run is to end
_RUNS = "checkpointed_runs"  # TensorFlow's name
PREEMPTED = 128 + signal.SIGTERM
_ASK_EVERY = 0.25  # seconds between two questions to the other workers
_GRACE = 60.0  # seconds that the step may take in which the end was announced
_LAST_RESORT = 5.0  # how long Python may take after them to get out of what it does


class Notice:
    """Whether this run is to end, and after which step.

    Args:
        is_told: Says whether the machine will be taken away; by default SIGTERM says so, and
            SIGUSR1 and SIGUSR2 if nothing else handles them.
        grace: After how many seconds a step that does not end is given up; `replicax launch` waits
            as long for it, and again for the save.
    """

    def __init__(self, is_told: Callable[[], bool] | None = None, *, grace: float = _GRACE) -> None:
        self._is_told = is_told
        self._grace = grace
        self._signalled = 0  # the number of the signal that announced the end
        self._requeues = _requeue.is_asked()
        self._announced, self._reached = threading.Event(), threading.Event()
        self._is_late = self._is_saving = False
        self._begun = 0
        self._stop_at: int | None = None
        self._holds = False
        self._is_closed = False
        self._changed = threading.Condition()
        self._before: dict[int, Any] = {}
        if is_told is None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, *filter(_may_handle, _WARNINGS)):
                self._before[number] = signal.signal(number, self._on_signal)
            self._clock = threading.Thread(
                target=self._give_up, name="replicax-preemption-clock", daemon=True
            )
            self._clock.start()
        group = _group.current()
        self._thread: threading.Thread | None = None
        if group is not None or is_told is not None:
            self._thread = threading.Thread(
                target=self._watch,
                args=(group, 0 if group is None else group.new_feed()),
                name="replicax-preemption",
                daemon=True,
            )
            self._thread.start()

    def is_due(self) -> bool:
        """Between two steps: whether all workers save and end here. Otherwise a step begins."""
        is_due = self._is_at_the_end()
        if is_due:
            _leases.take(self._grace, "saving its last checkpoint")
            self._is_saving = True
            self._reached.set()
        return is_due

    def _is_at_the_end(self) -> bool:
        with self._changed:
            if self._thread is None:
                return bool(self._signalled)
            self._changed.wait_for(lambda: not self._holds)
            if self._stop_at is not None and self._begun >= self._stop_at:
                return True
            self._begun += 1
            return False

    def close(self) -> None:
        """Stop listening."""
        if self._is_saving:
            _leases.take(_LAST_RESORT, "ending, after its last checkpoint")
            self._is_saving = False
        self._is_closed = True
        self._reached.set()
        self._announced.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def finish(self) -> None:
        """After the save, which is in place on all workers: requeue the job if that was asked for.

        A handler of submitit's is called, which requeues in its own way.
        """
        group = _group.current()
        handler = self._before.get(self._signalled)
        if self._signalled in _WARNINGS and callable(handler):
            handler(self._signalled, None)
        elif self._requeues and (group is None or group.facts.index == 0):
            self._requeue()

    def _requeue(self) -> None:
        if self._signalled not in _WARNINGS and not _requeue.has_timed_out():
            log.warning(
                "Slurm job %s is not requeued: SIGTERM may be `scancel`. Slurm itself requeues a"
                " job that it preempts; `--signal=USR1@90` announces the end of its time.",
                _requeue.job(),
            )
        elif fault := _requeue.requeue():
            log.error("Slurm job %s could not be requeued: %s", _requeue.job(), fault)
        else:
            log.warning("Slurm job %s is requeued.", _requeue.job())

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._is_late and not self._reached.is_set():
            _exit()
        if not self._signalled:
            self._signalled = number
            log.warning("%s: saving after this step, then ending.", signal.Signals(number).name)
            self._announced.set()

    def _give_up(self) -> None:
        """End the program if the step does not."""
        self._announced.wait()
        if self._is_closed:
            return
        _leases.take(self._grace + _LAST_RESORT, "finishing its step before it saves")
        if self._reached.wait(self._grace):
            return
        log.warning(
            "The step in which the end was announced has not ended in %g s. The program ends with"
            " the commits that there are; the steps since the last one will be done again.",
            self._grace,
        )
        self._is_late = True
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)
        if not self._reached.wait(_LAST_RESORT):  # not in Python: a collective, or a compilation
            finish_all()
            os._exit(PREEMPTED)

    def _noticed(self) -> int:
        is_told = self._is_told is not None and bool(self._is_told())
        return self._signalled or (_OTHERWISE if is_told else 0)

    def _watch(self, group: _group.Group | None, ticket: int) -> None:
        def of_all(what: Any, value: Any, is_cancelled: Callable[[], bool]) -> list[Any]:
            if group is None:
                return [value]
            return group.exchange(f"preemption {ticket} {what}", value, is_cancelled)

        asked = 0
        try:
            while not any(seen := of_all(asked, self._noticed(), lambda: self._is_closed)):
                asked += 1
                time.sleep(_ASK_EVERY)
                if self._is_closed:
                    raise _group.Cancelled
            # One reason for all: a warning of Slurm's counts more than what may have followed it.
            self._signalled = min(filter(None, seen), key=lambda n: (n not in _WARNINGS, n))
            self._announced.set()
            with self._changed:
                self._holds = True
                begun = self._begun
            # Never taken back: the others hold their steps until they know it.
            self._stop_at = max(of_all("begun", begun, lambda: False))
        except _group.Cancelled:
            if group is not None:  # they may have heard "now" in this very moment
                group.offer(f"preemption {ticket} begun", self._begun)
        except ReplicaxError:
            pass  # the training itself will say that a worker is gone
        finally:
            with self._changed:
                self._holds = False
                self._changed.notify_all()


@dataclass(frozen=True)
class TerminationConfig:
    """How `PreemptionCheckpointHandler` learns that the run is to end, and what it does then.

    Args:
        termination_watcher_fn: Returns True when the machine will be taken away; by default
            SIGTERM, SIGUSR1 and SIGUSR2 say so.
        exit_fn: Called after the save; by default the process ends with code 143, which
            `replicax launch` knows.
        grace_period: Accepted for TensorFlow's sake: the save is made at once, which is never too
            late.
        save_fn: Called in place of the checkpoint's own save.

    Example:
        >>> rx.train.TerminationConfig(exit_fn=lambda: None).grace_period is None
        True
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None


class PreemptionCheckpointHandler:
    """Restores the newest checkpoint at the start, and saves one when the run is to end.

    Args:
        cluster_resolver: Accepted for TensorFlow's sake.
        checkpoint_or_checkpoint_manager: What to save.
        checkpoint_dir: Where; not needed for a manager, which knows.
        termination_config: How the end is announced, and what happens then.

    Example:
        >>> import tempfile
        >>> step = rx.Variable(0)
        >>> handler = rx.train.PreemptionCheckpointHandler(
        ...     None, rx.train.Checkpoint(step=step), tempfile.mkdtemp()
        ... )
        >>> handler.run(lambda: int(step.assign_add(1).numpy()))
        1
        >>> handler.total_run_calls
        1
        >>> handler.close()
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._config = termination_config or TerminationConfig()
        checkpoint = self._manager.checkpoint
        if not hasattr(checkpoint, _RUNS):
            setattr(checkpoint, _RUNS, Variable(0, trainable=False, name=_RUNS))
        runs: Variable = getattr(checkpoint, _RUNS)
        self._manager.restore_or_initialize()
        self._calls = int(runs.numpy())
        checkpoint.call_before_save(lambda: runs.assign(self._calls))
        self._notice = Notice(self._config.termination_watcher_fn)

    @property
    def total_run_calls(self) -> int:
        """How many calls of `run` have ended, with those of the runs that this one goes on with."""
        return self._calls

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function; before that, save and end if the run is to end.

        Returns:
            What the function returned.
        """
        self.save_checkpoint_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Between two steps: save and end if the run is to end; all workers at the same step."""
        if not self._notice.is_due():
            return
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._manager.save(check_interval=False)
        self._notice.finish()
        self.close()
        (self._config.exit_fn or _exit)()

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Accepted for TensorFlow's sake: it always watches."""
        yield

    def close(self) -> None:
        """Stop listening for the end."""
        self._notice.close()


def _manager(given: Checkpoint | CheckpointManager, directory: str | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        return given
    if directory is None:
        raise ValueError(
            "PreemptionCheckpointHandler needs `checkpoint_dir`: the folder for the checkpoint. Or"
            " pass a CheckpointManager, which has one."
        )
    return CheckpointManager(given, directory, max_to_keep=1)


def _exit() -> None:
    sys.exit(PREEMPTED)


def _may_handle(number: signal.Signals) -> bool:
    """Whether nothing else handles a signal, such as `faulthandler`; or submitit, which we call."""
    handler = signal.getsignal(number)
    if handler is not signal.SIG_DFL:
        return str(getattr(handler, "__module__", "")).partition(".")[0] == "submitit"
    try:
        status = Path("/proc/self/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return True
    return not int(caught.split()[1], 16) >> (number - 1) & 1


class Resumable:
    """Makes a training loop restartable: one commit of everything, found again at the start.

    Model, optimizer, random state, counters, metrics and the position in the data are saved
    together, between two steps; a run that is killed at any moment and started again goes on from
    the last commit as if nothing had happened. SIGTERM saves once more, at one step on all workers,
    and ends the program with code 143, which `replicax launch` knows; so do SIGUSR1 and SIGUSR2,
    which Slurm sends ahead of the end, if the program does not handle them. With
    ``REPLICAX_REQUEUE=1`` they requeue the Slurm job, too.

    Attributes:
        restored: The commit that was found at the start, or None.
        restarts: How often Slurm (``SLURM_RESTART_COUNT``) and the launcher have started this run
            again.

    Args:
        directory: Where the commits are.
        every: How many steps lie between two commits.
        max_to_keep: How many are kept.
        grace: How many seconds the step may take in which SIGTERM comes. One that takes longer, as
            its input does not come, is given up: the program ends with the commits that there are.
            `replicax launch` waits as long for the step, and again for the save.
        **objects: What a step changes: variables, models, optimizers, metrics, iterators.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> def train(until):
        ...     step, total = rx.Variable(0), rx.Variable(0)
        ...     batches = iter(rx.data.Dataset.range(100))
        ...     state = {"step": step, "total": total, "data": batches}
        ...     with rx.train.Resumable(folder, every=2, **state) as run:
        ...         while int(step) < until:
        ...             total.assign_add(int(next(batches)))
        ...             step.assign_add(1)
        ...             run.step()
        ...     return int(total)
        >>> train(4)  # 0 + 1 + 2 + 3
        6
        >>> train(6)  # goes on with 4 and 5
        15
    """

    def __init__(
        self,
        directory: str,
        every: int,
        *,
        max_to_keep: int = 2,
        grace: float = _GRACE,
        **objects: Any,
    ) -> None:
        if every < 1:
            raise ValueError(f"Resumable(every={every}): a number of steps, 1 or more.")
        self._every = every
        self._since = 0
        self._manager = CheckpointManager(Checkpoint(**objects), directory, max_to_keep)
        self.restored = self._manager.restore_or_initialize()
        self.restarts = _requeue.restarts()
        if self.restarts:
            log.warning(
                "restart %d: %s", self.restarts, self.restored or "no commit yet, from the start"
            )
        self._notice = Notice(grace=grace)
        self._notice.is_due()  # the first step begins

    def step(self) -> None:
        """Say that a step has ended: commit if it is time, and end if the run is to end."""
        self._since += 1
        is_due = self._notice.is_due()
        if is_due or self._since >= self._every:
            self._since = 0
            self._manager.save(block=is_due)
        if is_due:
            self._notice.finish()  # while a second signal still does no harm
            self.close()
            _exit()

    def commit(self) -> str | None:
        """Commit now; the path."""
        self._since = 0
        return self._manager.save()

    def close(self) -> None:
        """Wait for the last commit and stop listening for the end."""
        self._notice.close()
        self._manager.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
