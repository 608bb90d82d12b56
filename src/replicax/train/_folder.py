"""A checkpoint in a local folder: locked while it is written, and synced to the disk."""

import os
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from replicax._faults import fault_point
from replicax.train import _files, _orbax_private
from replicax.train._files import DATA, MANIFEST, checksums, folder_of
from replicax.train._orbax_private import chunk
from replicax.train._pieces import Packed

_DRAFT = re.compile(re.escape(MANIFEST) + r"-[0-9a-f]{16}")


class Folder:
    """A checkpoint at a path of a local file system.

    Args:
        path: The absolute path.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def begin(self, stack: ExitStack) -> str:
        """Make the folder for a new checkpoint, and lock it until ``stack`` is closed."""
        folder = f"data-{secrets.token_hex(8)}"
        place = os.path.join(self.path, folder)
        try:
            os.makedirs(place)
            stack.enter_context(_files.locked(place))
            fault_point("commit-begin")
        except BaseException:
            self.discard(folder)
            raise
        return folder

    def discard(self, folder: str) -> None:
        """Remove the files of a failed save."""
        shutil.rmtree(os.path.join(self.path, folder), ignore_errors=True)
        with suppress(OSError):  # if there is something else in it
            os.rmdir(self.path)

    def sees(self, folder: str) -> bool:
        """Whether this worker sees the folder that the first worker created."""
        return os.path.isdir(os.path.join(self.path, folder))

    def save_arrays(self, folder: str, name: str, tree: dict[str, Packed]) -> dict[str, Any]:
        """Write arrays into a new folder; return size and checksums of its files, by name."""
        files: dict[str, Any] = {}
        inner = os.path.join(self.path, folder, name)
        _orbax_private.save(inner, tree, Packed)
        with ThreadPoolExecutor(_files.THREADS) as pool:  # while the disk has its own to do
            sums = {array: pool.submit(checksums, *joined.parts) for array, joined in tree.items()}
            _files.settle(inner)
        for file, data in _files.metadata_below(inner, tree):
            files[f"{name}/{file}"] = [len(data), checksums(data)]
        for array, joined in tree.items():
            where = chunk(f"{name}/{array}", len(joined.shape))
            files[where] = [sum(part.nbytes for part in joined.parts), sums[array].result()]
        return files

    def put_manifest(self, body: dict[str, Any]) -> None:
        """Put the manifest in its place, in one step, for good."""
        _files.put_manifest(self.path, body)

    def sweep(self) -> None:
        """Remove unused files and folders that earlier saves left in this checkpoint."""
        for name in os.listdir(self.path):
            if DATA.fullmatch(name):
                with _files.locked(os.path.join(self.path, name)) as is_ours:
                    # A writer puts its manifest before it releases the lock.
                    if is_ours and name != folder_of(self.path):
                        shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
            elif _DRAFT.fullmatch(name):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.path, name))

    def remove(self) -> None:
        """Remove the checkpoint, its manifest first."""
        with suppress(FileNotFoundError):  # somebody has removed it already
            os.unlink(os.path.join(self.path, MANIFEST))
            fault_point("prune")
            self.sweep()
        with suppress(OSError):  # somebody else's files may be in it
            os.rmdir(self.path)
