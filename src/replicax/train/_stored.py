"""One checkpoint, ours or TensorFlow's: what it holds, and how objects are restored from it."""

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

from replicax._errors import VariableError
from replicax._faults import fault_point
from replicax.data._errors import FailedPreconditionError, NotFoundError
from replicax.state._declaration import is_key
from replicax.state._held import variable_of
from replicax.state._variable import Variable
from replicax.train._files import MANIFEST, THREADS, CheckedFiles, is_stored, manifest, refused
from replicax.train._object_graph import OWN, Names, ObjectNode, copies_key, is_variable
from replicax.train._pieces import Part, own_parts, put_parts, saved_arrays, whole
from replicax.train._tensor_bundle import TensorBundle, is_bundle
from replicax.workers import _group
from replicax.workers._watch import disk


class CheckpointSource(Protocol):
    """One checkpoint that can be read."""

    identity: str  # the same for the same checkpoint, wherever it is

    @property
    @abstractmethod
    def nodes(self) -> list[ObjectNode]:
        """The graph of the saved objects, the root first."""

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array, by name."""

    @abstractmethod
    def dtype(self, key: str) -> np.dtype[Any]:
        """The dtype of one array."""

    @abstractmethod
    def read(self, key: str) -> Any:
        """The value of one array, or the state of an object."""

    @property
    @abstractmethod
    def names(self) -> Names:
        """What the names in the graph mean."""


class Stored:
    """One checkpoint of ours.

    Raises:
        NotFoundError: If there is none.
        DataLossError: If its manifest is damaged.
    """

    names = OWN

    def __init__(self, path: str) -> None:
        self._path = path
        body = manifest(path)
        with refused(os.path.join(path, MANIFEST)):
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
        """The shape of every array, by key."""
        arrays = sorted(self._arrays.items())
        return {key: saved.shape for key, saved in arrays if saved.copies_on is None}

    def copies(self, key: str, held: Variable) -> str | None:
        """Where the copies of a value stand, if ``held`` can take them as they are."""
        saved, mark = self._arrays.get(copies_key(key)), copies_mark(held)
        if saved is None or mark is None or saved.copies_on != mark:
            return None
        cell = held.cell
        is_same = saved.shape == cell.stored_shape and saved.dtype == np.dtype(cell.dtype)
        return copies_key(key) if is_same else None

    def dtype(self, key: str) -> np.dtype[Any]:
        """The dtype of one array."""
        return self._arrays[key].dtype

    def read(self, key: str) -> Any:
        """The value of one variable, or the state of an object.

        Raises:
            NotFoundError: If the checkpoint has none of that name.
            DataLossError: If a file of the checkpoint is damaged.
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
        """Memory for a part of one array."""
        saved = self._arrays[key]
        if saved.key_impl is not None:
            raise VariableError(f"The checkpoint has random keys as {key!r}, not numbers.")
        return saved.empty(part)

    def read_part(self, key: str, part: Part, into: np.ndarray) -> None:
        """A part of one array; no more is read than the blocks of the files that it lies in."""
        self._arrays[key].read(self._files, part, into)

    def verify(self) -> None:
        """See that all files are there, and of the right size; they are checked when read.

        Raises:
            DataLossError: If one is damaged or missing; it is named.
        """
        self._files.verify()


