"""`CheckpointManager`: numbered checkpoints of one run, with removal of old ones."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from replicax._src.base.errors import requires
from replicax._src.base.tf_errors import DataLossError, FailedPreconditionError, NotFoundError
from replicax._src.base.weak import OrderedWeakSet
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.files.paths import absolute, is_url, user_path
from replicax._src.train import local_store, object_store, store
from replicax._src.train.checkpoint import Checkpoint
from replicax._src.train.checkpoint_files import try_lock
from replicax._src.train.options import is_async
from replicax._src.train.reader import log, stored_in
from replicax._src.workers import elastic
from replicax._src.workers import group as _group
from replicax._src.workers.watchdog import disk

_HOUR = 3600 * 10**9


class CheckpointManager:
    """Keeps the newest checkpoints of a run and removes older ones.

    Args:
        checkpoint: The checkpoint to save.
        directory: The directory to save into; created if missing.
        max_to_keep: How many checkpoints to keep; None keeps all.
        keep_checkpoint_every_n_hours: Also keep one checkpoint per this many hours permanently.
        checkpoint_name: The prefix of the checkpoints' names.
        step_counter: A variable that counts steps, for ``checkpoint_interval``.
        checkpoint_interval: `save` does nothing until this many steps after the last save.
        init_fn: Called by `restore_or_initialize` if there is nothing to restore.
        last_checkpoint_step: The step of the last save, for ``checkpoint_interval``.

    Example:
        >>> import tempfile
        >>> step = rx.Variable(0)
        >>> manager = rx.train.CheckpointManager(
        ...     rx.train.Checkpoint(step=step), tempfile.mkdtemp(), max_to_keep=2
        ... )
        >>> for _ in range(3):
        ...     _ = step.assign_add(1)
        ...     path = manager.save()
        >>> [p.rsplit("/", 1)[1] for p in manager.checkpoints]
        ['ckpt-2', 'ckpt-3']
        >>> _ = step.assign(0)
        >>> manager.restore_or_initialize() == manager.latest_checkpoint
        True
        >>> int(step)
        3
    """

    @requires("max_to_keep", 3, "the number of checkpoints to keep, such as 3, or None for all.")
    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], None] | None = None,
        last_checkpoint_step: int | None = None,
    ) -> None:
        if not hasattr(checkpoint, "restore"):
            raise TypeError(
                f"CheckpointManager needs an rx.train.Checkpoint, got {type(checkpoint).__name__}."
                " Write `rx.train.CheckpointManager(rx.train.Checkpoint(model=model), ...)`."
            )
        if os.path.basename(checkpoint_name) != checkpoint_name or checkpoint_name in (
            "",
            ".",
            "..",
        ):
            raise ValueError(
                f"CheckpointManager(checkpoint_name={checkpoint_name!r}): expected a name without"
                " a folder, such as 'ckpt'. Pass the folder as `directory`."
            )
        if max_to_keep is not None and max_to_keep <= 0:
            raise ValueError(
                f"CheckpointManager(max_to_keep={max_to_keep}) would keep nothing. Pass a positive"
                " number, or None to keep all."
            )
        if checkpoint_interval is not None and step_counter is None:
            raise ValueError(
                f"CheckpointManager(checkpoint_interval={checkpoint_interval}) needs a"
                " `step_counter`: the variable that counts the steps."
            )
        self._checkpoint = checkpoint
        self._directory = user_path(directory)
        if is_url(self._directory):
            self._directory = absolute(self._directory)
        self._max_to_keep = max_to_keep
        self._every = keep_checkpoint_every_n_hours
        self._prefix = os.path.join(self._directory, checkpoint_name)
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._last_step = last_checkpoint_step
        self._is_claimed = False
        if elastic.is_on():
            _managers.add(self)
        # The save in progress: its path, and the timestamp of the checkpoint that it replaces.
        self._pending: tuple[str, int | None] | None = None
        self._times = self._listed()
        self._last_kept: int = next(iter(self._times.values()), time.time_ns())

    def _listed(self) -> dict[str, int]:
        """Return the time of each checkpoint in the directory, oldest first."""
        found = sorted(stored_in(self._directory))
        own = f"{self._name}-"
        return {path: saved for saved, path in found if os.path.basename(path).startswith(own)}

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """The minimum number of steps between two saves."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the kept checkpoints, oldest first."""
        return list(self._times)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint; None if there is none."""
        return self.checkpoints[-1] if self._times else None

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: Any = None,
        *,
        block: bool = True,
    ) -> str | None:
        """Save a checkpoint, and remove those that exceed ``max_to_keep``.

        Args:
            checkpoint_number: The number in its name; by default the next one.
            check_interval: Whether to skip the save within ``checkpoint_interval`` steps of the
                last one.
            options: See `CheckpointOptions`.
            block: See `Checkpoint.save`.

        Returns:
            The path; None if nothing was saved.

        Raises:
            FailedPreconditionError: Another run saves into the same directory.
            OSError: The checkpoint cannot be written; existing checkpoints are unchanged.
        """
        step = None if self._step_counter is None else int(self._step_counter.numpy())
        if check_interval and self._is_early(step):
            return None
        self._finish_last(gives_up=True)
        is_given_up = elastic.is_behind()  # the others have given this save up
        if not is_given_up:
            try:
                self._claim()
            except WorkerLostError:
                group = _group.current()
                if block or group is None or not group.may_resize:
                    raise
                # So this save cannot be completed either, and is given up before the next one.
        if checkpoint_number is None:
            path = self._checkpoint.save(self._prefix, options, block=block)
        else:
            self._checkpoint.save_counter.assign_add(1)
            path = f"{self._prefix}-{int(checkpoint_number)}"
            self._checkpoint.write(path, options, block=block)
        self._last_step = step
        if is_given_up:
            return None
        self._pending = path, self._times.pop(path, None)
        self._times[path] = time.time_ns()
        if block and not is_async(options):
            self.sync()
        return path

    def restore_or_initialize(self) -> str | None:
        """Restore the newest intact checkpoint; if there is none, call ``init_fn``.

        Returns:
            The path of the restored checkpoint; None if there was none.
        """
        for path in reversed(self._common()):
            if self._is_restored(path):
                if self._step_counter is not None:
                    self._last_step = int(self._step_counter.numpy())
                return path
            self._times.pop(path, None)
        if self._init_fn is not None:
            self._init_fn()
        return None

    def hand_over(self, path: str) -> None:
        """Write the state to ``path``, from which joining workers restore it; call `sync` before.

        The manager does not count it among its checkpoints. A relative path is one in its
        directory, which another host may have elsewhere.

        Raises:
            OSError: It cannot be written; on all workers.
        """
        self._checkpoint.write(os.path.join(self._directory, path))

    def take_over(self, path: str) -> None:
        """Restore the state that `hand_over` wrote on other workers; list the checkpoints again."""
        self._checkpoint.read(os.path.join(self._directory, path))
        self._times = self._listed()

    def discard_state(self, path: str) -> None:
        """Remove what `hand_over` wrote."""
        with suppress(OSError):
            store.remove(os.path.join(self._directory, path))

    def sync(self) -> None:
        """Wait until the last save is on disk, then remove checkpoints beyond ``max_to_keep``.

        Raises:
            OSError: The checkpoint could not be written; no older one was removed.
        """
        self._finish_last(gives_up=False)

    def _finish_last(self, *, gives_up: bool) -> None:
        """Like `sync`; see `Checkpoint.finish_writing`."""
        pending, self._pending = self._pending, None
        is_written = False
        try:
            is_written = self._checkpoint.finish_writing(gives_up=gives_up)
        finally:
            if pending is not None and not is_written:
                self._forget(*pending)
        self._prune()

    def _forget(self, path: str, before: int | None) -> None:
        """Forget a failed save; a checkpoint that was at its path before is still there."""
        if before is None:
            self._times.pop(path, None)
        else:
            self._times[path] = before

    def _claim(self) -> None:
        """Claim the directory for this run, for the lifetime of the manager.

        The first worker claims it, and all workers raise if it fails.

        Raises:
            FailedPreconditionError: Another run saves into the directory.
        """
        if self._is_claimed:
            return
        group, failure = _group.current(), ""
        if group is None or group.facts.index == 0:
            try:
                failure = self._claimed()
            except OSError as error:
                # For a local folder, the save itself will fail with a better message.
                failure = f"{error} Nothing was saved." if is_url(self._directory) else ""
        if group is not None:
            failure = group.agree("the directory of the checkpoints", failure)[0]
        if failure:
            raise FailedPreconditionError(failure)
        self._is_claimed = True

    def forget_claim(self) -> None:
        """Claim the directory again at the next save."""
        self._is_claimed = False

    def _claimed(self) -> str:
        is_local = not is_url(self._directory)
        if is_local and (failure := _claimed(self, self._directory)):
            return failure
        with disk.at(f"taking over {self._directory!r}"):
            module = local_store if is_local else object_store
            module.take_directory(self._directory, f"{self._name}-")
        return ""

    def _common(self) -> list[str]:
        """Return the checkpoints that the first worker sees: all must restore the same one."""
        group = _group.current()
        if group is None:
            return self.checkpoints
        names = [os.path.basename(path) for path in self.checkpoints]
        lists = group.agree("the checkpoints that there are", names)
        return [os.path.join(self._directory, name) for name in lists[0]]

    def _is_restored(self, path: str) -> bool:
        failure = None
        try:
            self._checkpoint.restore(path)
        except (DataLossError, NotFoundError) as error:
            failure = error
            log.warning("%s The one before it is restored.", error)
        group = _group.current()
        return (
            failure is None
            if group is None
            else all(group.agree(f"the checkpoint {os.path.basename(path)!r}", failure is None))
        )

    def _is_early(self, step: int | None) -> bool:
        if self._interval is None or self._last_step is None or step is None:
            return False
        return step < self._last_step + self._interval

    def _prune(self) -> None:
        if self._max_to_keep is None:
            return
        old = self.checkpoints[: -self._max_to_keep]
        for path in old:
            saved = self._times.pop(path)
            if self._every is not None and saved - self._last_kept >= self._every * _HOUR:
                self._last_kept = saved
                continue
            group = _group.current()
            if group is None or group.facts.index == 0:
                store.remove(path)


_managers: OrderedWeakSet[CheckpointManager] = OrderedWeakSet()


def _claim_again() -> None:
    """Let the first worker that is left of an elastic run claim the directories."""
    for manager in list(_managers):
        manager.forget_claim()


elastic.after.register(elastic.SERVICES, _claim_again)


# directory -> [locked descriptor, number of managers of this process that save into it]
_claims: dict[str, list[int]] = {}


def _claimed(manager: CheckpointManager, directory: str) -> str:
    """Lock ``directory`` for the lifetime of ``manager``.

    Return an error message if another run has locked it, else an empty string.
    """
    os.makedirs(directory, exist_ok=True)
    place = os.path.realpath(directory)
    if place not in _claims:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        if not try_lock(fd) and (holder := _holder(fd)):
            os.close(fd)
            return (
                f"Another run saves its checkpoints into {directory!r}: {holder}. Two runs would"
                " remove and replace each other's. Give each a directory of its own, or end the"
                " other one first. Nothing was saved or removed."
            )
        _claims[place] = [fd, 0]
    _claims[place][1] += 1
    weakref.finalize(manager, _release_claim, place)
    return ""


def _release_claim(place: str) -> None:
    claim = _claims[place]
    claim[1] -= 1
    if not claim[1]:
        os.close(_claims.pop(place)[0])


def _holder(fd: int) -> str:
    """Describe the process that has locked an open folder.

    Return an empty string if that process has exited: children that inherited the descriptor keep
    the lock, but do not save.
    """
    number = os.fstat(fd).st_ino
    with suppress(OSError), open("/proc/locks") as file:
        for line in file:
            match line.split():
                case [_, "FLOCK", _, _, pid, place, *_] if place.endswith(f":{number}"):
                    if pid.isdigit() and int(pid) > 0:
                        return f"process {pid}" if os.path.exists(f"/proc/{pid}") else ""
    return "a process of another machine or container"
