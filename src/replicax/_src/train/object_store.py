"""Checkpoints in an object store, which has neither atomic renames nor locks.

The only atomic operation is the upload of one object. As in a local file system, a save writes to
a folder with a random name, and the manifest, uploaded last, commits it. Listings may be stale, so
no decision depends on one:

* ``claim.json`` in the checkpoint names the folder of the most recently started save, and folders
  of earlier saves that remain to be deleted. A save whose claim was replaced does not commit.
* ``checkpoint-index.json`` in the parent directory lists all checkpoints that were started, and
  the run that owns the directory. Readers check the manifest of each, and trust only that.
"""

import json
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from replicax._src.base.fault_points import fault_point
from replicax._src.base.tf_errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    UnimplementedError,
)
from replicax._src.files import storage
from replicax._src.files.paths import parent
from replicax._src.train import checkpoint_files, orbax_private
from replicax._src.train.array_pieces import Packed
from replicax._src.train.checkpoint_files import (
    DATA,
    MANIFEST,
    RUN,
    checksums,
    folder_of,
    is_stored,
)
from replicax._src.train.orbax_private import chunk
from replicax._src.workers.watchdog import disk

CLAIM = "claim.json"
INDEX = "checkpoint-index.json"
_AT_ONCE = 8 << 20  # bytes written between two progress reports to the watchdog
_AT_A_TIME = 16  # concurrent requests
_owned: set[str] = set()  # directories whose index names this process as owner
_saving: Counter[str] = Counter()  # saves of this process in progress, by checkpoint
_lock = threading.RLock()


class Objects:
    """A checkpoint at a URL.

    Args:
        path: The URL.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_sent = False

    def begin(self, stack: ExitStack) -> str:
        """Claim the checkpoint for a new save until ``stack`` closes; return its data folder."""
        self._check_path()
        _saving[self.path] += 1
        stack.callback(_saving.subtract, [self.path])
        with checkpoint_files.new_folder(self.discard) as folder:
            old = self._claim()
            left = {*old.get("left", ()), old.get("folder"), folder_of(self.path)} - {None}
            self._index(is_begun=True)
            self._put_claim(folder, sorted(left))
        return folder

    def discard(self, folder: str) -> None:
        """Remove the objects of a failed save, unless it may have been committed."""
        if self._is_sent:  # a request that got no response may still take effect
            return
        with suppress(Exception):  # report the error of the save, not this one
            self._remove_folder(folder)
            claim = self._claim()
            if claim.get("folder") == folder and folder_of(self.path) is None:
                for name in claim["left"]:
                    self._remove_folder(name)
                self._remove_object(CLAIM)
                self._index(is_begun=False)

    def sees(self, folder: str) -> bool:
        """Whether this worker sees the claim that the first worker wrote."""
        return bool(self._claim().get("folder") == folder)

    def save_arrays(self, folder: str, name: str, tree: dict[str, Packed]) -> dict[str, Any]:
        """Upload arrays below ``folder/name``; return size and checksums of each object, by name.

        The layout is the one Orbax writes into a local folder, so checkpoints can be copied
        between the two.
        """
        place, files = f"{self.path}/{folder}", {}
        with tempfile.TemporaryDirectory(prefix="replicax-") as local:
            inner = os.path.join(local, name)
            orbax_private.save(inner, tree, Packed, metadata_only=True)
            small = dict(checkpoint_files.metadata_below(inner, tree))
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            jobs = [pool.submit(_put, f"{place}/{name}/{x}", small[x]) for x in small]
            for array, joined in tree.items():
                where = chunk(f"{name}/{array}", len(joined.shape))
                jobs.append(pool.submit(_upload, f"{place}/{where}", joined))
                sums = checksums(*joined.parts)
                files[where] = [sum(part.nbytes for part in joined.parts), sums]
            for job in jobs:
                job.result()
        return files | {f"{name}/{x}": [len(d), checksums(d)] for x, d in small.items()}

    def put_manifest(self, body: dict[str, Any]) -> None:
        """Upload the manifest, which commits the save.

        Raises:
            FailedPreconditionError: Another process has started to save the same checkpoint.
        """
        self._check_claim(body["folder"], "Nothing was committed.")
        fault_point("commit-manifest")
        self._is_sent = True
        storage.put(f"{self.path}/{MANIFEST}", checkpoint_files.manifest_bytes(body))
        fault_point("committed")
        checkpoint_files.note_time(self.path, body["time"])
        self._check_claim(body["folder"], "Both may have committed; one of them is kept.")

    def sweep(self) -> None:
        """Remove the objects that earlier saves of this checkpoint left."""
        claim, folder = self._claim(), folder_of(self.path)
        if folder is None or claim.get("folder") != folder or not claim.get("left"):
            return  # another save is in progress, and will sweep
        for name in claim["left"]:
            if name != folder:
                self._remove_folder(name)
        self._put_claim(folder, [])

    def remove(self) -> None:
        """Remove the checkpoint, its manifest first, so a partly deleted one is never visible.

        Its name stays in the index until everything is gone: the next run can then finish an
        interrupted removal.
        """
        directory, claim = parent(self.path), self._claim()
        _check_owner(directory, _read_index(directory))
        folders = {*claim.get("left", ()), claim.get("folder"), folder_of(self.path)} - {None}
        self._remove_object(MANIFEST)
        fault_point("prune")
        for folder in folders:
            self._remove_folder(folder)
        self._remove_object(CLAIM)
        self._index(is_begun=False)

    def _index(self, *, is_begun: bool) -> None:
        directory, name = parent(self.path), os.path.basename(self.path)

        def change(index: dict[str, Any]) -> None:
            _check_owner(directory, index)
            others = [other for other in index["names"] if other != name]
            index["names"] = [*others, name] if is_begun else others

        _change_index(directory, change)

    def _check_path(self) -> None:
        if parent(self.path) == self.path:
            raise InvalidArgumentError(
                f"{self.path!r} names a bucket, and no checkpoint in it. Write"
                f" '{self.path.rpartition('-')[0] or self.path}/ckpt'."
            )
        if not storage.puts_whole(self.path):
            raise UnimplementedError(
                f"{self.path!r}: checkpoints are not written to the file system"
                f" {self.path.partition('://')[0]!r}, as a part of a file may be seen there while"
                f" it is written. They are to {', '.join(sorted(storage.WHOLE_PUTS))}, and to"
                " local paths: mount the file system, or copy them there."
            )

    def _claim(self) -> dict[str, Any]:
        found = _read_json(f"{self.path}/{CLAIM}")
        names = [found.get("folder", ""), *found.get("left", ())]
        # These folders are deleted recursively: accept only names that replicax generates.
        return found if all(isinstance(n, str) and DATA.fullmatch(n) for n in names) else {}

    def _put_claim(self, folder: str, left: list[str]) -> None:
        claim = {"run": RUN, "folder": folder, "left": left}
        _put(f"{self.path}/{CLAIM}", json.dumps(claim).encode())

    def _check_claim(self, folder: str, what: str) -> None:
        claim = self._claim()
        if claim.get("folder") != folder:
            raise FailedPreconditionError(
                f"Another process (run {claim.get('run', 'unknown')!r}) has begun to save"
                f" {self.path!r} while this one did. {what} Give each run a directory of its own."
            )

    def _remove_folder(self, name: str) -> None:
        with suppress(FileNotFoundError):
            storage.remove_tree(f"{self.path}/{name}")
        disk.note_progress()

    def _remove_object(self, name: str) -> None:
        with suppress(FileNotFoundError):
            storage.remove(f"{self.path}/{name}")
        disk.note_progress()


def names_in(directory: str) -> list[str]:
    """Return the names in a directory that may be checkpoints: from its index and its listing."""
    names = set(_read_index(directory)["names"])
    with suppress(FileNotFoundError, NotADirectoryError):
        names |= {name for name, is_folder in storage.entries(directory).items() if is_folder}
    return sorted(names)


def take_directory(directory: str, prefix: str) -> None:
    """Make this run the owner of a directory, and remove checkpoints that were never committed.

    Whether the previous owner is still alive is unknown. If it is, its next save fails.

    Args:
        directory: The URL.
        prefix: The prefix of the names of the run's checkpoints.
    """
    with _lock:
        owner = {
            "run": RUN,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        index = _change_index(directory, lambda index: index.update(owner=owner))
        _owned.add(directory)
    for name in index["names"]:
        path = f"{directory}/{name}"
        if name.startswith(prefix) and not _saving[path] and not is_stored(path):
            Objects(path).remove()


def _change_index(directory: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Apply ``change`` to the index of a directory, upload it if modified, and return it."""
    with _lock:
        index = _read_index(directory)
        before = json.dumps(index)
        change(index)
        index["names"] = sorted(set(index["names"]))
        if json.dumps(index) != before:
            _put(f"{directory}/{INDEX}", json.dumps(index).encode())
        return index


