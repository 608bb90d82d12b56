"""Checkpoints on disk: a folder with arrays that Orbax wrote, and one small file that says so.

A checkpoint is a folder. Its arrays lie below it in a folder of a random name, which
``checkpoint.json`` names, with the graph of the saved objects, the size and the SHA-256 of every
file, and a checksum of itself. That file is put in its place
last, in one step of the file system: a save that was cut short has left no checkpoint, or the one
that was there before. There is no pickle; nothing is read that ``checkpoint.json`` does not name,
and links are not followed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._lazy import LazyModule
from replicax.data._errors import DataLossError, NotFoundError
from replicax.train._object_graph import Node, part_of
from replicax.workers import _group

MANIFEST = "checkpoint.json"

_FORMAT = 1
# Names of our own: a folder that somebody gives us may have others.
_DATA = re.compile(r"data-[0-9a-f]{16}")
_DRAFT = re.compile(re.escape(MANIFEST) + r"-[0-9a-f]{16}")
_MAX_MANIFEST = 1 << 28
_quieting = threading.Lock()
_ocp: Any = LazyModule("orbax.checkpoint", extra="checkpoint")


@dataclass(frozen=True)
class Content:
    """What one checkpoint holds.

    Attributes:
        nodes: The graph of the saved objects.
        arrays: The values of variables, by key.
        states: What other objects said of themselves, by key: plain Python values.
    """

    nodes: list[Node]
    arrays: dict[str, Any]
    states: dict[str, Any]


def write(path: str, content: Content, ticket: int) -> None:
    """Write a checkpoint, in place of the one that may be at ``path``.

    With several workers all call it: the first one writes, and all hear whether it could.

    Args:
        path: Its folder.
        content: What to write.
        ticket: The same number on all workers, and another one for every save.

    Raises:
        OSError: If it cannot be written; a checkpoint that was there before is as it was.
    """
    group = _group.current()
    failure: Exception | None = None
    if group is None or group.facts.index == 0:
        try:
            _write(path, content)
        except Exception as error:
            failure = error
    if group is not None:
        word = None if failure is None else f"{type(failure).__name__}: {failure}"
        first = group.exchange(f"checkpoint {ticket}", word, lambda: False)[0]
        if first is not None and failure is None:
            raise OSError(f"{group.describe(0)} could not write checkpoint {path!r}: {first}")
    if failure is not None:
        raise failure


def _write(path: str, content: Content) -> None:
    os.makedirs(path, exist_ok=True)
    folder = f"data-{secrets.token_hex(8)}"
    place = os.path.join(path, folder)
    entries: dict[str, Any] = {}
    tree: dict[str, np.ndarray] = {}
    for number, (key, value) in enumerate(content.arrays.items()):
        host, kind = _on_host(value)
        entries[key] = {"dtype": host.dtype.name, "shape": list(host.shape), **kind}
        if host.size:  # Orbax takes no empty arrays
            entries[key]["name"] = f"a{number}"
            tree[f"a{number}"] = host
    try:
        os.mkdir(place)
        if tree:
            with _quiet(), _checkpointer() as checkpointer:
                checkpointer.save(os.path.abspath(os.path.join(place, "arrays")), tree)
        body = {
            "format": _FORMAT,
            "time": time.time_ns(),
            "folder": folder,
            "arrays": entries,
            "files": _digests(place, durable=True),
            "states": content.states,
            "nodes": [[n.children, n.values] for n in content.nodes],
        }
        _commit(path, body)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    _sweep(path, folder)


def _on_host(value: Any) -> tuple[np.ndarray, dict[str, str]]:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        numbers = np.asarray(jax.random.key_data(value))
        return numbers, {"key": str(jax.random.key_impl(value))}
    return np.asarray(value), {}


def _commit(path: str, body: dict[str, Any]) -> None:
    text = json.dumps(body, allow_nan=False)
    whole = json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})
    final = os.path.join(path, MANIFEST)
    draft = f"{final}-{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(whole)
            file.flush()
            os.fsync(fd)
        os.replace(draft, final)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    _sync_folder(path)
    _sync_folder(os.path.dirname(os.path.abspath(path)))


def _sweep(path: str, keep: str = "") -> None:
    """Remove what earlier saves to the same place have left: only names of our own."""
    for name in os.listdir(path):
        if _DATA.fullmatch(name) and name != keep:
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)
        elif _DRAFT.fullmatch(name):
            os.unlink(os.path.join(path, name))


def remove(path: str) -> None:
    """Remove a checkpoint: its manifest first, so that it never looks whole when it is not."""
    os.unlink(os.path.join(path, MANIFEST))
    _sweep(path)
    with suppress(OSError):  # somebody else's files may be in it
        os.rmdir(path)


def is_stored(path: str) -> bool:
    """Whether there is a checkpoint of ours at ``path``."""
    return os.path.isfile(os.path.join(path, MANIFEST))


class Stored:
    """One checkpoint that `write` made.

    Raises:
        NotFoundError: If there is none.
        DataLossError: If its manifest is damaged.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        body = _manifest(path)
        self.time: int = body["time"]
        self.states: dict[str, Any] = body["states"]
        self.nodes = [Node(children, values) for children, values in body["nodes"]]
        self._folder: str = body["folder"]
        self._entries: dict[str, Any] = body["arrays"]
        self._files: dict[str, Any] = body["files"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array, by key."""
        return {key: tuple(e["shape"]) for key, e in sorted(self._entries.items())}

    def dtype(self, key: str) -> np.dtype[Any]:
        """The dtype of one array."""
        found: np.dtype[Any] = np.dtype(jnp.dtype(self._entries[key]["dtype"]))
        return found

    def read(self, key: str) -> Any:
        """The value of one variable.

        Raises:
            NotFoundError: If the checkpoint has none of that name.
            DataLossError: If a file of the checkpoint is damaged.
        """
        if key in self.states:
            return self.states[key]
        entry = self._entries.get(key)
        if entry is None:
            raise NotFoundError(
                f"Checkpoint {self._path!r} has no value {key!r}; it has"
                f" {', '.join(map(repr, list(self.shapes())[:20]))}."
            )
        shape, dtype = tuple(entry["shape"]), self.dtype(key)
        value = self._arrays[entry["name"]] if "name" in entry else np.zeros(shape, dtype)
        if value.shape != shape or value.dtype != dtype:
            raise DataLossError(
                f"Value {key!r} of checkpoint {self._path!r} is {value.dtype}{list(value.shape)},"
                f" but {MANIFEST} says {dtype}{list(shape)}."
            )
        if "key" in entry:
            return jax.random.wrap_key_data(jnp.asarray(value), impl=entry["key"])
        return value

    def find(self, live: Any, name: str) -> Any:
        """The part of a live object that has the saved name."""
        return part_of(live, name)

    def verify(self, *, contents: bool = True) -> None:
        """Compare every file with its checksum; or, without ``contents``, with its size alone.

        Raises:
            DataLossError: If one is damaged or missing; it is named.
        """
        found = _digests(os.path.join(self._path, self._folder), contents=contents)
        for name, expected in self._files.items():
            if found.get(name) != (expected if contents else expected[:1]):
                raise DataLossError(
                    f"Checkpoint {self._path!r} is not whole: its file"
                    f" {os.path.join(self._folder, name)!r} is"
                    f" {'damaged' if name in found else 'missing'}. Restore an older one."
                )

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        self.verify()
        names = [e["name"] for e in self._entries.values() if "name" in e]
        if not names:
            return {}
        wanted = {name: _ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        place = os.path.abspath(os.path.join(self._path, self._folder, "arrays"))
        with _quiet(), _checkpointer() as checkpointer:
            arrays: dict[str, np.ndarray] = checkpointer.restore(place, restore_args=wanted)
        return arrays


def _manifest(path: str) -> dict[str, Any]:
    name = os.path.join(path, MANIFEST)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise NotFoundError(f"There is no checkpoint {path!r}: it has no file {name!r}.") from None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.fstat(fd).st_size > _MAX_MANIFEST:
            raise DataLossError(f"{name!r} is not the manifest of a checkpoint.")
        data = file.read()
    try:
        whole = json.loads(data)
        text = whole["content"]
        if hashlib.sha256(text.encode()).hexdigest() != whole["sha256"]:
            raise ValueError("its checksum is wrong")
        body: dict[str, Any] = json.loads(text)
        if body["format"] != _FORMAT:
            raise ValueError(f"its format is {body['format']}, this replicax reads {_FORMAT}")
        if not _DATA.fullmatch(body["folder"]):
            raise ValueError(f"its folder is {body['folder']!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLossError(f"{name!r} is damaged: {error}. Restore an older one.") from None
    return body


def _digests(place: str, *, contents: bool = True, durable: bool = False) -> dict[str, list[Any]]:
    """The size of every file below ``place``, and of its ``contents`` the SHA-256.

    Args:
        place: The folder.
        contents: Whether to read them.
        durable: Whether to wait until they have reached the disk.
    """

    def digest(name: str) -> list[Any]:
        fd = os.open(os.path.join(place, name), os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(fd, "rb") as file:
            if durable:
                os.fsync(fd)
            size = os.fstat(fd).st_size
            return [size, hashlib.file_digest(file, "sha256").hexdigest()] if contents else [size]

    names = sorted(_files_below(place))
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _files_below(place: str) -> Iterator[str]:
    for folder, subfolders, files in os.walk(place):
        for name in (*files, *subfolders):
            if os.path.islink(os.path.join(folder, name)):
                raise DataLossError(f"{os.path.join(folder, name)!r} is a link: not followed.")
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), place)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checkpointer() -> Any:
    # One worker writes, and Orbax must not wait for the others.
    process = jax.process_index()
    alone = _ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
    handler = _ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, multiprocessing_options=alone
    )
    return _ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's remarks on its own inside from the user's screen; errors still show."""
    log = logging.getLogger("absl")  # which knows no filters
    with _quieting:
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(before)
