"""Reading checkpoints, replicax's or TensorFlow's, and restoring objects from them."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import VariableError
from replicax._src.base.fault_points import fault_point
from replicax._src.base.tf_errors import FailedPreconditionError, NotFoundError
from replicax._src.state.declaration import is_key
from replicax._src.state.variable import Variable
from replicax._src.state.variables import variable_of
from replicax._src.train.array_pieces import Part, local_parts, put_parts, saved_arrays, whole
from replicax._src.train.checkpoint_files import (
    MANIFEST,
    THREADS,
    CheckedFiles,
    as_data_loss,
    is_stored,
    manifest,
)
from replicax._src.train.object_graph import OWN, Names, ObjectNode, copies_key, is_variable
from replicax._src.train.tensor_bundle import TensorBundle, is_bundle
from replicax._src.workers import group as _group
from replicax._src.workers.watchdog import disk


class CheckpointSource(Protocol):
    """A readable checkpoint."""

    identity: str  # equal for copies of the same checkpoint, whatever their paths

    @property
    @abstractmethod
    def nodes(self) -> list[ObjectNode]:
        """The graph of the saved objects, root first."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every array, by name."""

    @abstractmethod
    def dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype of one array."""

    @abstractmethod
    def read(self, key: str) -> Any:
        """Return the value of one array, or the state of an object."""

    @property
    @abstractmethod
    def names(self) -> Names:
        """The naming convention of the graph: replicax's or TensorFlow's."""


class Stored:
    """A checkpoint in replicax's format.

    Raises:
        NotFoundError: There is no checkpoint.
        DataLossError: Its manifest is damaged.
    """

    names = OWN

    def __init__(self, path: str) -> None:
        self._path = path
        body = manifest(path)
        with as_data_loss(os.path.join(path, MANIFEST)):
            self.identity: str = body["sha256"]
            self.time = int(body["time"])
            self.states: dict[str, Any] = dict(body["states"])
            self.nodes = [ObjectNode(children, values) for children, values in body["nodes"]]
            self._arrays = saved_arrays(body)
            place = os.path.join(path, body["folder"])
            self._files = CheckedFiles(place, body["files"], body["format"])
            for saved in self._arrays.values():
                saved.check(self._files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every array, by key."""
        arrays = sorted(self._arrays.items())
        return {key: saved.shape for key, saved in arrays if saved.copies_on is None}

    def copies(self, key: str, variable: Variable) -> str | None:
        """Return the key of a variable's saved per-replica copies; None if they do not fit it."""
        saved, mark = self._arrays.get(copies_key(key)), copies_mark(variable)
        if saved is None or mark is None or saved.copies_on != mark:
            return None
        cell = variable.cell
        is_same = saved.shape == cell.stored_shape and saved.dtype == np.dtype(cell.dtype)
        return copies_key(key) if is_same else None

    def dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype of one array."""
        return self._arrays[key].dtype

    def read(self, key: str) -> Any:
        """Return the value of one variable, or the state of an object.

        Raises:
            NotFoundError: The checkpoint has no value of that name.
            DataLossError: A file of the checkpoint is damaged.
        """
        if key in self.states:
            return self.states[key]
        saved = self._arrays.get(key)
        if saved is None:
            raise NotFoundError(
                f"Checkpoint {self._path!r} has no value {key!r}; it has"
                f" {', '.join(map(repr, list(self.shapes())[:20]))}."
            )
        value = saved.read(self._files, whole(saved.shape))
        if saved.key_impl is not None:
            return jax.random.wrap_key_data(jnp.asarray(value), impl=saved.key_impl)
        return value

    def room(self, key: str, part: Part) -> np.ndarray:
        """Allocate memory for a part of one array, to be filled by `read_part`."""
        saved = self._arrays[key]
        if saved.key_impl is not None:
            raise VariableError(f"The checkpoint has random keys as {key!r}, not numbers.")
        return saved.empty(part)

    def read_part(self, key: str, part: Part, into: np.ndarray) -> None:
        """Read a part of one array into ``into``; only the file blocks it touches are read."""
        self._arrays[key].read(self._files, part, into)

    def verify(self) -> None:
        """Check that all files exist with their recorded size; contents are verified on read.

        Raises:
            DataLossError: A file is missing or has another size; the message names it.
        """
        self._files.verify()


def open_checkpoint(path: str) -> CheckpointSource:
    """Open the checkpoint at ``path``, replicax's or TensorFlow's.

    Raises:
        NotFoundError: There is no checkpoint.
        DataLossError: The checkpoint is damaged.
    """
    if is_stored(path):
        return Stored(path)
    if is_bundle(path):
        return TensorBundle(path)
    raise NotFoundError(
        f"There is no checkpoint {path!r}. `rx.train.latest_checkpoint(folder)` finds the newest"
        " one of a folder."
    )


def restore_from(source: CheckpointSource, pairs: Mapping[str, Any]) -> None:
    """Restore objects, all or none: every value is read and checked before the first assignment.

    If variables are shared by several workers, all must call this with the same checkpoint.

    Args:
        source: The checkpoint.
        pairs: The objects to restore, by the keys of their values in the checkpoint.

    Raises:
        DataLossError: The checkpoint is damaged.
        VariableError: A value does not fit its variable.
        FailedPreconditionError: The workers have different checkpoints.
    """
    check_same_source(source.identity, pairs.values(), "checkpoints")
    shapes = source.shapes()
    needed = {key: _needed(source, key, x, shapes.get(key)) for key, x in pairs.items()}
    with disk.at("reading a checkpoint"):
        fault_point("restore")
        found = {key: _read_parts(source, *parts) for key, parts in needed.items()}
        if isinstance(source, Stored):  # `found` has empty buffers so far: fill them in parallel
            jobs = [(needed[k][0], *job) for k, rooms in found.items() for job in rooms.items()]
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda job: source.read_part(*job), jobs))
        put = [_fit(source, key, x, found[key]) for key, x in pairs.items()]
    for restore in put:
        restore()


def check_same_source(identity: str, objects: Iterable[Any], kind: str) -> None:
    """Raise on all workers unless they restore the same values into shared variables.

    Args:
        identity: A digest of the source.
        objects: The objects to restore.
        kind: The kind of source, for messages.

    Raises:
        FailedPreconditionError: The workers have different sources.
    """
    variables = (variable_of(x) for x in objects)
    topologies = {v.cell.topology for v in variables if v is not None}
    if all(topology is None or topology.is_fully_addressable for topology in topologies):
        return
    group = _group.required()
    identities = group.agree(f"the {kind} that are restored", identity)
    others = [index for index, one in enumerate(identities) if one != identities[0]]
    if others:
        raise FailedPreconditionError(
            f"{group.describe(others[0])} and {group.describe(0)} restore different {kind}"
            " into variables that they share. Nothing was restored. Keep them in a directory that"
            " all workers share, or copy the same ones to each."
        )


def _needed(source: CheckpointSource, key: str, x: Any, shape: Any) -> tuple[str, list[Part]]:
    """Return the key to read for ``x``, and the parts of it that this process needs.

    There are no parts if the whole value is to be assigned instead.

    Raises:
        VariableError: Only one of ``x`` and the checkpoint's entry is a variable, or their shapes
            differ.
    """
    if is_variable(x) != (shape is not None):
        saved, here = ("a value", "none") if shape is not None else ("none", "one")
        raise VariableError(
            f"The checkpoint has {saved} for {key!r}, and the {type(x).__name__} that it is for has"
            f" {here}. Nothing was restored. Build the objects as they were when they were saved."
        )
    variable = variable_of(x)
    if variable is None:
        return key, []
    copies = source.copies(key, variable) if isinstance(source, Stored) else None
    if copies is not None:
        return copies, local_parts(variable.cell)
    if not is_placed(variable):
        return key, []
    _check_shape(variable, key, shape)
    return key, local_parts(variable.cell)


def _read_parts(
    source: CheckpointSource, key: str, parts: Sequence[Part]
) -> dict[Part, np.ndarray]:
    """Return the parts of one array, each in memory that is not shared.

    For a `Stored` source, the buffers are allocated but not yet filled.
    """
    # Allocate here: memory allocated in the reading threads would come fresh from the system.
    if isinstance(source, Stored):
        return {part: source.room(key, part) for part in parts}
    value = source.read(key) if parts else np.empty(0)
    return {p: (value.ravel() if p.is_flat else value)[p.slices()].copy() for p in parts}


def _fit(
    source: CheckpointSource, key: str, x: Any, found: Mapping[Part, np.ndarray]
) -> Callable[[], Any]:
    """Check that the value for ``x`` fits, reading it if ``found`` is empty.

    Return a function that restores ``x`` and cannot fail.
    """
    variable = variable_of(x)
    if found and variable is not None:
        parts = {part: _fitted(variable, key, value) for part, value in found.items()}
        return partial(put_parts, variable.cell, parts)
    value = source.read(key)
    if not is_variable(x):
        return partial(x.restore_state, value)
    target = x if variable is None else variable
    _check_shape(target, key, np.shape(value))
    value = _fitted(target, key, value)
    return (
        partial(set_free_value, x, value) if variable is None else partial(variable.assign, value)
    )


def free_value(x: Any) -> Any:
    """Return the value of a library's variable that is not backed by an `rx.Variable`."""
    read = getattr(type(x), "get_value", None)  # NNX deprecates the attribute `value`
    return x.value if read is None else read(x)


