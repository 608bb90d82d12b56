"""`Checkpoint`: save objects to a folder and restore them, also in another process."""

from __future__ import annotations

import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._src.base.errors import CheckpointError, ScopeError, VariableError
from replicax._src.base.threads import new_thread
from replicax._src.base.types import VariableAggregation
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.compat.jax import concrete
from replicax._src.context.current import current, entered
from replicax._src.files.paths import user_path
from replicax._src.state.declaration import is_key, new_variable_callbacks
from replicax._src.state.variable import Variable
from replicax._src.state.variables import stored_array, variable_of
from replicax._src.train import store
from replicax._src.train.array_pieces import Value
from replicax._src.train.object_contents import Contents, Unnamed, contents_of, merged
from replicax._src.train.object_graph import (
    Match,
    compared,
    copies_key,
    graph_of,
    is_leaf,
    is_variable,
    matched,
)
from replicax._src.train.options import is_async
from replicax._src.train.reader import log
from replicax._src.train.stored_checkpoint import (
    CheckpointSource,
    copies_mark,
    free_value,
    is_placed,
    open_checkpoint,
    restore_from,
)
from replicax._src.values.per_replica import Distributed
from replicax._src.workers import elastic
from replicax._src.workers import group as _group
from replicax._src.workers.settings import deadline
from replicax._src.workers.watchdog import disk

_LOOK_EVERY = 0.5  # seconds between two checks while waiting for a save
_GIVE_UP_AFTER = 60.0  # seconds a save may delay the survivors of a lost worker
_PATIENCE = 3.0  # seconds a save may still take after another worker was lost
_OWN_ATTRIBUTES = {"_root", "_objects", "_save_counter", "_writing", "_before_save"}
_ROOT = "_whole"  # the name of a root variable in checkpoints of every version
# The context without any strategy, replica or trace: new variables may be restored inside one.
_OUTSIDE: dict[str, Any] = {"strategy": None, "replica": None, "level": None, "body": None}


_NUMBERS = (bool, int, float, complex, np.generic)
_ARRAYS = (np.ndarray, jax.Array, Distributed)
_CONTAINERS = (dict, list, tuple)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, types.ModuleType)


