"""Find checkpoints and read their values by name, without the objects they were saved from.

Both replicax's own checkpoints and TensorFlow's can be read.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import DataLossError, NotFoundError
from replicax._src.files import storage
from replicax._src.files.paths import absolute, is_url, user_path
from replicax._src.train.checkpoint_files import is_stored
from replicax._src.train.object_store import names_in
from replicax._src.train.stored_checkpoint import Stored, open_checkpoint
from replicax._src.train.tensor_bundle import is_bundle

log = logging.getLogger("replicax")

_STATE_FILE = "checkpoint"  # the file in which TensorFlow names its newest checkpoint
_LOOKING = 1.0  # seconds between two polls of a folder, as in TensorFlow
_NEWEST = re.compile(r'^model_checkpoint_path: "((?:[^"\\]|\\.)*)"', re.MULTILINE)


class CheckpointReader:
    """The values of a checkpoint, by name.

    Example:
        >>> import tempfile
        >>> path = rx.train.Checkpoint(v=rx.Variable([1, 2])).save(f"{tempfile.mkdtemp()}/ckpt")
        >>> reader = rx.train.load_checkpoint(path)
        >>> reader.get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE")
        array([1, 2], dtype=int32)
    """

    def __init__(self, path: str) -> None:
        self._source = open_checkpoint(user_path(path))

    def has_tensor(self, tensor_str: str) -> bool:
        """Whether the checkpoint has a value named ``tensor_str``."""
        return tensor_str in self._source.shapes()

    def get_tensor(self, tensor_str: str) -> Any:
        """Return the value named ``tensor_str``.

        Raises:
            NotFoundError: The checkpoint has no such value.
        """
        return self._source.read(tensor_str)

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Return the shape of every value, by name."""
        return {name: list(shape) for name, shape in self._source.shapes().items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype[Any]]:
        """Return the dtype of every value, by name."""
        return {name: self._source.dtype(name) for name in self._source.shapes()}


def load_checkpoint(ckpt_dir_or_file: str) -> CheckpointReader:
    """Open a checkpoint, replicax's or TensorFlow's, for reading values by name.

    Args:
        ckpt_dir_or_file: A checkpoint, or a folder whose newest checkpoint is opened.

    Raises:
        NotFoundError: There is no checkpoint.

    Example:
        >>> rx.train.load_checkpoint("/no/such/folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        replicax.errors.NotFoundError: There is no checkpoint '/no/such/folder'...
    """
    path = user_path(ckpt_dir_or_file)
    is_folder = storage.is_folder(path) or is_url(path)
    return CheckpointReader((latest_checkpoint(path) if is_folder else None) or path)


