"""Preemption: save one checkpoint on all workers when the run is about to be terminated.

All workers must save after the same step. A worker that is notified (by SIGTERM, SIGUSR1 or
SIGUSR2) informs the others through a background thread. Every worker then blocks before its next
step until all have reported how many steps they have started. All save after the highest of these
numbers: a step that one worker has started needs the others, and no worker can start a later one
meanwhile. In the same way the workers of an elastic run agree on the step after which a worker
joins. A step that does not finish, for example because its input hangs, is abandoned after a grace
period, and the program exits with the checkpoints that exist.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from replicax._src.base.errors import ReplicaxError
from replicax._src.cluster import requeue
from replicax._src.state.variable import Variable
from replicax._src.train.checkpoint import Checkpoint, finish_all
from replicax._src.train.manager import CheckpointManager
from replicax._src.train.reader import log
from replicax._src.workers import elastic, leases, start
from replicax._src.workers import group as _group
from replicax._src.workers.settings import TOO_FEW

# Slurm sends SIGUSR1 before the time limit with `--signal=USR1@90`; submitit requests SIGUSR2.
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
_OTHERWISE = -1  # stands in for the signal number if `is_preempted` returned True
_OF_ALL = 1000  # added to the signal number if the launcher sends it to all workers
_JOINS = -2  # stands in for it if a worker waits to join
_HOLDS = -3  # stands in for it if there are too few workers
_RUNS = "checkpointed_runs"  # TensorFlow's name
PREEMPTED = 128 + signal.SIGTERM  # the exit code
_ASK_EVERY = 0.25  # seconds between two exchanges with the other workers
_SETTLE = 0.5  # seconds in which a signal reaches all workers that it is for
_GRACE = 60.0  # seconds that the current step may take after the notification
_LAST_RESORT = 5.0  # seconds after that for Python to handle the signal


class Notice:
    """A listener for preemption, which agrees with all workers on the last step.

    Args:
        is_preempted: Returns whether the run must end; by default SIGTERM triggers it, and
            SIGUSR1 and SIGUSR2 if nothing else handles them.
        grace: Seconds after which a step that does not finish is abandoned; `replicax launch`
            waits as long for the step, and again for the save.
        manager: Writes the state for workers that join; None if they cannot join.
        why_closed: Returns why no worker can join between these two steps; "" if one can.
    """

    def __init__(
        self,
        is_preempted: Callable[[], bool] | None = None,
        *,
        grace: float = _GRACE,
        manager: CheckpointManager | None = None,
        why_closed: Callable[[], str] = lambda: "",
    ) -> None:
        self._manager = manager
        self._why_not = why_closed
        self._resize: Callable[[], None] | None = None  # what to do at `_stop_at` instead of ending
        self.joins = 0  # how often workers have joined
        self._is_preempted = is_preempted
        self._grace = grace
        self._signalled = 0  # the number of the signal that triggered the preemption
        self._requeues = requeue.is_asked()
        self._announced, self._reached = threading.Event(), threading.Event()
        self._is_late = self._is_saving = False
        self._begun = 0
        self._stop_at: int | None = None
        self._holds = False
        self.is_closed = False
        self._changed = threading.Condition()
        self._before: dict[int, Any] = {}
        if is_preempted is None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, *filter(_may_handle, _WARNINGS)):
                self._before[number] = signal.signal(number, self._on_signal)
            self._clock = threading.Thread(
                target=self._give_up, name="replicax-preemption-clock", daemon=True
            )
            self._clock.start()
        self._thread: threading.Thread | None = None
        self._offer_to_wait(can_wait=manager is not None)
        self._start_watching()
        if elastic.is_on():
            _notices.append(weakref.ref(self))

    def _offer_to_wait(self, *, can_wait: bool) -> None:
        group = _group.current()
        if group is not None and self._manager is not None:
            group.offer_to_wait(can_wait=can_wait)

    def _start_watching(self) -> None:
        """Start the thread that watches for a preemption of any worker."""
        group = _group.current()
        if group is not None or self._is_preempted is not None:
            self._thread = threading.Thread(
                target=self._watch,
                args=(group, 0 if group is None else group.new_ticket()),
                name="replicax-preemption",
                daemon=True,
            )
            self._thread.start()

    def watch_again(self, *, counts_again: bool = False) -> None:
        """Watch the workers of an elastic run again: the thread has ended.

        Args:
            counts_again: Whether all workers are between the same two steps, from which they count.
        """
        if not self.is_closed:
            assert self._thread is not None
            self._thread.join()
            self._stop_at = self._resize = None
            if counts_again:
                self._begun = 0
                self.joins += 1
            self._start_watching()

    def is_due(self) -> bool:
        """Whether all workers must save and exit now; call between two steps.

        If False, the next step counts as started. Blocks while the workers agree on the last step,
        and while they re-form because a worker joins or leaves.
        """
        while (is_due := self._is_at_the_end()) and self._resize is not None:
            self._resize()
        if is_due:
            leases.take(self._grace, "saving its last checkpoint")
            self._is_saving = True
            self._reached.set()
        return is_due

    def _is_at_the_end(self) -> bool:
        with self._changed:
            if self._thread is None:
                return bool(self._signalled)
            # No step may begin here while the workers agree on the last one.
            self._changed.wait_for(lambda: not self._holds)
            if self._stop_at is not None and self._begun >= self._stop_at:
                return True
            self._begun += 1
            return False

    def close(self) -> None:
        """Stop listening, and restore the previous signal handlers."""
        if self._is_saving:
            leases.take(_LAST_RESORT, "ending, after its last checkpoint")
            self._is_saving = False
        self.is_closed = True
        self._offer_to_wait(can_wait=False)
        self._reached.set()
        self._announced.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:  # the program may have set another
                signal.signal(number, handler)

    def finish(self) -> None:
        """Requeue the Slurm job if requested; call after the save is committed on all workers.

        If submitit had installed a handler for the signal, call that, which requeues the job.
        """
        group = _group.current()
        handler = self._before.get(self._signalled)
        if self._signalled in _WARNINGS and callable(handler):
            handler(self._signalled, None)
        elif self._requeues and (group is None or group.facts.index == 0):
            self._requeue()

    def _requeue(self) -> None:
        if self._signalled not in _WARNINGS and not requeue.has_timed_out():
            log.warning(
                "Slurm job %s is not requeued: SIGTERM may be `scancel`. Slurm itself requeues a"
                " job that it preempts; `--signal=USR1@90` announces the end of its time.",
                requeue.job(),
            )
        elif fault := requeue.requeue():
            log.error("Slurm job %s could not be requeued: %s", requeue.job(), fault)
        else:
            log.warning("Slurm job %s is requeued.", requeue.job())

    def _on_signal(self, number: int, frame: Any) -> None:
        # Only note the signal, in the middle of a step: `is_due` acts between two steps.
        if self._is_late and not self._reached.is_set():  # sent by `_give_up`
            exit_preempted()
        if not self._signalled:
            self._signalled = number
            log.warning("%s: saving after this step, then ending.", signal.Signals(number).name)
            self._announced.set()

    def _give_up(self) -> None:
        """Exit the program if the current step does not finish within the grace period.

        Runs in a thread. It signals the main thread first, which unwinds Python; a main thread
        that is blocked in native code cannot be interrupted, and the process is ended.
        """
        self._announced.wait()
        if self.is_closed:
            return
        leases.take(self._grace + _LAST_RESORT, "finishing its step before it saves")
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
        if not self._reached.wait(_LAST_RESORT):  # in native code: a collective or a compilation
            finish_all()
            os._exit(PREEMPTED)

    def _reason(self) -> int:
        if self._signalled:
            return self._signalled + _OF_ALL * leases.are_all_ending()
        if self._is_preempted is not None and bool(self._is_preempted()):
            return _OTHERWISE
        if (group := _group.current()) is None or self._manager is None:
            return 0
        return _HOLDS if group.holds else _JOINS if group.has_newcomers else 0

    def _final_reasons(self, seen: list[int], gather: Callable[..., list[int]]) -> list[int]:
        """Return the reasons of all workers, once a signal has had time to reach all of them."""
        if not self._leaving(seen):
            return seen
        # A scheduler signals the workers of a job one by one: what looks like the preemption of one
        # may be the end of all.
        time.sleep(_SETTLE)
        return gather("settled", self._reason(), lambda: False)

    def _leaving(self, seen: list[int]) -> list[int]:
        """Return the preempted workers that leave the others; none if the whole run ends.

        Args:
            seen: The reason of each worker to end, or 0.
        """
        group = _group.current()
        if self._manager is None or group is None or not group.is_elastic:
            return []
        if any(n >= _OF_ALL or n in _WARNINGS for n in seen):
            return []
        leaving = [i for i, n in enumerate(seen) if n and n not in (_JOINS, _HOLDS)]
        return leaving if len(seen) - len(leaving) >= max(1, group.least) else []

    def _decide(self, seen: list[int]) -> None:
        """Decide what to do after the step on which the workers agree next."""
        leaving = self._leaving(seen)
        if set(seen) <= {0, _JOINS, _HOLDS}:
            self._resize = self._wait_for_workers if _HOLDS in seen else self._let_join
        elif leaving:
            self._resize = partial(self._part, leaving, seen)
        else:
            self._end_all(seen)

    def _end_all(self, seen: list[int]) -> None:
        """Announce that all workers save and end, for one of the reasons ``seen``."""
        # All workers use the same reason; Slurm's warning takes precedence over later signals.
        reasons = (n % _OF_ALL if n > 0 else n for n in seen if n and n > _JOINS)
        self._signalled = min(reasons, key=lambda n: (n not in _WARNINGS, n))
        self._announced.set()

    def _part(self, leaving: list[int], seen: list[int]) -> None:
        """Leave the others, which go on, if this worker is among those ``leaving``.

        If the others cannot go on without it, all save and end.
        """
        group, manager = _group.required(), self._manager
        assert manager is not None

        def prepare() -> str | None:
            why = next(filter(None, group.agree("who may leave", _why_fixed())), "")
            if why:
                log.warning("A worker was preempted, and all end, with a checkpoint. %s", why)
                return None
            manager.sync()  # a worker that leaves must have written its part of a checkpoint
            if group.facts.index in leaving:
                log.warning("This worker was preempted: it leaves the others, which go on.")
                group.say_goodbye()
                self.close()
                exit_preempted()
            return ""

        # If another worker is lost meanwhile, all re-form, and agree again on who leaves.
        if not start.regroup(group, "A worker was preempted.", prepare):
            self._end_all(seen)
            self._resize, self._stop_at = None, 0  # now

    def _wait_for_workers(self) -> None:
        """Commit, and wait until enough workers have joined; end the program if they do not."""
        group, manager = _group.required(), self._manager
        assert manager is not None

        def commit_and_wait() -> None:
            path = manager.save(check_interval=False)
            log.warning("There are too few workers: waiting for others to join. Saved %s.", path)
            if not group.wait_for_newcomers():
                log.warning("%s", group.too_few)
                group.leave()
                self.close()
                sys.exit(TOO_FEW)

        self._let_join(commit_and_wait)

    def _let_join(self, first: Callable[[], None] = lambda: None) -> None:
        """Hand the state over to the workers that wait, and re-form with them.

        Args:
            first: Called before the state is saved.
        """
        group = _group.required()
        places: list[str] = []

        def prepare() -> str | None:
            assert self._manager is not None
            first()
            why, place = self._why_closed(group)
            if not why:
                places.append(place)
                self._manager.sync()
                try:
                    self._manager.hand_over(place)
                except OSError as error:  # on all workers
                    log.warning("The state for the workers that join was not written. %s", error)
                    why = f"The state could not be written. {error}"
            if why:
                group.refuse_newcomers(why)
                return None
            return place

        if not start.regroup(group, "A worker joins.", prepare):
            self.watch_again()
        if group.facts.index == 0 and self._manager is not None:
            for place in places:
                self._manager.discard_state(place)

    def _why_closed(self, group: _group.Group) -> tuple[str, str]:
        """Return why no worker can join, "" if one can; and where to put the state for it.

        Both are the same on all workers.
        """
        why = _why_fixed() or self._why_not()
        try:
            elastic.check_join.run()
        except elastic.CannotResizeError as error:
            why = str(error)
        if self._manager is None or sum(1 for one in _notices if _is_open(one())) > 1:
            why = "The program does not have one `rx.train.Resumable` for its whole state."
        # The hosts of a run share the folder of the checkpoints only.
        folder = os.environ[leases.VARIABLE] if start.is_local(group.facts) else "joining"
        place = os.path.join(folder, f"state-{group.generation}")
        answers = group.agree("the workers that join", [why, place])
        return next((why for why, _ in answers if why), ""), answers[0][1]

    def _watch(self, group: _group.Group | None, ticket: int) -> None:
        """Wait until a worker is preempted, then agree with all workers on the last step."""
        is_outdated = _generation_check(group)

        def gather(what: Any, value: Any, is_cancelled: Callable[[], bool]) -> list[Any]:
            if group is None:
                return [value]
            key = f"preemption {ticket} {what}"
            return group.exchange(key, value, lambda: is_cancelled() or is_outdated())

        asked = 0
        try:
            while not any(seen := gather(asked, self._reason(), lambda: self.is_closed)):
                asked += 1
                time.sleep(_ASK_EVERY)
                if self.is_closed or is_outdated():
                    raise _group.Cancelled
            self._decide(self._final_reasons(seen, gather))
            with self._changed:
                self._holds = True
                begun = self._begun
            # This exchange is never cancelled: the others block until they have our number.
            self._stop_at = max(gather("begun", begun, lambda: False))
        except _group.Cancelled:
            # The others may have been notified at the same moment.
            if group is not None and not is_outdated():
                group.offer(f"preemption {ticket} begun", self._begun)
        except ReplicaxError:
            pass  # the training loop itself will raise that a worker is lost
        finally:
            with self._changed:
                self._holds = False
                self._changed.notify_all()


def _why_fixed() -> str:
    """Return why this worker cannot move its state to another number of workers; "" if it can."""
    try:
        elastic.check.run()
    except elastic.CannotResizeError as error:
        return str(error)
    return ""


def _generation_check(group: _group.Group | None) -> Callable[[], bool]:
    """Return a function that returns whether the workers have changed since this call."""
    generation = 0 if group is None else group.generation
    return lambda: group is not None and group.generation != generation


_notices: list[weakref.ref[Notice]] = []  # in the order of their creation


def _is_open(notice: Notice | None) -> bool:
    return notice is not None and not notice.is_closed


def _watch_again() -> None:
    # Workers that have joined count from here. Without them, the numbers must stay as they are: a
    # loss may have interrupted some workers within a step, and others after it.
    has_joined = _group.required().has_joined
    for reference in _notices:
        if (notice := reference()) is not None:
            notice.watch_again(counts_again=has_joined)


elastic.after.register(elastic.SERVICES, _watch_again)


@dataclass(frozen=True)
class TerminationConfig:
    """How `PreemptionCheckpointHandler` detects a preemption, and how it responds.

    Args:
        termination_watcher_fn: Returns True when the machine is about to be preempted; by default
            SIGTERM, SIGUSR1 and SIGUSR2 are handled.
        exit_fn: Called after the save; by default the process exits with code 143, which
            `replicax launch` recognizes.
        grace_period: Accepted for compatibility with TensorFlow: the checkpoint is always saved
            immediately.
        save_fn: Called instead of the checkpoint's own save.

    Example:
        >>> rx.train.TerminationConfig(exit_fn=lambda: None).grace_period is None
        True
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None


