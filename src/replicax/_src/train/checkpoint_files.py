"""Checkpoint files: durable writes, atomic manifests, locks and checksum-verified reads.

The manifest records the size of every file and one checksum per block, which lets threads read
and verify any byte range without reading the rest. The checksum is XXH3, which is several times
faster than a CRC. Format 2 used CRC-32 per block, format 1 one SHA-256 per file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from replicax._src.base.fault_points import fault_point
from replicax._src.base.lazy import LazyModule
from replicax._src.base.tf_errors import DataLossError, NotFoundError
from replicax._src.files import storage
from replicax._src.files.paths import is_url, parent
from replicax._src.workers.watchdog import disk

_xxhash: Any = LazyModule("xxhash", extra="checkpoint")
MANIFEST = "checkpoint.json"
FORMAT = 3
# Only folders with such a name are ever deleted: users may keep other files in the directory.
DATA = re.compile(r"data-[0-9a-f]{16}")
RUN = secrets.token_hex(8)  # identifies this process in manifests and claims
BLOCK = 1 << 18
THREADS = min(8, os.cpu_count() or 1)
_SHARE = 64 * BLOCK  # bytes per thread when a large local range is read
_PAGE = 16 * BLOCK  # bytes fetched from a remote file to serve smaller reads
_PAGES = 8  # remote pages cached
_REQUESTS = 16  # concurrent requests to a store
_MAX_MANIFEST = 1 << 28
_ALIGNMENT = 64  # JAX's CPU backend uses buffers with this alignment without copying
_NAME = re.compile(r"(?!\.{1,2}(/|$))[\w.-]+(/(?!\.{1,2}(/|$))[\w.-]+)*", re.ASCII)


def save_error(error: Exception, path: str) -> Exception:
    """Return an `OSError` that reports ``error``, raised while saving to ``path``, to the user."""
    text = (
        f"Checkpoint {path!r} could not be written: {str(error).rstrip('.')}. Earlier checkpoints"
        " are as they were."
    )
    if "No space left" in str(error):
        text += " Make room on the disk, or keep fewer (`CheckpointManager(max_to_keep=...)`)."
    number = error.errno if isinstance(error, OSError) else None
    return OSError(text) if number is None else OSError(number, text)


def buffer(size: int) -> np.ndarray:
    """Allocate ``size`` bytes, aligned for zero-copy use by JAX's CPU devices."""
    room = np.empty(size + _ALIGNMENT, np.uint8)
    at = -room.ctypes.data % _ALIGNMENT
    return room[at : at + size]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """View a contiguous array as a flat array of bytes."""
    return array.reshape(-1).view(np.uint8)


def checksums(*parts: Any) -> list[int]:
    """Return the checksum of each block of the concatenation of ``parts``."""
    blocks: list[list[memoryview]] = []
    room = 0
    for part in parts:
        view, at = memoryview(part), 0
        while at < len(view):
            if not room:
                blocks.append([])
                room = BLOCK
            blocks[-1].append(view[at : at + room])
            at += room
            room = max(0, at - len(view))
    if len(blocks) < 2:
        return list(map(_joined_checksum, blocks))
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_joined_checksum, blocks))


def _joined_checksum(block: list[memoryview]) -> int:
    return checksum(block[0] if len(block) == 1 else b"".join(block))


def checksum(block: Any) -> int:
    """Return the 64-bit XXH3 checksum of ``block``."""
    return int(_xxhash.xxh3_64_intdigest(block))


def files_below(place: str) -> Iterator[str]:
    """Yield the paths of all files below ``place``, relative to it, with ``/`` as separator."""
    for folder, _, files in os.walk(place):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), place).replace(os.sep, "/")


def sync_tree(place: str) -> None:
    """Call fsync on every file and folder below ``place``."""
    files = [os.path.join(place, name) for name in files_below(place)]
    with ThreadPoolExecutor(2 * THREADS) as pool:  # the disk batches concurrent fsyncs
        list(pool.map(_sync, files))
        list(pool.map(sync_folder, [folder for folder, _, _ in os.walk(place)]))


def sync_folder(path: str) -> None:
    """Call fsync on a folder, which makes created and renamed entries durable."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: str, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
    try:
        os.fsync(fd)
        disk.note_progress()
    finally:
        os.close(fd)


@contextmanager
def locked(folder: str) -> Iterator[bool]:
    """Try to lock ``folder`` exclusively inside the block; yield whether the lock was acquired.

    The kernel releases the lock when the process ends, however it ends. On a file system without
    locks, every attempt succeeds.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