def list_variables(ckpt_dir_or_file: str) -> list[tuple[str, list[int]]]:
    """List name and shape of every value in a checkpoint, replicax's or TensorFlow's.

    Example:
        >>> import tempfile
        >>> path = rx.train.Checkpoint(v=rx.Variable([1, 2])).write(f"{tempfile.mkdtemp()}/ckpt")
        >>> rx.train.list_variables(path)[-1]
        ('v/.ATTRIBUTES/VARIABLE_VALUE', [2])
    """
    return list(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def latest_checkpoint(checkpoint_dir: str, latest_filename: str | None = None) -> str | None:
    """Return the path of the newest complete checkpoint in a folder; None if there is none.

    Damaged checkpoints are logged and skipped.

    Args:
        checkpoint_dir: The folder.
        latest_filename: The file in which TensorFlow names its newest checkpoint; read only if
            the folder has no checkpoint of replicax.

    Example:
        >>> import tempfile
        >>> rx.train.latest_checkpoint(tempfile.mkdtemp()) is None
        True
    """
    folder = user_path(checkpoint_dir)
    newest = max(stored_in(folder), default=None)
    if newest is not None:
        return newest[1]
    return _tensorflows_newest(folder, latest_filename or _STATE_FILE)


@dataclass(frozen=True)
class CheckpointState:
    """The checkpoints in a folder, as `get_checkpoint_state` returns them.

    Attributes:
        model_checkpoint_path: The newest checkpoint.
        all_model_checkpoint_paths: All checkpoints, oldest first.
        all_model_checkpoint_timestamps: When each was saved, in seconds since the epoch.
    """

    model_checkpoint_path: str
    all_model_checkpoint_paths: list[str]
    all_model_checkpoint_timestamps: list[float]


def get_checkpoint_state(
    checkpoint_dir: str, latest_filename: str | None = None
) -> CheckpointState | None:
    """Return the replicax checkpoints in a folder; None if there are none.

    Args:
        checkpoint_dir: The folder.
        latest_filename: The name of TensorFlow's state file, which replicax does not write; with
            any name but the default ``"checkpoint"``, None is returned.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> manager = rx.train.CheckpointManager(rx.train.Checkpoint(), folder, max_to_keep=2)
        >>> paths = [manager.save() for _ in range(3)]
        >>> rx.train.get_checkpoint_state(folder).all_model_checkpoint_paths == paths[1:]
        True
    """
    if latest_filename not in (None, _STATE_FILE):
        return None
    found = sorted(stored_in(user_path(checkpoint_dir)))
    if not found:
        return None
    paths = [path for _, path in found]
    return CheckpointState(paths[-1], paths, [when / 1e9 for when, _ in found])


def checkpoints_iterator(
    checkpoint_dir: str,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yield each new checkpoint in a folder as it appears, for example to evaluate it.

    Args:
        checkpoint_dir: The folder.
        min_interval_secs: The minimum number of seconds between two checkpoints.
        timeout: How many seconds to wait for the next checkpoint; None waits indefinitely.
        timeout_fn: Called on each timeout; True ends the iteration, False continues to wait.
            Without it, the first timeout ends the iteration.

    Yields:
        The path of the newest checkpoint.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> path = rx.train.Checkpoint().save(f"{folder}/ckpt")
        >>> list(rx.train.checkpoints_iterator(folder, timeout=0)) == [path]
        True
    """
    last = None
    while True:
        newest, begun = _newer(checkpoint_dir, last, timeout), time.monotonic()
        if newest is not None:
            last = newest
            yield newest
            time.sleep(max(0.0, min_interval_secs - (time.monotonic() - begun)))
        elif timeout_fn is None or timeout_fn():
            return


def _newer(folder: str, last: str | None, timeout: float | None) -> str | None:
    """Wait for a newest checkpoint other than ``last``; return None on timeout."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        newest = latest_checkpoint(folder)
        if newest is not None and newest != last:
            return newest
        if end is not None and time.monotonic() + _LOOKING > end:
            return None
        time.sleep(_LOOKING)


def load_variable(ckpt_dir_or_file: str, name: str) -> Any:
    """Return one value of a checkpoint, replicax's or TensorFlow's.

    Raises:
        NotFoundError: There is no checkpoint, or it has no value of that name.

    Example:
        >>> import tempfile
        >>> path = rx.train.Checkpoint(v=rx.Variable([1, 2])).write(f"{tempfile.mkdtemp()}/ckpt")
        >>> rx.train.load_variable(path, "v/.ATTRIBUTES/VARIABLE_VALUE")
        array([1, 2], dtype=int32)
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name.removesuffix(":0"))


def stored_in(folder: str) -> Iterator[tuple[int, str]]:
    """Yield timestamp and path of each complete replicax checkpoint in ``folder``.

    Checkpoints with a damaged manifest or missing files are logged and skipped.

    Raises:
        OSError: A remote store failed or denied access. Reporting "no checkpoint" instead would
            make the run restart from scratch.
    """
    if is_url(folder):
        folder = absolute(folder)
        paths = [f"{folder}/{name}" for name in names_in(folder)]
    else:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        paths = [path for name in names if is_stored(path := os.path.join(folder, name))]
    for path in paths:
        try:
            stored = Stored(path)
            stored.verify()
        except (DataLossError, OSError) as error:
            if not is_url(folder) or isinstance(error, DataLossError):
                log.warning("%s It is skipped.", error)
            elif not isinstance(error, NotFoundError):
                raise
        else:
            yield stored.time, path


def _tensorflows_newest(folder: str, note: str) -> str | None:
    try:
        with storage.open_file(os.path.join(folder, note)) as file:
            found = _NEWEST.search(file.read(1 << 20).decode())
    except UnicodeDecodeError:
        return None
    except OSError as error:
        if is_url(folder) and not isinstance(error, (FileNotFoundError, IsADirectoryError)):
            raise
        return None
    if found is None:
        return None
    path = os.path.join(folder, found[1].replace('\\"', '"').replace("\\\\", "\\"))
    return path if is_bundle(path) else None
