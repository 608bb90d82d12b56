"""Checkpoints in a local folder, which is locked during a save and synced before the commit."""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

from replicax._src.base.fault_points import fault_point
from replicax._src.train import checkpoint_files, orbax_private
from replicax._src.train.array_pieces import Packed
from replicax._src.train.checkpoint_files import DATA, MANIFEST, checksums, folder_of
from replicax._src.train.orbax_private import chunk

_DRAFT = re.compile(re.escape(MANIFEST) + r"-[0-9a-f]{16}")


class Folder:
    """A checkpoint at a path of a local file system.

    Args:
        path: The absolute path.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def begin(self, stack: ExitStack) -> str:
        """Create a data folder for a new save, locked until ``stack`` closes; return its name."""
        with checkpoint_files.new_folder(self.discard) as folder:
            place = os.path.join(self.path, folder)
            os.makedirs(place)
            stack.enter_context(checkpoint_files.locked(place))
        return folder

    def discard(self, folder: str) -> None:
        """Remove the files of a failed save."""
        shutil.rmtree(os.path.join(self.path, folder), ignore_errors=True)
        with suppress(OSError):  # it is not empty: an earlier checkpoint is still in it
            os.rmdir(self.path)

    def sees(self, folder: str) -> bool:
        """Whether this worker sees the folder that the first worker created."""
        return os.path.isdir(os.path.join(self.path, folder))

    def save_arrays(self, folder: str, name: str, tree: dict[str, Packed]) -> dict[str, Any]:
        """Write arrays into ``folder/name``; return size and checksums of each file, by name."""
        files: dict[str, Any] = {}
        inner = os.path.join(self.path, folder, name)
        orbax_private.save(inner, tree, Packed)
        with ThreadPoolExecutor(
            checkpoint_files.THREADS
        ) as pool:  # compute checksums during the fsyncs
            sums = {array: pool.submit(checksums, *joined.parts) for array, joined in tree.items()}
            checkpoint_files.sync_tree(inner)
        for file, data in checkpoint_files.metadata_below(inner, tree):
            files[f"{name}/{file}"] = [len(data), checksums(data)]
        for array, joined in tree.items():
            where = chunk(f"{name}/{array}", len(joined.shape))
            files[where] = [sum(part.nbytes for part in joined.parts), sums[array].result()]
        return files

    def put_manifest(self, body: dict[str, Any]) -> None:
        """Write the manifest atomically and durably, which commits the save."""
        checkpoint_files.put_manifest(self.path, body)

    def sweep(self) -> None:
        """Remove unused files and folders that earlier saves left in this checkpoint."""
        # A writer locks its folder before it drafts the manifest. So the writer of each of these
        # drafts is found below, unless it is gone or has put its manifest.
        drafts = [name for name in os.listdir(self.path) if _DRAFT.fullmatch(name)]
        is_being_written = False
        for name in filter(DATA.fullmatch, os.listdir(self.path)):
            with checkpoint_files.locked(os.path.join(self.path, name)) as is_ours:
                # A writer puts its manifest before it releases the lock.
                if is_ours and name != folder_of(self.path):
                    shutil.rmtree(os.path.join(self.path, name), ignore_errors=True)
                is_being_written |= not is_ours
        for name in () if is_being_written else drafts:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def remove(self) -> None:
        """Remove the checkpoint, its manifest first."""
        with suppress(FileNotFoundError):  # another process has removed it already
            os.unlink(os.path.join(self.path, MANIFEST))
            fault_point("prune")
            self.sweep()
        with suppress(OSError):  # it is not empty: the user's files are in it
            os.rmdir(self.path)

    def remove_partial(self) -> None:
        """Remove the files of a save or removal that was killed, unless one is in progress."""
        with suppress(OSError):  # it is gone, or no folder, or has files of other programs
            names = os.listdir(self.path)
            if MANIFEST not in names and any(
                DATA.fullmatch(x) or _DRAFT.fullmatch(x) for x in names
            ):
                self.sweep()
                os.rmdir(self.path)


def take_directory(directory: str, prefix: str) -> None:
    """Remove what dead saves have left in a directory that this run has locked.

    Args:
        directory: The path.
        prefix: How the names of the run's checkpoints begin.
    """
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.startswith(prefix) and not os.path.islink(path):
            Folder(path).remove_partial()