def opened(path: str) -> CheckpointSource:
    """The checkpoint at ``path``.

    Raises:
        NotFoundError: If there is none.
        DataLossError: If it is damaged.
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
    """Restore objects, all or none: values are read and compared first.

    If some are variables of several workers, all of them must call it, with the same checkpoint.

    Args:
        source: The checkpoint.
        pairs: The objects, by the keys of what they are restored from.

    Raises:
        DataLossError: If it is damaged.
        VariableError: If a value does not fit its variable.
        FailedPreconditionError: If the workers have different checkpoints.
    """
    _agree(source, pairs.values())
    shapes = source.shapes()
    needed = {key: _needed(source, key, x, shapes.get(key)) for key, x in pairs.items()}
    with disk.at("reading a checkpoint"):
        fault_point("restore")
        found = {key: _read_parts(source, *parts) for key, parts in needed.items()}
        if isinstance(source, Stored):
            jobs = [(needed[k][0], *job) for k, rooms in found.items() for job in rooms.items()]
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda job: source.read_part(*job), jobs))
        put = [_fit(source, key, x, found[key]) for key, x in pairs.items()]
    for restore in put:
        restore()


def _agree(source: CheckpointSource, objects: Iterable[Any]) -> None:
    held = (variable_of(x) for x in objects)
    topologies = {v.cell.topology for v in held if v is not None}
    if all(topology is None or topology.is_whole for topology in topologies):
        return
    group = _group.required()
    told = group.agree("the checkpoint that is restored", source.identity)
    others = [index for index, identity in enumerate(told) if identity != told[0]]
    if others:
        raise FailedPreconditionError(
            f"{group.describe(others[0])} and {group.describe(0)} restore different checkpoints"
            " into variables that they share. Nothing was restored. Keep checkpoints in a"
            " directory that all workers share, or copy the same one to each."
        )


def _needed(source: CheckpointSource, key: str, x: Any, shape: Any) -> tuple[str, list[Part]]:
    """The parts that an object needs here, and of what; none if they are not put, but assigned."""
    if is_variable(x) != (shape is not None):
        saved, here = ("a value", "none") if shape is not None else ("none", "one")
        raise VariableError(
            f"The checkpoint has {saved} for {key!r}, and the {type(x).__name__} that it is for has"
            f" {here}. Nothing was restored. Build the objects as they were when they were saved."
        )
    held = variable_of(x)
    if held is None:
        return key, []
    copies = source.copies(key, held) if isinstance(source, Stored) else None
    if copies is not None:
        return copies, own_parts(held.cell)
    if not is_placed(held):
        return key, []
    _check_shape(x, key, shape)
    return key, own_parts(held.cell)


def _read_parts(
    source: CheckpointSource, key: str, parts: Sequence[Part]
) -> dict[Part, np.ndarray]:
    """Parts of one array, in memory of their own; of ours the memory, which is filled later."""
    if isinstance(source, Stored):  # what threads allocate, they get anew from the system
        return {part: source.room(key, part) for part in parts}
    value = source.read(key) if parts else np.empty(0)
    return {p: (value.ravel() if p.is_flat else value)[p.slices()].copy() for p in parts}


def _fit(
    source: CheckpointSource, key: str, x: Any, found: Mapping[Part, np.ndarray]
) -> Callable[[], Any]:
    """See that what was read fits, and read what was not; returns what puts it in its place."""
    held = variable_of(x)
    if found and held is not None:
        return partial(put_parts, held.cell, {p: _fitted(x, key, v) for p, v in found.items()})
    value = source.read(key)
    if not is_variable(x):
        return partial(x.restore_state, value)
    _check_shape(x, key, np.shape(value))
    value = _fitted(x, key, value)
    return partial(setattr, x, "value", value) if held is None else partial(held.assign, value)


def _check_shape(x: Any, key: str, shape: tuple[int, ...]) -> None:
    if shape != tuple(x.shape):
        raise VariableError(
            f"The checkpoint has {key!r} with shape {shape}, and the variable that it is for has"
            f" shape {tuple(x.shape)}. Nothing was restored. Build the model as it was when it was"
            " saved."
        )


def is_placed(held: Variable) -> bool:
    """Whether a variable's parts are put where they belong, and not assigned."""
    cell = held.cell
    is_keys = jnp.issubdtype(cell.dtype, jax.dtypes.extended)
    return not (is_keys or cell.per_replica or held.whole is not held)


def copies_mark(held: Variable) -> str | None:
    """What the total of a variable's copies depends on besides them; None if it has no copies.

    Copies are restored, in place of their total, only where they have that total: on as many
    replicas, of the same kind and shared out over workers alike, and combined in the same way.
    """
    cell, topology = held.cell, held.cell.topology
    is_keys = jnp.issubdtype(cell.dtype, jax.dtypes.extended)
    if not cell.per_replica or is_keys or held.whole is not held or topology is None:
        return None
    leads = topology.devices[:: topology.cores]
    rows = [len(list(group)) for _, group in groupby(leads, key=lambda d: d.process_index)]
    kind = topology.kind or leads[0].platform.upper()
    return f"{held.aggregation.name} {kind} {'+'.join(map(str, rows))} x {topology.cores}"


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
    # Without x64 JAX has no float64, and would have rounded it anyway; nothing else may be lost.
    rounds = old.dtype == np.float64 and new.dtype == np.float32
    return rounds or bool(((new == old) | ((new != new) & (old != old))).all())
