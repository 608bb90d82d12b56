"""File operations on local paths (through `os`) and on URLs (through fsspec).

Three behaviours of fsspec are avoided, because each can make an existing file look absent: cached
listings, `exists` returning False after any error, and `walk` skipping folders that cannot be
listed. Reads are range requests, so concurrent readers of one file never share a position.
"""

import contextlib
import fnmatch
import io
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from replicax._src.base.lazy import LazyModule
from replicax._src.base.tf_errors import UnimplementedError
from replicax._src.files.paths import is_url

_fsspec: Any = LazyModule("fsspec")
_dircache: Any = LazyModule("fsspec.dircache")
_READ = 8 << 20  # bytes per range request
_WRITE = 32 << 20  # bytes per part of a multipart upload
_MAGIC = re.compile(r"[*?\[]")
_instances: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()

# Stores without real folders (only name prefixes), in which an object appears when its upload is
# complete.
OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a"}
WHOLE_PUTS = {*OBJECT_STORES, "memory"}


class FileStatus(NamedTuple):
    """The size and kind of a file or folder."""

    size: int
    is_folder: bool


def status(path: str) -> FileStatus | None:
    """Return the status of a path; None if it does not exist.

    Raises:
        OSError: The file system did not respond or denied access; that does not mean "absent".
    """
    try:
        if is_url(path):
            info = _call_remote(path, "info", path)
            return FileStatus(int(info.get("size") or 0), info["type"] == "directory")
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return FileStatus(found.st_size, stat.S_ISDIR(found.st_mode))


def exists(path: str) -> bool:
    """Whether a path exists, as a file or a folder."""
    return status(path) is not None if is_url(path) else os.path.exists(path)


def is_file(path: str) -> bool:
    """Whether a path is an existing file."""
    if not is_url(path):
        return os.path.isfile(path)
    found = status(path)
    return found is not None and not found.is_folder


def is_folder(path: str) -> bool:
    """Whether a path is an existing folder; in an object store, a prefix of some name."""
    if not is_url(path):
        return os.path.isdir(path)
    found = status(path)
    return found is not None and found.is_folder


def modified(path: str) -> int:
    """Return the modification time of a file in nanoseconds; 0 if a URL's is unknown."""
    if not is_url(path):
        return os.stat(path).st_mtime_ns
    try:
        return int(_call_remote(path, "modified", path).timestamp() * 1e9)
    except (NotImplementedError, FileNotFoundError, KeyError):  # folders of object stores have none
        return 0


def entries(folder: str) -> dict[str, bool]:
    """Return the names in a folder, mapped to whether each is a folder.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    if not is_url(folder):
        with os.scandir(folder) as found:
            return {entry.name: entry.is_dir() for entry in found}
    top = _call_remote(folder, "_strip_protocol", folder).strip("/")
    result: dict[str, bool] = {}
    for entry in _call_remote(folder, "ls", folder, detail=True):
        name = entry["name"].strip("/")
        if name != top:  # some stores represent a folder by an empty object of its name
            result[name.rpartition("/")[2]] = entry["type"] == "directory"
        elif entry["type"] != "directory" and entry["size"]:
            raise NotADirectoryError(f"{folder!r} is a file")
    return result


def open_file(path: str, mode: str = "rb", encoding: str | None = None) -> IO[Any]:
    """Open a file for reading, or for writing from its start; local files in any mode.

    Raises:
        UnimplementedError: The mode appends or updates, and the path is a URL.
    """
    if not is_url(path):
        return open(path, mode, encoding=encoding)
    kind = mode.replace("b", "")
    if kind not in ("r", "w"):
        raise UnimplementedError(
            f"{path!r} cannot be opened with mode {mode!r}: an object is written once, as a whole."
            " Use 'r' or 'w', or write a local file and copy it."
        )
    if kind == "w":
        binary = _call_remote(path, "open", path, "wb", block_size=_WRITE)
    else:
        binary = io.BufferedReader(_RangeReader(path), _READ)
    return binary if "b" in mode else io.TextIOWrapper(binary, encoding=encoding)


@contextlib.contextmanager
def uploading(path: str) -> Iterator[IO[bytes]]:
    """Open a file for writing in a ``with`` block; if the block raises, no partial file is left."""
    file = open_file(path, "wb")
    try:
        yield file
    except BaseException:
        discard(file, path)
        raise
    file.close()


def discard(file: IO[bytes], path: str) -> None:
    """Abort writing a file, and delete it; errors are ignored."""
    with contextlib.suppress(Exception):
        remote: Any = file
        if is_url(path) and hasattr(remote, "discard"):
            remote.discard()  # abort: `close` would complete the upload
            remote.closed = True
        else:
            file.close()
    with contextlib.suppress(Exception):
        remove(path)


def here(path: str) -> str:
    """Return the current folder for an error message about a local path; "" for a URL."""
    return "" if is_url(path) else f" (the current folder is {os.getcwd()!r})"


def read_range(path: str, start: int, stop: int) -> bytes:
    """Return the bytes from `start` to `stop` of a file at a URL."""
    return bytes(_call_remote(path, "cat_file", path, start=start, end=stop))


def read_bytes(path: str) -> bytes:
    """Return the content of a file."""
    if is_url(path):
        return bytes(_call_remote(path, "cat_file", path))
    with open(path, "rb") as file:
        return file.read()


def put(path: str, data: bytes) -> None:
    """Write a file atomically: readers see the old content or all of the new one."""
    if is_url(path):
        _call_remote(path, "pipe_file", path, data)
        return
    part = f"{path}.{secrets.token_hex(8)}.part"
    try:
        with open(part, "xb") as file:
            file.write(data)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)
        raise


def puts_whole(path: str) -> bool:
    """Whether writes to the store of a URL are atomic: objects appear when complete."""
    return path.partition("://")[0] in WHOLE_PUTS


def remove(path: str) -> None:
    """Delete a file.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    if not is_url(path):
        os.remove(path)
        return
    found = status(path)
    if found is None:
        raise FileNotFoundError(f"There is no file {path!r}.")
    if found.is_folder:
        raise IsADirectoryError(f"{path!r} is a folder.")
    _call_remote(path, "rm_file", path)