@contextmanager
def new_folder(discard: Callable[[str], None]) -> Iterator[str]:
    """Yield a name for the folder of a new save; call ``discard`` with it if the body fails."""
    folder = f"data-{secrets.token_hex(8)}"
    try:
        yield folder
        fault_point("commit-begin")
    except BaseException:
        discard(folder)
        raise


def try_lock(fd: int) -> bool:
    """Try to lock an open folder until ``fd`` is closed; return False if it is already locked.

    Return True if the file system does not support locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logging.getLogger("replicax").debug("No locks: %s", error)
    return True


@contextmanager
def open_below(root: str, name: str) -> Iterator[int]:
    """Open the regular file ``name`` below ``root`` for reading, and yield its descriptor.

    Symbolic links are never followed, not even for the folders in ``name``.

    Raises:
        FileNotFoundError: The file does not exist.
        DataLossError: ``name`` is not a regular file, or leads through a symbolic link.
    """
    *above, last = name.split("/")
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in above:
            fd = _step(fd, folder, os.O_DIRECTORY)
        fd = _step(fd, last, os.O_NONBLOCK)  # opening a FIFO must not block
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DataLossError(f"{os.path.join(root, name)!r} is not a file.")
        yield fd
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise DataLossError(
            f"{os.path.join(root, name)!r} is not a file, or behind a link, which is not followed."
        ) from None
    finally:
        os.close(fd)


def _step(folder: int, name: str, flags: int) -> int:
    inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=folder)
    os.close(folder)
    return inner


def metadata_below(place: str, tree: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each metadata file that Orbax wrote for the arrays in ``tree``."""
    for name in files_below(place):
        if name.split("/")[0] not in tree or name.endswith(".zarray"):
            with open(os.path.join(place, name), "rb") as file:
                yield name, file.read()


def manifest_bytes(body: dict[str, Any]) -> bytes:
    """Serialize a manifest together with its checksum."""
    text = json.dumps(body, allow_nan=False)
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
    return json.dumps(whole).encode()


def put_manifest(path: str, body: dict[str, Any]) -> None:
    """Write the manifest of a local checkpoint atomically and durably."""
    whole = manifest_bytes(body)
    final = os.path.join(path, MANIFEST)
    draft = f"{final}-{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(whole)
            file.flush()
            os.fsync(fd)
        fault_point("commit-manifest")
        os.replace(draft, final)  # the commit: readers see the old manifest or the new one
        fault_point("committed")
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    note_time(path, body["time"])
    sync_folder(path)
    sync_folder(os.path.dirname(path))


def time_after(path: str) -> int:
    """Return a timestamp for a new manifest at ``path``, later than any known in its directory.

    A restart takes the checkpoint with the latest timestamp, which must be the newest one even if
    the clock was set back or differs from the clock of the machine that saved before.
    """
    return max(time.time_ns(), _newest.get(_directory_of(path), 0) + 1)


def note_time(path: str, saved: int) -> None:
    """Record the timestamp of a manifest that was committed, for `time_after`."""
    _newest[_directory_of(path)] = saved


def _directory_of(path: str) -> str:
    return parent(path) if is_url(path) else os.path.dirname(os.path.realpath(path))


_newest: dict[str, int] = {}  # directory -> latest timestamp of a manifest read or written there


def is_stored(path: str) -> bool:
    """Whether ``path`` is a checkpoint in replicax's format."""
    return storage.is_file(os.path.join(path, MANIFEST))


def folder_of(path: str) -> str | None:
    """Return the name of the data folder of the checkpoint at ``path``; None without a checkpoint.

    Raises:
        OSError: The remote store failed, so it is unknown whether a checkpoint exists.
    """
    try:
        folder: str = manifest(path)["folder"]
    except (NotFoundError, DataLossError):
        return None
    except OSError:
        if is_url(path):
            raise
        return None
    return folder


def manifest(path: str) -> dict[str, Any]:
    """Read and verify the manifest of the checkpoint at ``path``.

    Raises:
        NotFoundError: There is no manifest.
        DataLossError: The manifest is damaged.
    """
    name = os.path.join(path, MANIFEST)
    try:
        with _open(path, MANIFEST) as file:
            if file.size > _MAX_MANIFEST:
                raise DataLossError(f"{name!r} is too long for the manifest of a checkpoint.")
            data = bytearray(file.size)
            if file.read_into(memoryview(data), 0) < len(data):
                raise DataLossError(f"{name!r} was changed while it was read.")
    except FileNotFoundError:
        raise NotFoundError(f"There is no checkpoint {path!r}: it has no file {name!r}.") from None
    with as_data_loss(name):
        whole = json.loads(data)
        text = whole["content"]
        if hashlib.sha256(text.encode()).hexdigest() != whole["sha256"]:
            raise ValueError("its checksum is wrong")
        body: dict[str, Any] = json.loads(text)
        if body["format"] not in (1, 2, FORMAT):
            raise ValueError(f"its format is {body['format']}, this replicax reads {FORMAT}")
        if not DATA.fullmatch(body["folder"]):
            raise ValueError(f"its folder is {body['folder']!r}")
        where, saved = _directory_of(path), int(body["time"])
        _newest[where] = max(saved, _newest.get(where, 0))
        return body | {"sha256": whole["sha256"]}


