"""Files of this machine and objects behind URLs, with one set of functions for both.

Local files go through `os`, URLs through fsspec. Three habits of fsspec are not taken over, because
each can make a file that exists look absent: cached listings, `exists` that returns False after any
error, and walks that leave out folders which cannot be listed. Reads are ranged requests, so that
two readers of one file never share a position.
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

from replicax._lazy import LazyModule
from replicax.data._errors import UnimplementedError
from replicax.data._paths import is_url

_fsspec: Any = LazyModule("fsspec")
_dircache: Any = LazyModule("fsspec.dircache")
_READ = 8 << 20  # bytes of one request of a reader
_WRITE = 32 << 20  # of one part of an upload
_MAGIC = re.compile(r"[*?\[]")
_instances: dict[tuple[int, str], Any] = {}
_lock = threading.Lock()

# Stores whose folders are only parts of names, and that show an object when all of it has arrived.
OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a"}
WHOLE_PUTS = {*OBJECT_STORES, "memory"}


class FileStatus(NamedTuple):
    """The size and kind of a file or folder."""

    size: int
    is_folder: bool


def status(path: str) -> FileStatus | None:
    """Return the status of a path; None if it does not exist.

    Raises:
        OSError: The file system did not answer, or denied access: that is not "nothing".
    """
    try:
        if is_url(path):
            info = _ask(path, "info", path)
            return FileStatus(int(info.get("size") or 0), info["type"] == "directory")
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return FileStatus(found.st_size, stat.S_ISDIR(found.st_mode))


def exists(path: str) -> bool:
    """Whether there is a file or a folder."""
    return status(path) is not None if is_url(path) else os.path.exists(path)


def is_file(path: str) -> bool:
    """Whether there is a file."""
    if not is_url(path):
        return os.path.isfile(path)
    found = status(path)
    return found is not None and not found.is_folder


def is_folder(path: str) -> bool:
    """Whether there is a folder; in an object store, whether names begin with it."""
    if not is_url(path):
        return os.path.isdir(path)
    found = status(path)
    return found is not None and found.is_folder


def modified(path: str) -> int:
    """Return when a file was changed last, in nanoseconds."""
    if not is_url(path):
        return os.stat(path).st_mtime_ns
    try:
        return int(_ask(path, "modified", path).timestamp() * 1e9)
    except (NotImplementedError, FileNotFoundError, KeyError):  # of a folder nobody knows it
        return 0


def entries(folder: str) -> dict[str, bool]:
    """Return the names in a folder, and whether each is a folder.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    if not is_url(folder):
        with os.scandir(folder) as found:
            return {entry.name: entry.is_dir() for entry in found}
    top = _ask(folder, "_strip_protocol", folder).strip("/")
    result: dict[str, bool] = {}
    for entry in _ask(folder, "ls", folder, detail=True):
        name = entry["name"].strip("/")
        if name != top:  # some stores keep an empty object in the place of a folder
            result[name.rpartition("/")[2]] = entry["type"] == "directory"
        elif entry["type"] != "directory" and entry["size"]:
            raise NotADirectoryError(f"{folder!r} is a file")
    return result