class PreemptionCheckpointHandler:
    """Restores the newest checkpoint at the start, and saves one when the run is preempted.

    Args:
        cluster_resolver: Accepted for compatibility with TensorFlow.
        checkpoint_or_checkpoint_manager: The checkpoint to save, or its manager.
        checkpoint_dir: The directory to save into; not needed with a manager.
        termination_config: How a preemption is detected, and the response to it.

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
        restore_or_join(self._manager)
        self._calls = int(runs.numpy())
        checkpoint.call_before_save(lambda: runs.assign(self._calls))
        self._notice = Notice(self._config.termination_watcher_fn, manager=self._manager)

    @property
    def total_run_calls(self) -> int:
        """The number of completed calls of `run`, including those before a restart."""
        return self._calls

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function; if the run was preempted, save and exit instead.

        Returns:
            The function's result.
        """
        self.save_checkpoint_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self._calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and exit if the run was preempted, on all workers after the same step.

        Call it between two steps.
        """
        if not self._notice.is_due():
            return
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        else:
            self._manager.save(check_interval=False)
        self._notice.finish()
        self.close()
        (self._config.exit_fn or exit_preempted)()

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Do nothing: the handler always watches. For compatibility with TensorFlow."""
        yield

    def close(self) -> None:
        """Stop listening for preemption."""
        self._notice.close()