@contextmanager
def as_data_loss(name: str) -> Iterator[None]:
    """Convert errors in parsing the manifest ``name`` to `DataLossError`."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLossError(f"{name!r} is damaged: {error}. Restore an older one.") from None


class _LocalFile:
    """An open local file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read_into(self, view: memoryview, at: int) -> int:
        """Read from offset ``at`` into ``view``; return the number of bytes read."""
        done = 0
        while done < len(view) and (got := os.preadv(self._fd, [view[done:]], at + done)):
            done += got
        return done


class _RemoteFile:
    """A file at a URL."""

    def __init__(self, path: str) -> None:
        found = storage.status(path)
        if found is None:
            raise FileNotFoundError(path)
        if found.is_folder:
            raise DataLossError(f"{path!r} is not a file.")
        self._path = path
        self.size = found.size

    def read_into(self, view: memoryview, at: int) -> int:
        """Read from offset ``at`` into ``view``; return the number of bytes read."""
        data = storage.read_range(self._path, at, at + len(view)) if len(view) else b""
        view[: len(data)] = data
        return len(data)


@contextmanager
def _open(root: str, name: str) -> Iterator[_LocalFile | _RemoteFile]:
    if is_url(root):
        yield _RemoteFile(f"{root}/{name}")
        return
    with open_below(root, name) as fd:
        yield _LocalFile(fd)


class _Pages:
    """A small FIFO cache of file pages; concurrent readers of a page share one request.

    Args:
        fetch: Reads a page, given the name of the file and the number of the page.
    """

    def __init__(self, fetch: Callable[[str, int], np.ndarray]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], Future[np.ndarray]] = {}

    def get(self, name: str, number: int) -> np.ndarray:
        """Return one page."""
        with self._lock:
            found = self._kept.get((name, number))
            page: Future[np.ndarray] = Future() if found is None else found
            self._kept[name, number] = page
            while len(self._kept) > _PAGES:
                del self._kept[next(iter(self._kept))]
        if found is None:
            try:
                page.set_result(self._fetch(name, number))
            except BaseException as error:
                page.set_exception(error)
        return page.result()