def set_free_value(x: Any, value: Any) -> None:
    """Replace the value of a library's variable that is not backed by an `rx.Variable`."""
    value = jnp.asarray(value)
    if hasattr(type(x), "set_value"):
        x.set_value(value)
    else:
        x.value = value


def _check_shape(x: Any, key: str, shape: tuple[int, ...]) -> None:
    if shape != tuple(x.shape):
        raise VariableError(
            f"The checkpoint has {key!r} with shape {shape}, and the variable that it is for has"
            f" shape {tuple(x.shape)}. Nothing was restored. Build the model as it was when it was"
            " saved."
        )


def is_placed(variable: Variable) -> bool:
    """Whether a variable is restored by placing its shards directly, instead of by `assign`."""
    cell = variable.cell
    is_keys = jnp.issubdtype(cell.dtype, jax.dtypes.extended)
    return not (is_keys or cell.per_replica or variable.whole is not variable)


def copies_mark(variable: Variable) -> str | None:
    """Describe the layout on which the reduced value of a variable's per-replica copies depends.

    Return None if the variable has no such copies. Copies are restored, instead of their reduced
    value, only if they reduce to that value: with the same number of replicas, the same kind of
    device, the same distribution over workers, and the same aggregation.
    """
    cell, topology = variable.cell, variable.cell.topology
    is_keys = jnp.issubdtype(cell.dtype, jax.dtypes.extended)
    if not cell.per_replica or is_keys or variable.whole is not variable or topology is None:
        return None
    leads = topology.devices[:: topology.cores]
    rows = [len(list(group)) for _, group in groupby(leads, key=lambda d: d.process_index)]
    kind = topology.kind or leads[0].platform.upper()
    return f"{variable.aggregation.name} {kind} {'+'.join(map(str, rows))} x {topology.cores}"


def _fitted(x: Any, key: str, value: Any) -> Any:
    if is_key(value) or np.dtype(value.dtype) == np.dtype(x.dtype):
        return value
    new = value.astype(x.dtype)
    if value.dtype.kind != new.dtype.kind or not _same(new, value):
        raise VariableError(
            f"The checkpoint has {key!r} with dtype {value.dtype}, and the variable that it is for"
            f" has {x.dtype}, which cannot hold it. Nothing was restored. Make the variable with"
            f" dtype={str(value.dtype)!r}, or convert the value that"
            " `rx.train.load_checkpoint(path).get_tensor(name)` gives."
        )
    return new


def _same(new: np.ndarray, old: np.ndarray) -> bool:
    # Without x64, JAX has no float64 and would have rounded anyway; no other loss is accepted.
    rounds = old.dtype == np.float64 and new.dtype == np.float32
    return rounds or bool(((new == old) | ((new != new) & (old != old))).all())