def remove_tree(path: str) -> None:
    """Delete a folder with everything in it."""
    if is_url(path):
        _call_remote(path, "rm", path, recursive=True)
    else:
        shutil.rmtree(path)


def make_folders(path: str) -> None:
    """Create a folder and its parents; does nothing in object stores, which have no folders."""
    if not is_url(path):
        os.makedirs(path or ".", exist_ok=True)
    elif path.partition("://")[0] not in OBJECT_STORES:
        _call_remote(path, "makedirs", path, exist_ok=True)


def make_folder(path: str) -> None:
    """Create a folder; the parent of a local one must exist."""
    if is_url(path):
        make_folders(path)
    else:
        os.mkdir(path)


def copy(source: str, target: str) -> None:
    """Copy a file, also from one file system to another."""
    if not is_url(source) and not is_url(target):
        shutil.copyfile(source, target)
    elif is_url(source) and is_url(target) and _remote(source) is _remote(target):
        if not is_file(source):
            raise FileNotFoundError(f"There is no file {source!r}.")
        _call_remote(source, "cp_file", source, target)
    else:
        with open_file(source) as reading, uploading(target) as writing:
            shutil.copyfileobj(reading, writing, _READ)


def replace(source: str, target: str) -> None:
    """Rename a file, replacing the target; at a URL, by an atomic copy and a deletion."""
    if not is_url(source) and not is_url(target):
        os.replace(source, target)
        return
    if is_folder(source):
        raise UnimplementedError(
            f"{source!r} is a folder behind a URL, which cannot be renamed in one step. Rename its"
            " files, or copy them."
        )
    copy(source, target)
    remove(source)


def walk(
    top: str, *, topdown: bool = True, onerror: Callable[[OSError], Any] | None = None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield a folder and all folders in it, like `os.walk`; errors of URLs are not ignored."""
    if not is_url(top):
        yield from os.walk(top, topdown, onerror)
        return
    try:
        found = entries(top)
    except OSError as error:
        if onerror is not None:
            onerror(error)
        elif not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise
        return
    folders = sorted(name for name, is_inner in found.items() if is_inner)
    files = sorted(name for name, is_inner in found.items() if not is_inner)
    if topdown:
        yield top, folders, files
    for name in folders:
        yield from walk(os.path.join(top, name), topdown=topdown, onerror=onerror)
    if not topdown:
        yield top, folders, files


def glob(pattern: str) -> list[str]:
    """Return the sorted URLs that match a pattern in `fnmatch` syntax.

    A wildcard does not match a slash; it does match a leading dot.
    """
    scheme, _, rest = pattern.partition("://")
    first, *others = rest.split("/")
    if _MAGIC.search(first):
        raise UnimplementedError(
            f"{pattern!r} has a wildcard in the name of the bucket. Name the bucket."
        )
    found = [f"{scheme}://{first}"]
    for place, part in enumerate(others):
        is_last = place == len(others) - 1
        if not _MAGIC.search(part):
            found = [f"{path}/{part}" for path in found]
            if is_last:
                found = [path for path in found if exists(path)]
            continue
        matches = re.compile(fnmatch.translate(part)).match
        found = [
            f"{path}/{name}"
            for path in found
            for name, is_inner in _entries_if_folder(path).items()
            if matches(name) and (is_last or is_inner)
        ]
    return sorted(found)


def _entries_if_folder(folder: str) -> dict[str, bool]:
    try:
        return entries(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}


class _RangeReader(io.RawIOBase):
    """A seekable file at a URL, read with range requests."""

    def __init__(self, path: str) -> None:
        found = status(path)
        if found is None:
            raise FileNotFoundError(f"There is no file {path!r}.")
        if found.is_folder:
            raise IsADirectoryError(f"{path!r} is a folder.")
        self._path, self._size, self._at = path, found.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, into: Any) -> int:
        stop = min(self._at + len(into), self._size)
        if stop <= self._at:
            return 0
        data = read_range(self._path, self._at, stop)
        if len(data) != stop - self._at:
            raise OSError(
                f"{self._path!r} was changed while it was read: {stop - self._at} bytes were"
                f" expected at byte {self._at}, but {len(data)} were read."
            )
        into[: len(data)] = data
        self._at = stop
        return len(data)


def _call_remote(path: str, verb: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the fsspec file system of a URL.

    Raises:
        OSError: The call failed. Errors of the store's library are converted to it.
    """
    try:
        return getattr(_remote(path), verb)(*args, **kwargs)
    except (OSError, NotImplementedError):
        raise
    except Exception as error:
        raise OSError(f"{path!r}: {verb} failed: {type(error).__name__}: {error}") from error


def _remote(path: str) -> Any:
    """Return the fsspec file system of a URL, cached per process and host or bucket."""
    scheme, _, rest = path.partition("://")
    key = os.getpid(), f"{scheme}://{rest.partition('/')[0]}"
    with _lock:
        if key not in _instances:
            # A separate instance, because disabling the listings cache must not affect the user's.
            files, _ = _fsspec.core.url_to_fs(path, skip_instance_cache=True)
            files.dircache = _dircache.DirCache(use_listings_cache=False)
            _instances[key] = files
        return _instances[key]