class Checkpoint:
    """Saves objects and restores them: variables, models, optimizers, metrics, iterators.

    Args:
        root: An object whose children are saved under their own names.
        **objects: The objects to save, by name: variables, objects with variables as attributes,
            lists and dicts of these, and dataset iterators.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> weights, step = rx.Variable([1.0, 2.0]), rx.Variable(7)
        >>> path = rx.train.Checkpoint(weights=weights, step=step).save(f"{folder}/ckpt")
        >>> fresh = rx.Variable([0.0, 0.0])
        >>> status = rx.train.Checkpoint(weights=fresh).restore(path)
        >>> fresh.numpy().tolist()
        [1.0, 2.0]
        >>> rx.train.list_variables(path)
        [('save_counter/.ATTRIBUTES/VARIABLE_VALUE', []),
         ('step/.ATTRIBUTES/VARIABLE_VALUE', []),
         ('weights/.ATTRIBUTES/VARIABLE_VALUE', [2])]
    """

    def __init__(self, root: Any = None, **objects: Any) -> None:
        _check_saveable("root", root)
        self._root = root
        self._objects: dict[str, Any] = {}
        self._save_counter: Variable | None = None
        self._writing: _Writing | None = None
        self._before_save: Callable[[], Any] | None = None
        for name, x in objects.items():
            if name in _OWN_ATTRIBUTES or hasattr(Checkpoint, name):
                raise ValueError(
                    f"Checkpoint({name}=...): a checkpoint has an attribute {name!r} of its own."
                    f" Choose another name, such as {name.strip('_')}_."
                )
            setattr(self, name, x)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN_ATTRIBUTES:
            _check_saveable(name, value)
            self._objects[name] = value
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._objects.pop(name, None)

    @property
    def save_counter(self) -> Variable:
        """How many times `save` was called."""
        counter = self._save_counter
        if counter is None:
            with concrete():
                counter = Variable(np.asarray(0), trainable=False, name="save_counter")
            self._save_counter = counter
        return counter

    def save(self, file_prefix: str, options: Any = None, *, block: bool = True) -> str:
        """Save all objects atomically, under the next number.

        With several workers, all must call this; each writes its shards, to the first worker's
        path.

        Args:
            file_prefix: The folder and the first part of the name, ``"run/ckpt"``.
            options: A `CheckpointOptions`; only ``enable_async`` has an effect.
            block: Whether to wait until the checkpoint is on disk. Otherwise it is written in the
                background; the next save, `sync` and the exit of the program wait for it. Python
                3.12 cannot wait at its exit, so there ``block=False`` has no effect.

        Returns:
            The path, ``"run/ckpt-1"``.

        Raises:
            OSError: The checkpoint cannot be written; existing checkpoints are unchanged.
            ValueError: A variable has no name, so restoring could not find it.
        """
        _refuse_in_replica("save")
        self.save_counter.assign_add(1)
        path = f"{user_path(file_prefix)}-{int(self.save_counter.numpy())}"
        return self.write(path, options, block=block)

    def write(self, file_prefix: str, options: Any = None, *, block: bool = True) -> str:
        """Save all objects atomically, to exactly the path ``file_prefix``; see `save`."""
        _refuse_in_replica("write")
        elastic.refuse_while_joining("saves a checkpoint")
        self.finish_writing(gives_up=True)
        path = user_path(file_prefix)
        if elastic.is_behind():  # the others have begun this save before a worker was lost
            if self._before_save is not None:
                self._before_save()
            _log_given_up()
            return path
        content = self._content()
        group = _group.current()
        ticket = 0 if group is None else group.new_ticket()
        self._writing = _Writing(lambda: store.write(path, content, ticket))
        if not (_can_finish_at_exit and (is_async(options) or not block)):
            self.sync()
        return path

    def call_before_save(self, call: Callable[[], Any]) -> None:
        """Register ``call`` to run before each save, for example to update variables."""
        self._before_save = call

    def sync(self) -> None:
        """Wait until the last save is on disk.

        Raises:
            OSError: The checkpoint could not be written.
        """
        self.finish_writing()

    def finish_writing(self, *, gives_up: bool = False) -> bool:
        """Like `sync`; return False if the last save was given up because a worker was lost.

        Args:
            gives_up: Whether to give it up if a worker was lost that the next step goes on without.
        """
        writing, self._writing = self._writing, None
        return writing is None or writing.wait(gives_up=gives_up)

    def restore(self, save_path: str | None, options: Any = None) -> LoadStatus:
        """Restore the values that the objects and the checkpoint have in common.

        Objects are matched by name; variables keep their devices and sharding. Variables that do
        not exist yet are restored when they are created. TensorFlow's checkpoints can be restored
        too.

        Args:
            save_path: The path that `save` returned, or TensorFlow's prefix; None restores
                nothing.
            options: Accepted for compatibility with TensorFlow.

        Returns:
            A status object with which to assert that the match is complete.

        Raises:
            NotFoundError: There is no such checkpoint.
            DataLossError: The checkpoint is damaged; nothing was restored.
            VariableError: A value does not fit its variable; nothing was restored.
        """
        return self.read(save_path, options)

    def read(self, save_path: str | None, options: Any = None) -> LoadStatus:
        """Restore a checkpoint that `write` saved; see `restore`."""
        _refuse_in_replica("restore")
        self.sync()
        if save_path is None:
            return LoadStatus(None, lambda: Match({}, [], []))
        restoration = _Restoration(open_checkpoint(user_path(save_path)), self)
        match = restoration.restore_matches()
        if match.unused:
            restoration.watch_new_variables()
        return LoadStatus(user_path(save_path), restoration.restore_matches)

    def contents(self) -> Contents:
        """Return the objects to save, by name."""
        return merged(
            # An object with a value of its own is a part here, as the root has none.
            {_ROOT: self._root} if is_leaf(self._root) else contents_of(self._root),
            self._objects,
            {"save_counter": self.save_counter},
            why="the checkpoint has another object of this name; rename one of them",
        )

    def _content(self) -> store.Content:
        if self._before_save is not None:
            self._before_save()
        for name, x in {"root": self._root, **self._objects}.items():
            if isinstance(x, _CONTAINERS):  # their content may have changed since the constructor
                _check_saveable(name, x)
        found = graph_of(self.contents())
        _refuse_unnamed(found.unnamed)
        arrays, states = {}, {}
        for key, x in found.objects.items():
            if is_variable(x):
                arrays[key] = saved_value(x, key)
                if (copies := _copies(x)) is not None:
                    arrays[copies_key(key)] = copies
            else:
                states[key] = x.save_state()
        return store.Content(found.nodes, arrays, states)