def _manager(target: Checkpoint | CheckpointManager, directory: str | None) -> CheckpointManager:
    if isinstance(target, CheckpointManager):
        return target
    if directory is None:
        raise ValueError(
            "PreemptionCheckpointHandler needs `checkpoint_dir`: the folder for the checkpoint. Or"
            " pass a CheckpointManager, which has one."
        )
    return CheckpointManager(target, directory, max_to_keep=1)


def restore_or_join(manager: CheckpointManager) -> str | None:
    """Restore the newest checkpoint, or the state of the run that this worker joins."""
    group = _group.current()
    if group is None or not group.is_joining:
        return manager.restore_or_initialize()
    start.take_over(group, manager.take_over)
    log.warning("joined: there are %d workers.", group.facts.num_workers)
    return None


def exit_preempted() -> None:
    """End the program after its last checkpoint."""
    sys.exit(PREEMPTED)


def _may_handle(number: signal.Signals) -> bool:
    """Whether a signal has no handler yet, or submitit's, which `Notice.finish` calls."""
    handler = signal.getsignal(number)
    if handler is not signal.SIG_DFL:
        return str(getattr(handler, "__module__", "")).partition(".")[0] == "submitit"
    # Handlers installed in C, such as `faulthandler`'s, are visible only to the kernel.
    try:
        status = Path("/proc/self/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return True
    return not int(caught.split()[1], 16) >> (number - 1) & 1


class Resumable:
    """Makes a training loop resumable: commits its whole state, and restores it at the start.

    Model, optimizer, random state, counters, metrics and the position in the data are saved
    atomically between two steps. A run that is killed at any moment and restarted continues from
    the last commit as if it had not been interrupted. On SIGTERM, all workers commit after the
    same step and exit with code 143, which `replicax launch` recognizes; SIGUSR1 and SIGUSR2,
    which Slurm can send before the time limit, do the same unless the program handles them. With
    ``REPLICAX_REQUEUE=1`` they also requeue the Slurm job.

    Attributes:
        restored: The path of the commit that was restored at the start, or None.
        restarts: How often Slurm (``SLURM_RESTART_COUNT``) and the launcher have restarted this
            run.

    Args:
        directory: The directory of the commits.
        every: The number of steps between two commits.
        max_to_keep: How many commits to keep.
        grace: How many seconds the current step may take after SIGTERM. A step that takes longer,
            for example because its input hangs, is abandoned, and the program exits with the
            commits that exist. `replicax launch` waits as long for the step, and again for the
            save.
        **objects: The state that a step changes: variables, models, optimizers, metrics,
            iterators.

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
        >>> train(6)  # continues with 4 and 5
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
        self.restored = restore_or_join(self._manager)
        self.restarts = requeue.restarts()
        if self.restarts:
            log.warning(
                "restart %d: %s", self.restarts, self.restored or "no commit yet, from the start"
            )
        self._notice = Notice(grace=grace, manager=self._manager)
        group = _group.current()
        has_joined = group is not None and group.generation > 0
        is_due = self._notice.is_due()  # the first step begins
        if has_joined and is_due:  # the others save now
            self._commit(is_due=True)

    def step(self) -> None:
        """Mark the end of a step: commit if it is due, and exit if the run was preempted."""
        self._since += 1
        joins = self._notice.joins
        is_due = self._notice.is_due()
        if joins != self._notice.joins:
            self._since = 0  # a worker that has joined counts from here
        self._commit(is_due=is_due)

    def _commit(self, *, is_due: bool) -> None:
        """Commit after every few steps; if the run was preempted, commit and exit."""
        if is_due or self._since >= self._every:
            self._since = 0
            self._manager.save(block=is_due)
        if is_due:
            self._notice.finish()  # before `close`, after which a second signal would kill us
            self.close()
            exit_preempted()

    def commit(self) -> str | None:
        """Commit now, and return the path."""
        self._since = 0
        return self._manager.save()

    def close(self) -> None:
        """Stop listening for preemption, and wait for the last commit."""
        self._notice.close()
        self._manager.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