def open_file(path: str, mode: str = "rb", encoding: str | None = None) -> IO[Any]:
    """Open a file to read, or to write from its start on.

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
        binary = _ask(path, "open", path, "wb", block_size=_WRITE)
    else:
        binary = io.BufferedReader(_Ranges(path), _READ)
    return binary if "b" in mode else io.TextIOWrapper(binary, encoding=encoding)


@contextlib.contextmanager
def uploading(path: str) -> Iterator[IO[bytes]]:
    """Open a file to write; after an error there is no file, rather than a part of one."""
    file = open_file(path, "wb")
    try:
        yield file
    except BaseException:
        discard(file, path)
        raise
    file.close()


def discard(file: IO[bytes], path: str) -> None:
    """Give up a file that is being written."""
    with contextlib.suppress(Exception):
        remote: Any = file
        if is_url(path) and hasattr(remote, "discard"):
            remote.discard()  # closing would complete the upload
            remote.closed = True
        else:
            file.close()
    with contextlib.suppress(Exception):
        remove(path)


def here(path: str) -> str:
    """Return where a relative path begins, for a message; nothing for a URL."""
    return "" if is_url(path) else f" (the current folder is {os.getcwd()!r})"


def read_range(path: str, start: int, stop: int) -> bytes:
    """Read a range of a file behind a URL."""
    return bytes(_ask(path, "cat_file", path, start=start, end=stop))


def read_bytes(path: str) -> bytes:
    """Read a whole file."""
    if is_url(path):
        return bytes(_ask(path, "cat_file", path))
    with open(path, "rb") as file:
        return file.read()


def put(path: str, data: bytes) -> None:
    """Write a file that others see only when all of it is there."""
    if is_url(path):
        _ask(path, "pipe_file", path, data)
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
    """Whether the store of a URL shows an object only when all of it has arrived."""
    return path.partition("://")[0] in WHOLE_PUTS


def remove(path: str) -> None:
    """Delete a file.

    Raises:
        FileNotFoundError: There is none.
    """
    if not is_url(path):
        os.remove(path)
        return
    found = status(path)
    if found is None:
        raise FileNotFoundError(f"There is no file {path!r}.")
    if found.is_folder:
        raise IsADirectoryError(f"{path!r} is a folder.")
    _ask(path, "rm_file", path)


def remove_tree(path: str) -> None:
    """Delete a folder with everything in it."""
    if is_url(path):
        _ask(path, "rm", path, recursive=True)
    else:
        shutil.rmtree(path)


def make_folders(path: str) -> None:
    """Make a folder and those above it; an object store has none, and needs none."""
    if not is_url(path):
        os.makedirs(path or ".", exist_ok=True)
    elif path.partition("://")[0] not in OBJECT_STORES:
        _ask(path, "makedirs", path, exist_ok=True)


def make_folder(path: str) -> None:
    """Make one folder."""
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
        _ask(source, "cp_file", source, target)
    else:
        with open_file(source) as reading, uploading(target) as writing:
            shutil.copyfileobj(reading, writing, _READ)


def replace(source: str, target: str) -> None:
    """Rename a file. In an object store that is a copy, whole when it appears, and a deletion."""
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
    """Yield a folder and all folders in it, as `os.walk` does."""
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
    """Return the URLs that match a pattern in the syntax of `fnmatch`, in order.

    A wildcard never matches a slash, and matches a leading dot.
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
            for name, is_inner in _entries_or_none(path).items()
            if matches(name) and (is_last or is_inner)
        ]
    return sorted(found)


def _entries_or_none(folder: str) -> dict[str, bool]:
    try:
        return entries(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}


class _Ranges(io.RawIOBase):
    """A file behind a URL, read by ranges."""

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
                f" expected at byte {self._at}, and {len(data)} came."
            )
        into[: len(data)] = data
        self._at = stop
        return len(data)


def _ask(path: str, verb: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the file system of a URL.

    Raises:
        OSError: Whatever went wrong: each library has errors of its own.
    """
    try:
        return getattr(_remote(path), verb)(*args, **kwargs)
    except (OSError, NotImplementedError):
        raise
    except Exception as error:
        raise OSError(f"{path!r}: {verb} failed: {type(error).__name__}: {error}") from error


def _remote(path: str) -> Any:
    """Return fsspec's file system of a URL: one for each process and host or bucket."""
    scheme, _, rest = path.partition("://")
    key = os.getpid(), f"{scheme}://{rest.partition('/')[0]}"
    with _lock:
        if key not in _instances:
            # Not the instance that the user's program may have: the cache of listings goes off.
            files, _ = _fsspec.core.url_to_fs(path, skip_instance_cache=True)
            files.dircache = _dircache.DirCache(use_listings_cache=False)
            _instances[key] = files
        return _instances[key]
