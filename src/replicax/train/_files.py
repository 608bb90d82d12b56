"""Files of a checkpoint: named safely, kept for good, and believed only if their checksums agree.

A file is known by its size and a checksum of each of its blocks, so that any range of it can be
read and checked without the rest, by several threads: XXH3, several times as fast as a CRC.
Checkpoints of format 2 have CRC-32 in its place, those of format 1 the SHA-256 of whole files.
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

from replicax._faults import fault_point
from replicax._lazy import LazyModule
from replicax.data import _storage
from replicax.data._errors import DataLossError, NotFoundError
from replicax.data._paths import is_url, parent
from replicax.workers._watch import disk

_xxhash: Any = LazyModule("xxhash", extra="checkpoint")
MANIFEST = "checkpoint.json"
FORMAT = 3
# Names of our own: a folder that somebody gives us may have others.
DATA = re.compile(r"data-[0-9a-f]{16}")
RUN = secrets.token_hex(8)  # of this process
BLOCK = 1 << 18
THREADS = min(8, os.cpu_count() or 1)
_SHARE = 64 * BLOCK  # of a long file for one thread
_PAGE = 16 * BLOCK  # of a file behind a URL, for values that are smaller
_PAGES = 8  # that are kept
_REQUESTS = 16  # at a time
_MAX_MANIFEST = 1 << 28
_ALIGNMENT = 64  # of buffers that JAX takes as they are
_NAME = re.compile(r"(?!\.{1,2}(/|$))[\w.-]+(/(?!\.{1,2}(/|$))[\w.-]+)*", re.ASCII)


def explained(error: Exception, path: str) -> Exception:
    """The error of a save, with what it means for the user."""
    text = (
        f"Checkpoint {path!r} could not be written: {error}. Earlier checkpoints are as they were."
    )
    if "No space left" in str(error):
        text += " Make room on the disk, or keep fewer (`CheckpointManager(max_to_keep=...)`)."
    number = error.errno if isinstance(error, OSError) else None
    return OSError(text) if number is None else OSError(number, text)


def buffer(size: int) -> np.ndarray:
    """So many bytes of new memory, which a device of the host can take without a copy."""
    room = np.empty(size + _ALIGNMENT, np.uint8)
    at = -room.ctypes.data % _ALIGNMENT
    return room[at : at + size]


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def checksums(*parts: Any) -> list[int]:
    """The checksum of every block of what ``parts`` are, one after the other."""
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
    """The checksum of some bytes: XXH3, 64 bits wide."""
    return int(_xxhash.xxh3_64_intdigest(block))


def files_below(place: str) -> Iterator[str]:
    """The names of all files in a folder and its folders."""
    for folder, _, files in os.walk(place):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), place).replace(os.sep, "/")


def settle(place: str) -> None:
    """Wait until the files and folders below ``place`` have reached the disk."""
    files = [os.path.join(place, name) for name in files_below(place)]
    with ThreadPoolExecutor(2 * THREADS) as pool:  # the disk serves those that wait together
        list(pool.map(_sync, files))
        list(pool.map(sync_folder, [folder for folder, _, _ in os.walk(place)]))


def sync_folder(path: str) -> None:
    """Wait until the names in a folder have reached the disk."""
    _sync(path, os.O_DIRECTORY)


def _sync(path: str, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
    try:
        os.fsync(fd)
        disk.got_on()
    finally:
        os.close(fd)


@contextmanager
def locked(folder: str) -> Iterator[bool]:
    """Lock a folder against other processes and threads, if it is free; says whether it was.

    A process that ends, in whatever way, unlocks what it has locked. Where the file system has no
    locks, every folder is free.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        yield is_locked(fd)
    finally:
        os.close(fd)


def is_locked(fd: int) -> bool:
    """Lock an open folder until it is closed; False if somebody else has."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logging.getLogger("replicax").debug("No locks: %s", error)
    return True


@contextmanager
def opened_below(root: str, name: str) -> Iterator[int]:
    """A file below ``root``, to read; links are not followed, and nothing but a file is opened.

    Raises:
        FileNotFoundError: If there is none.
        DataLossError: If there is something else.
    """
    *above, last = name.split("/")
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for folder in above:
            fd = _step(fd, folder, os.O_DIRECTORY)
        fd = _step(fd, last, os.O_NONBLOCK)  # a pipe must not make us wait
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DataLossError(f"{os.path.join(root, name)!r} is not a file.")
        yield fd
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise DataLossError(
            f"{os.path.join(root, name)!r} is behind a link, which is not followed, or is no file."
        ) from None
    finally:
        os.close(fd)


def _step(folder: int, name: str, flags: int) -> int:
    inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=folder)
    os.close(folder)
    return inner


def metadata_below(place: str, tree: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the metadata files that Orbax wrote for the arrays."""
    for name in files_below(place):
        if name.split("/")[0] not in tree or name.endswith(".zarray"):
            with open(os.path.join(place, name), "rb") as file:
                yield name, file.read()


def manifest_bytes(body: dict[str, Any]) -> bytes:
    """Return a manifest with its checksum, as it is written."""
    text = json.dumps(body, allow_nan=False)
    whole = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
    return json.dumps(whole).encode()


def put_manifest(path: str, body: dict[str, Any]) -> None:
    """Put the manifest of a local checkpoint in its place, in one step, for good."""
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
        os.replace(draft, final)
        fault_point("committed")
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    note_time(path, body["time"])
    sync_folder(path)
    sync_folder(os.path.dirname(path))


def time_after(path: str) -> int:
    """Now, for the manifest at ``path``; or just after the last one of its folder that is known.

    Restarts find the newest checkpoint by its time. A clock that is set back, or is another
    machine's, must not make it an old one.
    """
    return max(time.time_ns(), _newest.get(_directory_of(path), 0) + 1)