class _Restoration:
    """The restore of one checkpoint, including variables that are created later."""

    def __init__(self, source: CheckpointSource, checkpoint: Checkpoint) -> None:
        self._source = source
        self._checkpoint = weakref.ref(checkpoint)
        self._done: dict[str, Any] = {}  # the objects restored so far, by key
        self._contents = checkpoint.contents()
        self._is_busy = False

    def restore_matches(self) -> Match:
        """Restore all objects that match now and were not restored yet; all or none."""
        checkpoint = self._checkpoint()
        contents = self._contents if checkpoint is None else checkpoint.contents()
        graph = self._source.nodes, contents, self._source.names
        pairs = matched(*graph)
        new = {k: x for k, x in pairs.items() if k not in self._done and _has_value(x)}
        if new:
            with concrete(), entered(**_OUTSIDE):
                restore_from(self._source, new)
            self._done |= new
        match = compared(*graph, self._done)
        if not match.unused:
            self._forget()
        return match

    def watch_new_variables(self) -> None:
        """Restore variables that are created later, before their first read."""
        new_variable_callbacks.append(self._on_new_variables)

    def _on_new_variables(self) -> None:
        if self._checkpoint() is None:
            self._forget()
        elif not self._is_busy:
            self._is_busy = True
            try:
                self.restore_matches()
            finally:
                self._is_busy = False

    def _forget(self) -> None:
        if self._on_new_variables in new_variable_callbacks:
            new_variable_callbacks.remove(self._on_new_variables)


