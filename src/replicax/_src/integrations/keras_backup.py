"""`BackupAndRestore` for models created in a scope: atomic backups, also within an epoch.

Keras's own callback writes the weights, then a file with the number of the epoch. A run that is
killed between the two, or in the middle of an epoch, repeats the epoch with weights that have seen
a part of it. Here, weights, optimizer, seeds, metrics, the position in the data and NumPy's random
state are committed as one checkpoint, and `fit` resumes with the next batch. All workers save and
restore.
"""

import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from replicax._src.cluster.checks import RollCallError, WorkerLostError
from replicax._src.files import storage
from replicax._src.files.paths import is_url, user_path
from replicax._src.integrations import keras_private as private
from replicax._src.integrations.keras_data import DatasetAdapter
from replicax._src.integrations.keras_models import home_of
from replicax._src.train.checkpoint import Checkpoint
from replicax._src.train.manager import CheckpointManager
from replicax._src.train.preemption import Notice, exit_preempted, restore_or_join
from replicax._src.train.reader import log
from replicax._src.workers import elastic
from replicax._src.workers import group as _group
from replicax._src.workers.reports import cannot_join

_VERSION = 1


def _random_state() -> list[Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [str(kind), [int(key) for key in keys], *rest]


def _set_random_state(state: list[Any]) -> None:
    kind, keys, *rest = state
    np.random.set_state((kind, np.asarray(keys, np.uint32), *rest))


class _Pass:
    """An iterator over one pass of the data, whose position can be saved and restored.

    It records NumPy's random state at the start, by which Keras shuffles, and counts batches.
    """

    def __init__(self, adapter: Any, batches: Callable[[], Any]) -> None:
        self._adapter = adapter
        self._open = batches
        self._batches: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._begun: list[Any] | None = None
        self.taken = 0

    def __iter__(self) -> "_Pass":
        return self

    def __next__(self) -> Any:
        if self._ahead:
            batch = self._ahead.pop()
        else:
            if self._batches is None:
                self._begun = _random_state()
                self._batches = iter(self._open())
            batch = next(self._batches)
        self.taken += 1
        return batch

    def is_over(self) -> bool:
        """Whether the pass has no further batch; reads one ahead to find out."""
        batch = next(self, self)
        if batch is self:
            return True
        self._ahead.append(batch)
        self.taken -= 1
        return False

    def save_state(self) -> dict[str, Any] | None:
        """Return the position; None if no batch was read yet."""
        if self._begun is None:
            return None
        return {"random": self._begun, "taken": self.taken, "elements": self.elements()}

    def elements(self) -> dict[str, Any] | None:
        """Return the position in an rx.data dataset; None for other data."""
        adapter = self._adapter
        is_ours = isinstance(adapter, DatasetAdapter)
        return {**adapter.iterator.save_state(), "steps": self.taken} if is_ours else None

    def restore_state(self, state: dict[str, Any]) -> None:
        """Move to a position that `save_state` returned."""
        _set_random_state(state["random"])
        if isinstance(self._adapter, DatasetAdapter):
            self._begun = state["random"]
            self._adapter.resume_at(state["elements"])
            self._batches = iter(self._open())
        else:  # arrays, or another library's data: read from the start and discard
            for _ in range(state["taken"]):
                next(self)
        self.taken = state["taken"]


class _Fit:
    """The progress of one call of `fit`, saved and restored as part of a backup."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.batches: Any = None  # Keras's iterator over the training data
        self.epoch = self.batch = 0  # the next epoch and batch
        self._pass: _Pass | None = None
        self._resumed: _Pass | None = None  # the restored pass, continued by the first epoch
        self._is_first = self._has_begun = False
        self._metrics: list[tuple[Any, Any]] = []
        self._saved: dict[str, Any] | None = None
        self.notice: Notice | None = None  # of an elastic run
        self.end_step: Callable[[], None] | None = None  # called between two steps then
        self.stateful_callback = ""  # the name of a callback whose state no backup has

    @property
    def is_between(self) -> bool:
        """Whether the epoch is known to have no further batch."""
        count = self.batches.num_batches
        return (count is not None and self.batch >= count) or bool(self.model.stop_training)

    def save_state(self) -> dict[str, Any]:
        """Return the position as plain Python values."""
        data_pass = self._pass
        # Without `steps_per_epoch`, every epoch is a new pass over the data.
        is_new = data_pass is None or (self.batch == 0 and self.batches.steps_per_epoch is None)
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batch": self.batch,
            "random": _random_state(),
            "pass": None if data_pass is None or is_new else data_pass.save_state(),
            "elements": None if data_pass is None else data_pass.elements(),
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Keep a state of `save_state` for `resume`, which is called after the whole restore."""
        self._saved = state

    def open_pass(self) -> None:
        """Begin the pass that `resume` moves to the restored position."""
        adapter = self.batches.data_adapter
        if isinstance(adapter, DatasetAdapter):
            adapter.open_pass()

    def resume(self) -> None:
        """Make the first epoch continue at the restored position.

        Raises:
            ValueError: The backup was written by an incompatible version.
        """
        saved = self._saved or {}
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"The backup describes the position of `fit` as {saved!r:.100}, which this version"
                f" of replicax cannot read: it reads version {_VERSION}. Remove the backup to start"
                " again."
            )
        self.epoch, self.batch = int(saved["epoch"]), int(saved["batch"])
        adapter = self.batches.data_adapter
        if saved["pass"] is not None:
            data_pass: _Pass = self.batches._get_iterator()
            data_pass.restore_state(saved["pass"])
            self._resumed = data_pass
        elif isinstance(adapter, DatasetAdapter) and saved["elements"] is not None:
            adapter.start_after(saved["elements"])
        if self.batch and self.batches.num_batches is None and self._is_over():
            log.warning("Epoch %d had ended when it was saved; the next one begins.", self.epoch)
            self.epoch, self.batch, self._resumed = self.epoch + 1, 0, None
        _set_random_state(saved["random"])
        self.model._initial_epoch = self.epoch
        # Keep the restored metrics: Keras resets them at the start of the epoch.
        self._metrics = [(v, v.value) for v in self.model.metrics_variables] if self.batch else []
        self._is_first = True

    def _is_over(self) -> bool:
        return self._resumed is not None and self._resumed.is_over()

    def close(self) -> None:
        """End the pass over the data, and stop its prefetching thread."""
        if self.notice is not None:
            self.notice.close()
        adapter = getattr(self.batches, "data_adapter", None)
        if isinstance(adapter, DatasetAdapter):
            adapter.close()

    def new_pass(self, batches: Callable[[], Any]) -> _Pass:
        """Return a new pass over the data; the first time, the restored pass if there is one."""
        resumed, self._resumed = self._resumed, None
        self._pass = resumed or _Pass(self.batches.data_adapter, batches)
        return self._pass

    def steps(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Return the steps of an epoch; of the resumed epoch, only the remaining ones."""
        if self._is_first:
            self._is_first, steps = False, self._left(steps)
        return steps if self.end_step is None else self._with_ends(steps, self.end_step)

    def _with_ends(self, steps: Iterator[Any], end_step: Callable[[], None]) -> Iterator[Any]:
        """Yield the steps of an epoch, and call ``end_step`` after the callbacks of each.

        After the last one of an epoch, call it when the next epoch begins: the callbacks at the end
        of the epoch may end the training.
        """
        if self._has_begun:
            end_step()
        self._has_begun = True
        for step in steps:
            yield step
            if not self.is_between:
                end_step()

    def _left(self, steps: Iterator[Any]) -> Iterator[Any]:
        for v, value in self._metrics:
            v.assign(value)
        begin = self.batch
        before = 0 if self._resumed is None else self._resumed.taken - begin
        for k, step in enumerate(steps):
            if k == 0:
                self.batches._steps_seen += before  # steps of earlier epochs of the same pass
            if step[0] >= begin:
                yield step


_fitting: ContextVar[_Fit | None] = ContextVar("replicax_fit", default=None)


def _fit_of(batches: Any) -> _Fit | None:
    """Return the running `fit` if ``batches`` is its training data; else None."""
    fit = _fitting.get()
    return fit if fit is not None and fit.batches is batches else None


_STATEFUL = ("EarlyStopping", "ReduceLROnPlateau")


def _stateful_callback(callbacks: Any) -> str:
    """Return the name of a callback that decides by earlier epochs; "" if there is none."""
    found = getattr(callbacks, "callbacks", callbacks) or ()
    for callback in found if isinstance(found, list | tuple) else [found]:
        if any(kind.__name__ in _STATEFUL for kind in type(callback).__mro__):
            return type(callback).__name__
    return ""


# Hooks. Each function takes the original function of Keras and returns its replacement.


def _in_fit(original: Any) -> Any:
    """Track the progress of ``Model.fit`` in a `_Fit`."""

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if home_of(self) is None:
            return original(self, *args, **kwargs)
        token = _fitting.set(one := _Fit(self))
        callbacks = inspect.signature(original).bind(self, *args, **kwargs).arguments
        one.stateful_callback = _stateful_callback(callbacks.get("callbacks"))
        try:
            return original(self, *args, **kwargs)
        finally:
            _fitting.reset(token)
            one.close()
            self._initial_epoch = None  # it was set for this call only

    return fit


def _note_training_data(original: Any) -> Any:
    """Record the training data: in `fit`, it is the first that Keras builds the model for."""

    def symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        fit = _fitting.get()
        if fit is not None and fit.batches is None and fit.model is self:
            fit.batches = iterator
        with elastic.preview():  # Keras reads a batch for its shapes, then begins a new pass
            original(self, iterator=iterator, data_batch=data_batch)

    return symbolic_build


def _counted(original: Any) -> Any:
    """Iterate over training data through a `_Pass`."""

    def get_iterator(self: Any) -> Any:
        fit = _fit_of(self)
        return original(self) if fit is None else fit.new_pass(lambda: original(self))

    return get_iterator


def _continued(original: Any) -> Any:
    """Skip the steps of a resumed epoch that were done before."""

    def enumerate_iterator(self: Any) -> Any:
        fit = _fit_of(self)
        return original(self) if fit is None else fit.steps(original(self))

    return enumerate_iterator


# The callback.


class _Backup:
    """The state of one callback during one `fit`."""

    def __init__(self, callback: Any, fit: _Fit) -> None:
        self.fit = fit
        self.is_due = False
        self._manager = CheckpointManager(
            Checkpoint(model=fit.model, fit=fit),
            callback.backup_dir,
            max_to_keep=2 if callback.double_checkpoint else 1,
        )

    def restore(self) -> bool:
        """Resume from the newest backup, or join a run; return whether there is one."""
        is_joining = elastic.is_joining()
        if is_joining and not self.fit.model.built:
            raise RollCallError(
                cannot_join(
                    f"model {self.fit.model.name!r} has no weights yet, into which it could put the"
                    " state. Build the model before `fit`: begin it with `keras.Input(shape)`, or"
                    " call `model.build(shape)`."
                )
            )
        if is_joining:
            self.fit.open_pass()
        found = restore_or_join(self._manager) is not None or is_joining
        if found:
            self.fit.resume()
        if elastic.is_on():
            self.fit.notice = Notice(manager=self._manager, why_closed=self._why_closed)
            self.fit.end_step = self.end_step
            self.end_step()
        return found

    def _why_closed(self) -> str:
        if self.fit.batches.num_batches is None:
            return "The number of batches of an epoch is unknown."
        if name := self.fit.stateful_callback:
            return (
                f"The callback {name} remembers earlier epochs, which a worker that joins has not"
                " seen: it would decide otherwise than the others."
            )
        return ""

    def end_step(self) -> None:
        """Let workers join or leave between two steps; save and exit if the run was preempted."""
        notice = self.fit.notice
        if notice is None or not notice.is_due():
            return
        self._manager.save(block=True)
        notice.finish()
        notice.close()
        exit_preempted()

    def save(self) -> None:
        """Save a backup; after the last batch of an epoch, defer it to the end of the epoch."""
        self.is_due = self.fit.is_between
        if self.is_due:
            return
        try:
            self._manager.save()
        except WorkerLostError:
            group = _group.current()
            if group is None or not group.may_resize:
                raise
            # The next step goes on without that worker, and the next backup is complete.
            log.warning("A backup was not completed, as a worker was lost.")


_backups: weakref.WeakKeyDictionary[Any, _Backup] = weakref.WeakKeyDictionary()


def _restoring(original: Any) -> Any:
    def on_train_begin(self: Any, logs: Any = None) -> None:
        _backups.pop(self, None)
        fit = _fitting.get()
        if fit is None or fit.model is not self.model:
            original(self, logs)
            return
        _backups[self] = backup = _Backup(self, fit)
        if backup.restore():
            self._current_epoch = fit.epoch
        elif is_url(self.backup_dir):
            return  # Keras cannot have written a backup to a URL
        elif self.model.built or _has_files(self.backup_dir):  # it may be Keras's own backup
            original(self, logs)

    return on_train_begin


def _has_files(folder: Any) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _beginning(original: Any) -> Any:
    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        if self in _backups:
            _backups[self].fit.epoch = self._current_epoch = epoch
        original(self, epoch, logs)

    return on_epoch_begin


def _after_batch(original: Any) -> Any:
    def on_train_batch_end(self: Any, batch: int, logs: Any = None) -> None:
        if self in _backups:
            _backups[self].fit.batch = batch + 1
        original(self, batch, logs)

    return on_train_batch_end


def _after_epoch(original: Any) -> Any:
    def on_epoch_end(self: Any, epoch: int, logs: Any = None) -> None:
        backup = _backups.get(self)
        if backup is not None:
            backup.fit.epoch, backup.fit.batch = epoch + 1, 0
        original(self, epoch, logs)
        if backup is not None and backup.is_due and self.save_freq != "epoch":
            self._save_model()

    return on_epoch_end


def _saving(original: Any) -> Any:
    def save_model(self: Any) -> None:
        backup = _backups.get(self)
        if backup is None:
            original(self)
        else:
            backup.save()

    return save_model


def _ending(original: Any) -> Any:
    def on_train_end(self: Any, logs: Any = None) -> None:
        backup = _backups.pop(self, None)
        group = _group.current()
        if backup is None:
            original(self, logs)
        elif group is None or group.facts.index == 0:
            _remove(self, lambda: original(self, logs))

    return on_train_end


def _remove(callback: Any, original: Callable[[], None]) -> None:
    """Remove the backups of a completed `fit`, if the callback is configured to."""
    if not is_url(callback.backup_dir):
        original()
    elif callback.delete_checkpoint and storage.exists(callback.backup_dir):
        storage.remove_tree(callback.backup_dir)


def _with_url(original: Any) -> Any:
    """Accept a URL as the directory, for which Keras itself would need TensorFlow."""

    def init(self: Any, backup_dir: Any, *args: Any, **kwargs: Any) -> None:
        path = user_path(backup_dir) if backup_dir else backup_dir
        if not backup_dir or not is_url(path):
            original(self, path, *args, **kwargs)
            return
        original(self, "backup", *args, **kwargs)
        for name, value in list(vars(self).items()):  # the paths to which Keras would write
            if isinstance(value, str) and value.split(os.sep)[0] == "backup":
                setattr(self, name, path + value.removeprefix("backup"))

    return init


REPLACEMENTS: tuple[tuple[Any, Any], ...] = (
    (private.BACKUP_FIT, _in_fit),
    (private.BACKUP_BUILD, _note_training_data),
    (private.BACKUP_BATCHES, _counted),
    (private.BACKUP_STEPS, _continued),
    (private.BACKUP_BEGIN, _restoring),
    (private.BACKUP_EPOCH_BEGIN, _beginning),
    (private.BACKUP_BATCH_END, _after_batch),
    (private.BACKUP_EPOCH_END, _after_epoch),
    (private.BACKUP_SAVE, _saving),
    (private.BACKUP_END, _ending),
    (private.BACKUP_INIT, _with_url),
)
