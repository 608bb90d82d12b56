"""Writing checkpoints: Orbax writes the arrays, and an atomically replaced manifest commits them.

A checkpoint is a folder. Its arrays are in a subfolder with a random name. The manifest,
``checkpoint.json``, records the name of that subfolder, the graph of the saved objects, the
location of each array, size and checksums of every file, and a checksum of itself. Every worker
writes the shards it holds; then the manifest is put in place atomically. An interrupted save
leaves the previous checkpoint, or none. Nothing is pickled, no file is read that the manifest does
not name, and symbolic links are not followed.

`Folder` stores checkpoints in a local file system, `object_store.Objects` at a URL.
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

from replicax._src.base.fault_points import fault_point
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.files import storage
from replicax._src.files.paths import absolute, is_url
from replicax._src.train import checkpoint_files
from replicax._src.train.array_pieces import Value, assign_tasks, packed, saved_arrays
from replicax._src.train.checkpoint_files import FORMAT, RUN, CheckedFiles, folder_of, manifest
from replicax._src.train.local_store import Folder
from replicax._src.train.object_graph import ObjectNode
from replicax._src.train.object_store import Objects
from replicax._src.workers import group
from replicax._src.workers.watchdog import disk

log = logging.getLogger("replicax")


@dataclass(frozen=True)
class Content:
    """The content of one checkpoint.

    Attributes:
        nodes: The graph of the saved objects.
        arrays: The values of variables, by key: arrays, or `Value`s.
        states: The serialized states of other objects, by key: plain Python values.
    """

    nodes: list[ObjectNode]
    arrays: Mapping[str, Any]
    states: dict[str, Any]


def write(path: str, content: Content, ticket: int) -> None:
    """Write a checkpoint, replacing the one at ``path`` if there is one.

    With several workers, all must call this; the first worker's ``path`` is used. Each worker
    writes its share, and all raise if one of them fails.

    Args:
        path: The folder of the checkpoint.
        content: The content to write.
        ticket: A number that is the same on all workers and different for every save.

    Raises:
        OSError: The checkpoint cannot be written; an existing one is unchanged.
    """
    team = _Team(path, ticket)
    folder, at = "", place_of(path)
    with ExitStack() as stack:
        try:
            path, folder = team.each(lambda: _begin(path, stack) if team.is_first else None)[0]
            at = place_of(path)
            _write(team, at, folder, content)
        except BaseException:
            # Keep the files if the manifest was committed before the failure.
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
    """Remove a checkpoint, its manifest first, so a partly deleted one is never visible."""
    with disk.at(f"removing the old checkpoint {path!r}"):
        place_of(path).remove()


def place_of(path: str) -> Folder | Objects:
    """Return the storage backend for the checkpoint at ``path``, local or remote."""
    return Objects(path) if is_url(path) else Folder(path)


class _Team:
    """The workers that write one checkpoint."""

    def __init__(self, path: str, ticket: int) -> None:
        self._group = group.current()
        self._generation = 0 if self._group is None else self._group.generation
        self.index = 0 if self._group is None else self._group.facts.index
        self.is_first = self.index == 0
        self._path = path
        self._topics = (f"checkpoint {ticket}, {step}" for step in range(9))

    def each(self, work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> list[Any]:
        """Run ``work`` on every worker and return all results; raise on all if one failed.

        Args:
            work: Does the I/O, under the watchdog's timeout; its result must be JSON.
            prepare: Called first, without that timeout, because it may wait for devices.
        """
        failure, result = None, None
        try:
            prepare()
            with disk.at(f"writing checkpoint {self._path!r}"):
                result = work()
        except Exception as error:
            failure = checkpoint_files.save_error(error, self._path)
        if self._group is None:
            outcomes = [("", result)]
        elif self._group.generation != self._generation:
            raise OSError(f"Checkpoint {self._path!r} was not completed: a worker was lost.")
        else:
            reason = "" if failure is None else f"{type(failure).__name__}: {failure}"
            try:
                outcomes = self._group.exchange(next(self._topics), (reason, result), lambda: False)
            except WorkerLostError as error:
                error.add_note(
                    f"This worker was waiting for all others to save {self._path!r} together with"
                    " it: every worker must call `save` at the same step."
                )
                raise
        if failure is not None:
            raise failure
        for index, (reason, _) in enumerate(outcomes):
            if reason:
                raise OSError(f"{self.describe(index)} could not save: {reason}")
        return [result for _, result in outcomes]

    def describe(self, index: int) -> str:
        """Return the name of a worker for a message."""
        return "This process" if self._group is None else self._group.describe(index)


def _write(team: _Team, at: Folder | Objects, folder: str, content: Content) -> None:
    path = at.path
    place = os.path.join(path, folder)
    values, entries = _described(content.arrays)
    sees = team.each(lambda: at.sees(folder))
    tasks, lost = assign_tasks(values, [index for index, can in enumerate(sees) if can])
    if lost:
        raise OSError(
            f"Checkpoint {path!r} could not be written: {team.describe(sees.index(False))} holds"
            f" parts of {lost[0]!r} and {len(lost) - 1} other values, and does not see that folder"
            " of the first worker's. Save to a directory that all workers share."
        )
    _warn_unshared(team, path, sees)
    local: dict[str, Any] = {}  # the pieces and files that this worker writes
    packs: list[Any] = []

    def pack_local() -> None:
        if sees[team.index]:
            packs.extend(packed(tasks[team.index], f"arrays-{team.index}"))

    def write_local() -> str | None:
        if packs:
            tree, rows = packs
            files = at.save_arrays(folder, f"arrays-{team.index}", tree) if tree else {}
            local.update({"pieces": rows, "files": files})
            fault_point("commit-write")
        return _put_index(place, team.index, local) if local and not team.is_first else None

    digests = team.each(write_local, pack_local)

    def commit() -> None:
        _warn_replaced(path)
        others = [_take_index(place, i, digest) for i, digest in enumerate(digests) if digest]
        at.put_manifest(_body(place, [local, *others], entries, content))

    team.each(lambda: commit() if team.is_first else None)


def _warn_unshared(team: _Team, path: str, sees: list[bool]) -> None:
    """Warn once per directory that not all workers see it, and so cannot restore from it.

    This is reported at the first save, because after a restart it is too late.
    """
    folder = os.path.dirname(path)
    if all(sees) or not (team.is_first or not sees[team.index]) or folder in _warned_of:
        return
    _warned_of.add(folder)
    log.warning(
        "Checkpoint %r is on the machine of %s only: %s does not see that folder, and cannot"
        " restore the checkpoint after a restart. Save to a directory that all workers share.",
        path,
        team.describe(0),
        team.describe(sees.index(False)),
    )


_warned_of: set[str] = set()


def _warn_replaced(path: str) -> None:
    """Log a warning if the checkpoint at ``path``, about to be replaced, is of another run."""
    with suppress(OSError):
        if (old := manifest(path)).get("run") != RUN:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(old["time"] / 1e9))
            log.warning("Checkpoint %r, which another run saved at %s, is replaced.", path, when)


def _described(arrays: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, dict[str, Any]]]:
    """Return the values to write and their manifest entries, which lack the pieces so far."""
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


def _put_index(place: str, index: int, local: dict[str, Any]) -> str:
    """Store a worker's pieces and files for the first worker to read; return a digest."""
    data = json.dumps(local).encode()
    storage.put(f"{place}/index-{index}", data)
    return hashlib.sha256(data).hexdigest()