class _Writing:
    """A save that runs in a background thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._failure: BaseException | None = None
        self._is_given_up = False

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        self._thread = new_thread(run, name="replicax-checkpoint")
        self._thread.start()
        _unfinished.add(self)

    def wait(self, *, gives_up: bool = False) -> bool:
        """Wait for the save; return False if it was given up in a resize, or is now."""
        _unfinished.discard(self)
        group = _group.current()
        limit = deadline("REPLICAX_DISK_TIMEOUT")
        while self._thread.is_alive():
            self._thread.join(_LOOK_EVERY)
            if group is not None:  # the thread may wait for a worker that was lost
                if not (gives_up and group.may_resize):  # then it ends soon
                    group.give_up(_PATIENCE)
            elif disk.status()[0] and time.monotonic() - disk.moved_at > limit:
                _hanging.append(self._thread)
                raise TimeoutError(
                    f"This process is {disk.status()[0]}, and has made no progress for"
                    f" {limit:g} s: the disk or file system hangs, or is very slow."
                    " REPLICAX_DISK_TIMEOUT sets the seconds. Earlier checkpoints are unchanged."
                )
        if gives_up and group is not None and group.may_resize:
            self._give_up()
        if self._failure is not None:
            raise self._failure
        return not self._is_given_up

    def give_up_if_lost(self) -> None:
        """Wait for the thread, and give the save up if it waits for a worker that was lost.

        Raises:
            CannotResizeError: If the thread does not end.
        """
        self._thread.join(_GIVE_UP_AFTER)
        if self._thread.is_alive():
            raise elastic.CannotResizeError("A checkpoint is still being written.")
        self._give_up()

    def _give_up(self) -> None:
        if isinstance(self._failure, WorkerLostError):
            self._failure, self._is_given_up = None, True
            _log_given_up()


def _log_given_up() -> None:
    log.warning("A checkpoint was not completed, as a worker was lost; the next one is.")


def _give_up_saves() -> None:
    for writing in list(_unfinished):
        writing.give_up_if_lost()


elastic.before.register(elastic.DEVICES, _give_up_saves)


def finish_all() -> None:
    """Wait for all saves in progress; called when the program exits."""
    for writing in list(_unfinished):
        try:
            writing.wait()
        except Exception:
            log.exception("The last checkpoint of the program was not written.")
    if any(thread.is_alive() for thread in _hanging):  # Python would wait for it indefinitely
        _group.end_process("a checkpoint is still being written to a disk that hangs.")


# On exit, Python shuts down the thread pools that Orbax needs before it joins threads and before
# it runs `atexit` functions. This private hook runs before both.
_before_exit: Callable[..., None] | None = getattr(threading, "_register_atexit", None)
# Python 3.12 starts no more threads as soon as it shuts down, before that hook runs, and Orbax
# needs new ones. There, and without the hook, a save that outlives the program would be lost.
_can_finish_at_exit = _before_exit is not None and sys.version_info[:2] != (3, 12)
_unfinished: set[_Writing] = set()
_hanging: list[threading.Thread] = []
if _before_exit is not None:
    _before_exit(finish_all)


class LoadStatus:
    """The result of `Checkpoint.restore`, with assertions about its completeness."""

    def __init__(self, path: str | None, match: Callable[[], Match]) -> None:
        self._path = path
        self._match = match

    def assert_consumed(self) -> LoadStatus:
        """Check that every value in the checkpoint and every object has a counterpart.

        Raises:
            CheckpointError: Some have none; the message names them.
        """
        match = self._match()
        self._refuse("values of the checkpoint that no object asks for", match.unused)
        return self.assert_existing_objects_matched()

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Check that every object that exists now was restored.

        Raises:
            CheckpointError: Some were not; the message names them.
        """
        self._refuse("objects without a value in the checkpoint", self._match().missing)
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Check that something other than the save counter was restored.

        Raises:
            CheckpointError: Nothing was.
        """
        restored = [key for key in self._match().pairs if not key.startswith("save_counter/")]
        if not restored:
            raise CheckpointError(
                f"Checkpoint {self._path!r} has nothing in common with the objects. Give them the"
                " names that they had when they were saved."
            )
        return self

    def expect_partial(self) -> LoadStatus:
        """Declare that a partial match is intended; does nothing, as no warning is ever logged."""
        return self

    def initialize_or_restore(self, session: Any = None) -> None:
        """Do nothing: values are already restored. For programs written for TF 1 sessions."""

    def _refuse(self, what: str, names: list[str]) -> None:
        if names:
            shown = "\n  ".join(names[:20]) + ("\n  ..." if len(names) > 20 else "")
            raise CheckpointError(
                f"Checkpoint {self._path!r} does not fit: {len(names)} {what}:\n  {shown}\nGive"
                " the objects the names that they had when they were saved, or call"
                " `expect_partial()` if a part is what you want."
            )


def _check_saveable(name: str, x: Any) -> None:
    """Refuse an argument in which nothing can be restored, and arrays in its containers."""
    is_filled = bool(graph_of({name: x}).objects)
    if not is_filled and isinstance(x, (*_CODE, Iterator)):
        raise ValueError(
            f"Checkpoint({name}={x!r}): there is no state to save in a {type(x).__name__}. Pass the"
            " variables that it uses, the iterator of an rx.data.Dataset, or an object that has"
            " its own state: a subclass of `rx.train.experimental.PythonState`."
        )
    # Numbers beside variables describe them; arrays may be constants only as attributes.
    refused = _ARRAYS if is_filled else (*_ARRAYS, *_NUMBERS)
    for path, leaf in jax.tree_util.tree_leaves_with_path(x, is_leaf=_holds_variables):
        is_of_objects = isinstance(leaf, np.ndarray) and leaf.dtype.hasobject
        is_text = leaf is x and isinstance(x, str)
        if is_text or (isinstance(leaf, refused) and not is_of_objects):
            raise ValueError(
                f"Checkpoint({name}=...): {name}{jax.tree_util.keystr(path)} is {leaf!r:.80}, and"
                f" {type(leaf).__name__} values cannot be restored in place. Keep what changes in"
                " variables: `rx.Variable(value)`, or `rx.variables(tree)` for a structure of"
                " arrays."
            )


def _holds_variables(x: Any) -> bool:
    """Whether ``x`` is an object with variables, and no container, in which each item counts."""
    return not isinstance(x, (*_CONTAINERS, *_ARRAYS)) and bool(graph_of({"": x}).objects)


def _refuse_unnamed(unnamed: list[Unnamed]) -> None:
    if unnamed:
        lines = [f"{type(u.value).__name__} at {u.label}: {u.why}" for u in unnamed]
        shown = "\n  ".join(lines[:20]) + ("\n  ..." if len(lines) > 20 else "")
        raise ValueError(
            "Cannot save variables or iterators that have no name in the checkpoint, because no"
            f" restore would find them:\n  {shown}\nAttributes, str and int keys of dicts, and"
            " positions in lists are names. Give each a name, or pass it to `Checkpoint` under one:"
            " `rx.train.Checkpoint(..., name=variable)`."
        )


def _refuse_in_replica(verb: str) -> None:
    frame = current()
    if frame.replica is not None or frame.level is not None:
        where = "a replica function" if frame.replica is not None else "a function that is traced"
        raise ScopeError(
            f"Checkpoint.{verb} was called inside {where}. Save and restore in the program's own"
            " Python, between the steps."
        )


def saved_value(x: Any, key: str) -> Any:
    """Return the value of a variable to write: a host array, or a `Value` with shards.

    Raises:
        VariableError: The variable's per-replica copies have no aggregation.
    """
    variable = variable_of(x)
    if variable is None:
        value = free_value(x)
        if not isinstance(value, jax.Array | np.ndarray):
            raise VariableError(
                f"Variable {key!r} is a {type(x).__name__} whose value is a {type(value).__name__},"
                " and a checkpoint holds arrays. Give it an array, `jnp.asarray(...)`; of a"
                " structure, make each array a variable."
            )
        return value if is_key(value) else np.asarray(value)
    if variable.cell.per_replica and variable.aggregation is VariableAggregation.NONE:
        raise VariableError(
            f"Variable {key!r} has synchronization ON_READ and aggregation NONE: its copies differ,"
            " and a checkpoint holds one value for any number of replicas. Declare how to combine"
            " them (SUM, MEAN, ONLY_FIRST_REPLICA), or leave it out of the checkpoint."
        )
    if not is_placed(variable):
        return variable.read_value()
    return Value(stored_array(variable), variable.cell.shard_layout)


def _copies(x: Any) -> Value | None:
    """Return the per-replica copies of a variable, if it has any.

    They are saved in addition to their total: a run resumed from the total alone would add up in
    another order, and so round differently.
    """
    variable = variable_of(x)
    mark = None if variable is None else copies_mark(variable)
    if variable is None or mark is None:
        return None
    return Value(stored_array(variable), copies_on=mark)


def _has_value(x: Any) -> bool:
    # While Keras infers shapes, it creates variables without a value, which follows later.
    is_pending = getattr(type(x), "__rx_pending__", None)
    return variable_of(x) is not None or is_pending is None or not is_pending(x)