def note_time(path: str, saved: int) -> None:
    """Remember the time of a manifest that was put."""
    _newest[_directory_of(path)] = saved


def _directory_of(path: str) -> str:
    return parent(path) if is_url(path) else os.path.dirname(os.path.realpath(path))


_newest: dict[str, int] = {}  # by folder: the latest time of a manifest that was read or put


def is_stored(path: str) -> bool:
    """Whether there is a checkpoint of ours at ``path``."""
    return _storage.is_file(os.path.join(path, MANIFEST))


def folder_of(path: str) -> str | None:
    """Return the folder that the checkpoint at ``path`` has its arrays in; None without one.

    Raises:
        OSError: The store of a URL did not answer: there may be one.
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
    """What the manifest of a checkpoint says; its checksum is right.

    Raises:
        NotFoundError: If there is none.
        DataLossError: If it is damaged.
    """
    name = os.path.join(path, MANIFEST)
    try:
        with _opened(path, MANIFEST) as file:
            if file.size > _MAX_MANIFEST:
                raise DataLossError(f"{name!r} is too long for the manifest of a checkpoint.")
            data = bytearray(file.size)
            if file.read_into(memoryview(data), 0) < len(data):
                raise DataLossError(f"{name!r} was changed while it was read.")
    except FileNotFoundError:
        raise NotFoundError(f"There is no checkpoint {path!r}: it has no file {name!r}.") from None
    with refused(name):
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
def refused(name: str) -> Iterator[None]:
    """Whatever is wrong with a manifest, it is a loss of data."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataLossError(f"{name!r} is damaged: {error}. Restore an older one.") from None


class _LocalFile:
    """An open file of this machine."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = os.fstat(fd).st_size

    def read_into(self, view: memoryview, at: int) -> int:
        """Fill memory from a place of the file on; return how many bytes there were."""
        done = 0
        while done < len(view) and (got := os.preadv(self._fd, [view[done:]], at + done)):
            done += got
        return done


class _RemoteFile:
    """A file behind a URL."""

    def __init__(self, path: str) -> None:
        found = _storage.status(path)
        if found is None:
            raise FileNotFoundError(path)
        if found.is_folder:
            raise DataLossError(f"{path!r} is not a file.")
        self._path = path
        self.size = found.size

    def read_into(self, view: memoryview, at: int) -> int:
        """Fill memory from a place of the file on; return how many bytes there were."""
        data = _storage.read_range(self._path, at, at + len(view)) if len(view) else b""
        view[: len(data)] = data
        return len(data)


@contextmanager
def _opened(root: str, name: str) -> Iterator[_LocalFile | _RemoteFile]:
    if is_url(root):
        yield _RemoteFile(f"{root}/{name}")
        return
    with opened_below(root, name) as fd:
        yield _LocalFile(fd)


class _Pages:
    """The last parts of files that were read, each fetched once for all threads.

    Args:
        fetch: Reads one; takes the name of a file and the number of the page.
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
    """Files below one folder, with the sizes and checksums that they must have.

    Args:
        root: The folder.
        known: What is known of each file, by its name: its size and checksums.
        version: The format of the checkpoint.

    Raises:
        ValueError: If a name is not one of a file below ``root``, or what is known makes no sense.
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
        """The size that a file must have; KeyError if none of that name is known."""
        return self._known[name][0]

    def verify(self) -> None:
        """See that every file is there, with the right size; its contents are checked when read.

        Raises:
            DataLossError: If one is not; it is named.
        """
        if not self._is_remote:
            for name in self._known:
                self._verify(name)
            return
        with ThreadPoolExecutor(_REQUESTS) as pool:
            list(pool.map(self._verify, self._known))

    def _verify(self, name: str) -> None:
        with self._opened(name):
            disk.got_on()

    def read(self, name: str, at: int, into: np.ndarray) -> None:
        """Read a range of a file, and compare the blocks that it lies in with their checksums.

        Args:
            name: The file.
            at: Where the range begins.
            into: Bytes, to be filled.

        Raises:
            DataLossError: If the file is damaged or missing.
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
        with self._opened(name) as file:
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
        """Read by few requests: a large range by one, small values by the page they lie in."""
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
        """Read a range that begins and ends with blocks, by one request, and check each block."""
        try:
            data = _storage.read_range(f"{self._root}/{name}", begin, end) if end > begin else b""
        except FileNotFoundError:
            self._refuse(name, "missing")
        if len(data) != end - begin:
            self._refuse(name, "cut off")
        disk.got_on()
        found = np.frombuffer(data, np.uint8)
        step = max(len(found), 1) if isinstance(self._known[name][1], str) else BLOCK
        for place in range(0, len(found), step):
            view = memoryview(found[place : place + step].data)
            self._compare(name, (begin + place) // BLOCK, view)
        return found

    def _block(self, file: _LocalFile, name: str, number: int, size: int) -> np.ndarray:
        """One block, kept until another is asked for: small values that are neighbours share it."""
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
        disk.got_on()
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
    def _opened(self, name: str) -> Iterator[Any]:
        try:
            with _opened(*self._inside(name)) as file:
                if file.size != self._known[name][0]:
                    self._refuse(name, "damaged: its size is another")
                yield file
        except FileNotFoundError:
            self._refuse(name, "missing")

    def _refuse(self, name: str, how: str) -> NoReturn:
        path, inner = self._inside(name)
        raise DataLossError(
            f"Checkpoint {path!r} is not whole: its file {inner!r} is {how}. Restore an older one."
        )

    def _inside(self, name: str) -> tuple[str, str]:
        """The folder of the checkpoint, and the name of a file in it: ours might be a link."""
        path, folder = os.path.split(self._root)
        return path, f"{folder}/{name}"