def _check_owner(directory: str, index: dict[str, Any]) -> None:
    owner = index["owner"]
    if directory in _owned and owner.get("run") not in (None, RUN):
        raise FailedPreconditionError(
            f"Another run took over {directory!r}: process {owner.get('pid')} of"
            f" {owner.get('host')!r} at {owner.get('time')}. Two runs would remove and replace"
            " each other's checkpoints. Give each a directory of its own, or end one of them."
            " Nothing was saved or removed."
        )


def _read_index(directory: str) -> dict[str, Any]:
    found = _read_json(f"{directory}/{INDEX}")
    names, owner = found.get("names"), found.get("owner")
    is_list = isinstance(names, list) and all(isinstance(n, str) and "/" not in n for n in names)
    return {"names": names if is_list else [], "owner": owner if isinstance(owner, dict) else {}}


def _read_json(path: str) -> dict[str, Any]:
    """Return the JSON object stored at ``path``; an empty dict if it is missing or damaged."""
    try:
        found = json.loads(storage.read_bytes(path))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    disk.note_progress()
    return found if isinstance(found, dict) else {}


def _put(path: str, data: bytes) -> None:
    storage.put(path, data)
    disk.note_progress()


def _upload(path: str, joined: Packed) -> None:
    try:
        _send(path, joined)
    except FileNotFoundError:
        # If the last response of an upload is lost, the upload session may be gone when gcsfs
        # retries. The object's name is unique to this save, so uploading it again is harmless.
        _send(path, joined)


def _send(path: str, joined: Packed) -> None:
    with storage.uploading(path) as file:
        for part in joined.parts:
            view: Any = memoryview(part.data)
            for at in range(0, len(view), _AT_ONCE):
                file.write(view[at : at + _AT_ONCE])
                disk.note_progress()
