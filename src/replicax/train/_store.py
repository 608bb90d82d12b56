"""Checkpoints on disk: a folder with arrays that Orbax wrote, and one small file that says so.

A checkpoint is a folder. Its arrays lie below it in a folder of a random name, which
``checkpoint.json`` names, with the graph of the saved objects, where each array is, the size and
the checksums of every file, and a checksum of itself. Every worker writes what it holds; then that
file is put in its place, in one step of the file system: a save that was cut short has left no
checkpoint, or the one that was there before. There is no pickle; nothing is read that
``checkpoint.json`` does not name, and links are not followed.

`Folder` is such a place in a local file system, `replicax.train._objects.Objects` one behind a URL.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._faults import fault_point
from replicax.cluster._checks import WorkerLostError
from replicax.data import _storage
from replicax.data._paths import absolute, is_url
from replicax.train import _files
from replicax.train._files import FORMAT, RUN, CheckedFiles, folder_of, manifest
from replicax.train._folder import Folder
from replicax.train._object_graph import ObjectNode
from replicax.train._objects import Objects
from replicax.train._pieces import Value, packed, saved_arrays, shared_out
from replicax.workers import _group
from replicax.workers._watch import disk

log = logging.getLogger("replicax")


@dataclass(frozen=True)
class Content:
    """What one checkpoint holds.

    Attributes:
        nodes: The graph of the saved objects.
        arrays: The values of variables, by key: arrays, or `Value`s.
        states: What other objects said of themselves, by key: plain Python values.
    """

    nodes: list[ObjectNode]
    arrays: Mapping[str, Any]
    states: dict[str, Any]


def write(path: str, content: Content, ticket: int) -> None:
    """Write a checkpoint, in place of the one that may be at ``path``.

    With several workers all call it, and the first one's ``path`` counts: each writes what it
    holds, once, and all hear whether all could.

    Args:
        path: Its folder.
        content: What to write.
        ticket: The same number on all workers, and another one for every save.

    Raises:
        OSError: If it cannot be written; a checkpoint that was there before is as it was.
    """
    team = _Team(path, ticket)
    folder, at = "", place_of(path)
    with ExitStack() as stack:
        try:
            path, folder = team.each(lambda: _begin(path, stack) if team.is_first else None)[0]
            at = place_of(path)
            _write(team, at, folder, content)
        except BaseException:
            if team.is_first and folder and folder_of(path) != folder:
                at.discard(folder)
            raise
    if team.is_first:
        with disk.at(f"tidying {path!r} up"):
            at.sweep()


def _begin(path: str, stack: ExitStack) -> tuple[str, str]:
    path = absolute(path)
    return path, place_of(path).begin(stack)


def remove(path: str) -> None:
    """Remove a checkpoint: its manifest first, so that it never looks whole when it is not."""
    with disk.at(f"removing the old checkpoint {path!r}"):
        place_of(path).remove()


def place_of(path: str) -> Folder | Objects:
    """Return the place of a checkpoint, whatever file system it is in."""
    return Objects(path) if is_url(path) else Folder(path)


class _Team:
    """The workers that write one checkpoint."""

    def __init__(self, path: str, ticket: int) -> None:
        self._group = _group.current()
        self.index = 0 if self._group is None else self._group.facts.index
        self.is_first = self.index == 0
        self._path = path
        self._topics = (f"checkpoint {ticket}, {step}" for step in range(9))

    def each(self, work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> list[Any]:
        """What ``work``, at the disk, gave on every worker; all fail if it failed on one.

        Args:
            work: Reads or writes.
            prepare: Called before it; it may wait for the devices as long as their work takes.
        """
        failure, result = None, None
        try:
            prepare()
            with disk.at(f"writing checkpoint {self._path!r}"):
                result = work()
        except Exception as error:
            failure = _files.explained(error, self._path)
        if self._group is None:
            words = [("", result)]
        else:
            told = "" if failure is None else f"{type(failure).__name__}: {failure}"
            try:
                words = self._group.exchange(next(self._topics), (told, result), lambda: False)
            except WorkerLostError as error:
                error.add_note(
                    f"This worker was waiting for all others to save {self._path!r} together with"
                    " it: every worker must call `save` at the same step."
                )
                raise
        if failure is not None:
            raise failure
        for index, (told, _) in enumerate(words):
            if told:
                raise OSError(f"{self.describe(index)} could not save: {told}")
        return [result for _, result in words]

    def describe(self, index: int) -> str:
        """A worker, for a message."""
        return "This process" if self._group is None else self._group.describe(index)


def _write(team: _Team, at: Folder | Objects, folder: str, content: Content) -> None:
    path = at.path
    place = os.path.join(path, folder)
    values, entries = _described(content.arrays)
    sees = team.each(lambda: at.sees(folder))
    tasks, lost = shared_out(values, [index for index, can in enumerate(sees) if can])
    if lost:
        raise OSError(
            f"Checkpoint {path!r} could not be written: {team.describe(sees.index(False))} holds"
            f" parts of {lost[0]!r} and {len(lost) - 1} other values, and does not see that folder"
            " of the first worker's. Save to a directory that all workers share."
        )
    _tell_unshared(team, path, sees)
    own: dict[str, Any] = {}
    packs: list[Any] = []

    def pack_own() -> None:
        if sees[team.index]:
            packs.extend(packed(tasks[team.index], f"arrays-{team.index}"))

    def write_own() -> str | None:
        if packs:
            tree, rows = packs
            files = at.save_arrays(folder, f"arrays-{team.index}", tree) if tree else {}
            own.update({"pieces": rows, "files": files})
            fault_point("commit-write")
        return _noted(place, team.index, own) if own and not team.is_first else None

    told = team.each(write_own, pack_own)

    def commit() -> None:
        _tell_replaced(path)
        others = [_taken(place, index, digest) for index, digest in enumerate(told) if digest]
        at.put_manifest(_body(place, [own, *others], entries, content))

    team.each(lambda: commit() if team.is_first else None)


def _tell_unshared(team: _Team, path: str, sees: list[bool]) -> None:
    """Warn at the first save, not when a restart finds nothing to restore."""
    folder = os.path.dirname(path)
    if all(sees) or not (team.is_first or not sees[team.index]) or folder in _told_of:
        return
    _told_of.add(folder)
    log.warning(
        "Checkpoint %r is on the machine of %s only: %s does not see that folder, and cannot"
        " restore the checkpoint after a restart. Save to a directory that all workers share.",
        path,
        team.describe(0),
        team.describe(sees.index(False)),
    )


_told_of: set[str] = set()


def _tell_replaced(path: str) -> None:
    """Name the checkpoint of another run whose place is taken."""
    with suppress(OSError):
        if (old := manifest(path)).get("run") != RUN:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(old["time"] / 1e9))
            log.warning("Checkpoint %r, which another run saved at %s, is replaced.", path, when)


def _described(arrays: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, dict[str, Any]]]:
    """The values as they are written, and what the manifest says of each."""
    values, entries = {}, {}
    for key, x in arrays.items():
        value, more = x if isinstance(x, Value) else Value(x), {}
        if jnp.issubdtype(value.array.dtype, jax.dtypes.prng_key):
            more = {"key": str(jax.random.key_impl(value.array))}
            value = Value(np.asarray(jax.random.key_data(value.array)))
        elif value.copies_on is not None:
            more = {"copies_on": value.copies_on}
        values[key], name = value, np.dtype(value.array.dtype).name
        entries[key] = {"dtype": name, "shape": list(value.shape), "pieces": [], **more}
    return values, entries


def _noted(place: str, index: int, own: dict[str, Any]) -> str:
    """Leave what a worker has written for the first one to read; returns its checksum."""
    data = json.dumps(own).encode()
    _storage.put(f"{place}/index-{index}", data)
    return hashlib.sha256(data).hexdigest()


def _taken(place: str, index: int, digest: str) -> dict[str, Any]:
    name = f"{place}/index-{index}"
    data = _storage.read_bytes(name)
    if hashlib.sha256(data).hexdigest() != digest:
        raise OSError(f"{name!r} is not as worker {index} wrote it")
    _storage.remove(name)
    own: dict[str, Any] = json.loads(data)
    return own


def _body(
    place: str,
    written: Sequence[dict[str, Any]],
    entries: dict[str, dict[str, Any]],
    content: Content,
) -> dict[str, Any]:
    """The manifest, of what all workers have written."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "time": _files.time_after(os.path.dirname(place)),
        "run": RUN,
        "folder": os.path.basename(place),
        "arrays": entries,
        "files": {name: sums for own in written for name, sums in own["files"].items()},
        "states": content.states,
        "nodes": [[n.children, n.values] for n in content.nodes],
    }
    for own in written:
        for key, piece in own["pieces"]:
            entries[key]["pieces"].append(piece)
    files = CheckedFiles(place, body["files"])
    files.verify()
    for key, saved in saved_arrays(body).items():
        try:
            saved.check(files)
        except ValueError as error:
            raise OSError(f"the workers save different objects: of {key!r}, {error}") from None
    return body