class CheckedFiles:
    """The files below one folder, read with verification against recorded sizes and checksums.

    Args:
        root: The folder.
        known: The recorded ``(size, checksums)`` of each file, by name relative to ``root``.
        version: The format of the checkpoint, which decides the checksum algorithm.

    Raises:
        ValueError: A name is not a plain relative path, or size and checksums are inconsistent.
    """

    def __init__(self, root: str, known: dict[str, Any], version: int = FORMAT) -> None:
        self._root = root
        self._checksum: Callable[[Any], int] = zlib.crc32 if version == 2 else checksum
        self._own = threading.local()
        self._is_remote = is_url(root)
        self._pages = _Pages(self._page)
        self._known: dict[str, tuple[int, list[int] | str]] = {}
        for name, (size, sums) in known.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a file of a checkpoint")
            if type(size) is not int or size < 0:
                raise ValueError(f"the size of {name!r} is {size!r}")
            if not isinstance(sums, str) and len(sums) != -(-size // BLOCK):
                raise ValueError(f"{name!r} has {len(sums)} checksums for {size} bytes")
            self._known[name] = size, sums

    def size(self, name: str) -> int:
        """Return the recorded size of a file; raise `KeyError` if ``name`` is not recorded."""
        return self._known[name][0]

    def verify(self) -> None:
        """Check that every file exists with its recorded size; contents are verified on read.

        Raises:
            DataLossError: A file is missing or has another size; the message names it.
        """
        if not self._is_remote:
            for name in self._known:
                self._verify(name)
            return
        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(self._verify, self._known))

    def _verify(self, name: str) -> None:
        with self._open(name):
            disk.note_progress()

    def read(self, name: str, at: int, into: np.ndarray) -> None:
        """Fill ``into`` from a byte range of a file, verifying every block the range touches.

        Args:
            name: The file.
            at: The offset at which the range begins.
            into: A byte array; its length is the length of the range.

        Raises:
            DataLossError: The file is missing or damaged.
        """
        until = at + len(into)
        cuts = [at, *range((at // _SHARE + 1) * _SHARE, until, _SHARE), until]
        if len(cuts) == 2:
            self._read(name, at, into)
            return
        with ThreadPoolExecutor(THREADS) as pool:
            shares = [into[a - at : b - at] for a, b in pairwise(cuts)]
            list(pool.map(partial(self._read, name), cuts, shares))

    def _read(self, name: str, at: int, into: np.ndarray) -> None:
        if self._is_remote:
            self._read_remote(name, at, into)
            return
        with self._open(name) as file:
            size, sums = self._known[name]
            if isinstance(sums, str):
                into[:] = self._block(file, name, 0, size)[at : at + len(into)]
                return
            until = at + len(into)
            for number in range(at // BLOCK, -(-until // BLOCK)):
                begin, end = number * BLOCK, min((number + 1) * BLOCK, size)
                if at <= begin and end <= until:
                    self._fill(file, name, number, into[begin - at : end - at])
                    continue
                low, high = max(at, begin), min(until, end)
                block = self._block(file, name, number, end - begin)
                into[low - at : high - at] = block[low - begin : high - begin]

    def _read_remote(self, name: str, at: int, into: np.ndarray) -> None:
        """Read a large range with one request, and a small one through the page cache."""
        size, sums = self._known[name]
        until = at + len(into)
        if isinstance(sums, str) or (len(into) >= _PAGE and not at % BLOCK):
            begin, end = 0 if isinstance(sums, str) else at, -(-until // BLOCK) * BLOCK
            found = self._fetched(name, begin, size if isinstance(sums, str) else min(end, size))
            into[:] = found[at - begin : until - begin]
            return
        for number in range(at // _PAGE, -(-until // _PAGE)):
            page, begin = self._pages.get(name, number), number * _PAGE
            low, high = max(at, begin), min(until, begin + len(page))
            into[low - at : high - at] = page[low - begin : high - begin]

    def _page(self, name: str, number: int) -> np.ndarray:
        begin = number * _PAGE
        return self._fetched(name, begin, min(begin + _PAGE, self._known[name][0]))

    def _fetched(self, name: str, begin: int, end: int) -> np.ndarray:
        """Read a range aligned to blocks with one request, and verify each block."""
        try:
            data = storage.read_range(f"{self._root}/{name}", begin, end) if end > begin else b""
        except FileNotFoundError:
            self._refuse(name, "missing")
        if len(data) != end - begin:
            self._refuse(name, "cut off")
        disk.note_progress()
        found = np.frombuffer(data, np.uint8)
        step = max(len(found), 1) if isinstance(self._known[name][1], str) else BLOCK
        for place in range(0, len(found), step):
            view = memoryview(found[place : place + step].data)
            self._compare(name, (begin + place) // BLOCK, view)
        return found

    def _block(self, file: _LocalFile, name: str, number: int, size: int) -> np.ndarray:
        """Return one verified block; each thread caches its last one for adjacent small values."""
        last: tuple[str, int, np.ndarray] | None = getattr(self._own, "last", None)
        if last is None or last[:2] != (name, number):
            last = name, number, np.empty(size, np.uint8)
            self._fill(file, name, number, last[2])
            self._own.last = last
        return last[2]

    def _fill(self, file: _LocalFile, name: str, number: int, into: np.ndarray) -> None:
        view = memoryview(into.data)
        if file.read_into(view, number * BLOCK) < len(view):
            self._refuse(name, "cut off")
        disk.note_progress()
        self._compare(name, number, view)

    def _compare(self, name: str, number: int, view: memoryview) -> None:
        sums = self._known[name][1]
        is_right = (
            hashlib.sha256(view).hexdigest() == sums
            if isinstance(sums, str)
            else self._checksum(view) == sums[number]
        )
        if not is_right:
            self._refuse(name, "damaged")

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        try:
            with _open(*self._inside(name)) as file:
                if file.size != self._known[name][0]:
                    expected = self._known[name][0]
                    how = f"damaged: it has {file.size:,} bytes instead of {expected:,}"
                    self._refuse(name, how)
                yield file
        except FileNotFoundError:
            self._refuse(name, "missing")

    def _refuse(self, name: str, how: str) -> NoReturn:
        path, inner = self._inside(name)
        raise DataLossError(
            f"Checkpoint {path!r} is corrupt: its file {inner!r} is {how}. Restore an older one."
        )

    def _inside(self, name: str) -> tuple[str, str]:
        """Return the checkpoint's path and the file's name relative to it.

        Files are opened from there because the data folder itself might be a symbolic link.
        """
        path, folder = os.path.split(self._root)
        return path, f"{folder}/{name}"