def _take_index(place: str, index: int, digest: str) -> dict[str, Any]:
    """Read, verify and remove the file that `_put_index` wrote on worker ``index``."""
    name = f"{place}/index-{index}"
    data = storage.read_bytes(name)
    if hashlib.sha256(data).hexdigest() != digest:
        raise OSError(f"{name!r} is not as worker {index} wrote it")
    storage.remove(name)
    written: dict[str, Any] = json.loads(data)
    return written


def _body(
    place: str,
    written: Sequence[dict[str, Any]],
    entries: dict[str, dict[str, Any]],
    content: Content,
) -> dict[str, Any]:
    """Build and verify the manifest from the pieces and files that all workers wrote."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "time": checkpoint_files.time_after(os.path.dirname(place)),
        "run": RUN,
        "folder": os.path.basename(place),
        "arrays": entries,
        "files": {name: sums for part in written for name, sums in part["files"].items()},
        "states": content.states,
        "nodes": [[n.children, n.values] for n in content.nodes],
    }
    for part in written:
        for key, piece in part["pieces"]:
            entries[key]["pieces"].append(piece)
    files = CheckedFiles(place, body["files"])
    files.verify()
    for key, saved in saved_arrays(body).items():
        try:
            saved.check(files)
        except ValueError as error:
            raise OSError(f"the workers save different objects: of {key!r}, {error}") from None
    return body
