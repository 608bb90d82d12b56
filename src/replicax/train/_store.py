"""Checkpoints on disk: a folder with arrays that Orbax wrote, and one small file that says so.

A checkpoint is a folder. Its arrays lie below it in a folder of a random name, which
``checkpoint.json`` names, with the graph of the saved objects, where each array is, the size and
the checksums of every file, and a checksum of itself. Every worker writes what it holds; then that
file is put in its place, in one step of the file system: a save that was cut short has left no
checkpoint, or the one that was there before. There is no pickle; nothing is read that
``checkpoint.json`` does not name, and links are not followed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._faults import fault_point
from replicax.cluster._checks import WorkerLostError
from replicax.train import _files, _orbax_private
from replicax.train._files import (
    DATA,
    FORMAT,
    MANIFEST,
    CheckedFiles,
    checksums,
    manifest,
    put_manifest,
)
from replicax.train._object_graph import ObjectNode
from replicax.train._orbax_private import chunk
from replicax.train._pieces import Packed, Value, packed, saved_arrays, shared_out
from replicax.workers import _group
from replicax.workers._watch import disk

_DRAFT = re.compile(re.escape(MANIFEST) + r"-[0-9a-f]{16}")
_RUN = secrets.token_hex(8)  # of this process
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
    folder = ""
    with ExitStack() as stack:
        try:
            path, folder = team.each(lambda: _begin(path, stack) if team.is_first else None)[0]
            _write(team, path, folder, content)
        except BaseException:
            if team.is_first and folder and _folder(path) != folder:
                _discard(path, folder)
            raise
    if team.is_first:
        with disk.at(f"tidying {path!r} up"):
            _sweep(path)


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


def _begin(path: str, stack: ExitStack) -> tuple[str, str]:
    """Make the folder for a new checkpoint, which is locked until that is whole."""
    path = os.path.abspath(path)
    folder = f"data-{secrets.token_hex(8)}"
    place = os.path.join(path, folder)
    try:
        os.makedirs(place)
        stack.enter_context(_files.locked(place))
        fault_point("commit-begin")
    except BaseException:
        _discard(path, folder)
        raise
    return path, folder


def _discard(path: str, folder: str) -> None:
    """Remove what a save that failed has written."""
    shutil.rmtree(os.path.join(path, folder), ignore_errors=True)
    with suppress(OSError):  # if there is something else in it
        os.rmdir(path)


def _write(team: _Team, path: str, folder: str, content: Content) -> None:
    place = os.path.join(path, folder)
    values, entries = _described(content.arrays)
    sees = team.each(lambda: os.path.isdir(place))
    tasks, lost = shared_out(values, [index for index, can in enumerate(sees) if can])
    if lost:
        raise OSError(
            f"Checkpoint {path!r} could not be written: {team.describe(sees.index(False))} holds"
            f" parts of {lost[0]!r} and {len(lost) - 1} other values, and does not see that folder"
            " of the first worker's. Save to a directory that all workers share."
        )
    own: dict[str, Any] = {}
    packs: list[Any] = []

    def pack_own() -> None:
        if sees[team.index]:
            packs.extend(packed(tasks[team.index], f"arrays-{team.index}"))

    def write_own() -> str | None:
        if packs:
            own.update(_write_own(place, f"arrays-{team.index}", *packs))
            fault_point("commit-write")
        return _noted(place, team.index, own) if own and not team.is_first else None

    told = team.each(write_own, pack_own)

    def commit() -> None:
        _tell_replaced(path)
        others = [_taken(place, index, digest) for index, digest in enumerate(told) if digest]
        put_manifest(path, _body(place, [own, *others], entries, content))

    team.each(lambda: commit() if team.is_first else None)


def _tell_replaced(path: str) -> None:
    """Name the checkpoint of another run whose place is taken."""
    with suppress(OSError):
        if (old := manifest(path)).get("run") != _RUN:
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


def _write_own(
    place: str, folder: str, tree: dict[str, Packed], rows: list[tuple[str, list[Any]]]
) -> dict[str, Any]:
    """Write what this worker has to; returns what the manifest says of it."""
    files: dict[str, Any] = {}
    if tree:
        inner = os.path.join(place, folder)
        _orbax_private.save(inner, tree, Packed)
        with ThreadPoolExecutor(_files.THREADS) as pool:  # while the disk has its own to do
            sums = {name: pool.submit(checksums, *joined.parts) for name, joined in tree.items()}
            _files.settle(inner)
        for name in _files.files_below(inner):
            if name.split("/")[0] not in tree or name.endswith(".zarray"):  # what Orbax says of it
                with open(os.path.join(inner, name), "rb") as file:
                    data = file.read()
                files[f"{folder}/{name}"] = [len(data), checksums(data)]
        for name, joined in tree.items():
            where = chunk(f"{folder}/{name}", len(joined.shape))
            files[where] = [sum(part.nbytes for part in joined.parts), sums[name].result()]
    return {"pieces": rows, "files": files}


def _noted(place: str, index: int, own: dict[str, Any]) -> str:
    """Leave what a worker has written for the first one to read; returns its checksum."""
    text = json.dumps(own)
    with open(os.path.join(place, f"index-{index}"), "x") as file:
        file.write(text)
    return hashlib.sha256(text.encode()).hexdigest()


def _taken(place: str, index: int, digest: str) -> dict[str, Any]:
    name = os.path.join(place, f"index-{index}")
    with open(name, "rb") as file:
        text = file.read()
    if hashlib.sha256(text).hexdigest() != digest:
        raise OSError(f"{name!r} is not as worker {index} wrote it")
    os.unlink(name)
    own: dict[str, Any] = json.loads(text)
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
        "run": _RUN,
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


def _sweep(path: str) -> None:
    """Remove what earlier saves to the same place have left: names of our own, not in use."""
    for name in os.listdir(path):
        if DATA.fullmatch(name):
            with _files.locked(os.path.join(path, name)) as is_ours:
                # Whoever has written it has said so before he unlocked it.
                if is_ours and name != _folder(path):
                    shutil.rmtree(os.path.join(path, name), ignore_errors=True)
        elif _DRAFT.fullmatch(name):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))


def remove(path: str) -> None:
    """Remove a checkpoint: its manifest first, so that it never looks whole when it is not."""
    with disk.at(f"removing the old checkpoint {path!r}"):
        with suppress(FileNotFoundError):  # somebody has removed it already
            os.unlink(os.path.join(path, MANIFEST))
            fault_point("prune")
            _sweep(path)
        with suppress(OSError):  # somebody else's files may be in it
            os.rmdir(path)


def _folder(path: str) -> str | None:
    """The folder that the checkpoint at ``path`` has its arrays in."""
    with suppress(OSError):
        folder: str = manifest(path)["folder"]
        return folder
    return None
