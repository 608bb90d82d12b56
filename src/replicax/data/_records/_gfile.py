"""Files and folders, local or behind URLs, with the verbs of tf.io.gfile."""

import glob as globbing
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from replicax.data import _storage
from replicax.data._errors import AlreadyExistsError, NotFoundError
from replicax.data._paths import is_url, user_path
from replicax.data._records._file import Path, on_paths

_ESCAPED = re.compile(r"\\(.)" if os.sep == "/" else r"(?!)")  # elsewhere it separates folders


class FileStatistics(NamedTuple):
    """What `rx.io.gfile.stat` tells.

    Attributes:
        length: Bytes of the file.
        mtime_nsec: When it was changed last, in nanoseconds.
        is_directory: Whether it is a folder.

    Example:
        >>> import tempfile
        >>> rx.io.gfile.stat(tempfile.mkdtemp()).is_directory
        True
    """

    length: int
    mtime_nsec: int
    is_directory: bool


def copy(src: Path, dst: Path, overwrite: bool = False) -> None:  # noqa: FBT001, FBT002
    """Copy a file.

    Args:
        src: The file.
        dst: Its new name.
        overwrite: Whether a file with that name is replaced.

    Example:
        >>> import os, tempfile
        >>> a = os.path.join(tempfile.mkdtemp(), "a")
        >>> rx.io.write_file(a, "x")
        >>> rx.io.gfile.copy(a, a + "2")
        >>> rx.io.read_file(a + "2")
        b'x'
    """
    _check_free(src, dst, overwrite=overwrite)
    on_paths(_storage.copy, src, dst)


def exists(path: Path) -> bool:
    """Whether there is a file or a folder.

    Args:
        path: Its name.

    Returns:
        True if there is.

    Example:
        >>> rx.io.gfile.exists("/no/such/file")
        False
    """
    return _storage.exists(user_path(path))


def get_registered_schemes() -> list[str]:
    """Return the schemes of paths that can be opened: local files, and what is installed.

    Returns:
        The schemes, of which the empty one stands for local files. Other file systems of fsspec
        work too, and are not listed.

    Example:
        >>> "" in rx.io.gfile.get_registered_schemes()
        True
    """
    packages = {"gs": "gcsfs", "memory": "fsspec", "s3": "s3fs"}
    return ["", *(s for s, package in packages.items() if importlib.util.find_spec(package))]


def matching(pattern: str) -> list[str]:
    r"""The files that a pattern stands for, in order, by TensorFlow's rules.

    Unlike a shell's, wildcards stand for a leading dot too; ``[^a]`` is ``[!a]``, and ``\\*`` is a
    star.
    """
    meant = _ESCAPED.sub(lambda found: globbing.escape(found[1]), pattern).replace("[^", "[!")
    if is_url(meant):
        return _storage.glob(meant)
    return sorted(globbing.glob(meant, include_hidden=True))


def glob(pattern: Path | Sequence[Path]) -> list[str]:
    """The names of files that match patterns.

    Args:
        pattern: A pattern such as ``"data/*.csv"``, or several.

    Returns:
        The names, sorted, one pattern after the other.

    Example:
        >>> rx.io.gfile.glob("/no/such/*.csv")
        []
    """
    patterns = [pattern] if isinstance(pattern, (str, bytes, os.PathLike)) else pattern
    return [path for p in patterns for path in matching(user_path(p))]


def isdir(path: Path) -> bool:
    """Whether there is a folder of that name.

    Args:
        path: The name.

    Returns:
        True if there is.

    Example:
        >>> import tempfile
        >>> rx.io.gfile.isdir(tempfile.mkdtemp())
        True
    """
    return _storage.is_folder(user_path(path))


def join(path: Any, *paths: Any) -> Any:
    """Parts of a name put together.

    Args:
        path: The first part.
        *paths: The others; one that begins with a slash starts anew.

    Returns:
        The name.

    Example:
        >>> rx.io.gfile.join("data", "a.csv")
        'data/a.csv'
    """
    return os.path.join(path, *paths)


def listdir(path: Path) -> list[str]:
    """The names in a folder.

    Args:
        path: The folder.

    Returns:
        The names, without the folder's.

    Example:
        >>> import tempfile
        >>> rx.io.gfile.listdir(tempfile.mkdtemp())
        []
    """
    return list(on_paths(_storage.entries, path))


def makedirs(path: Path) -> None:
    """Make a folder and those above it, as far as they do not exist.

    Args:
        path: The folder.

    Example:
        >>> import os, tempfile
        >>> rx.io.gfile.makedirs(os.path.join(tempfile.mkdtemp(), "a", "b"))
    """
    on_paths(_storage.make_folders, path)


def mkdir(path: Path) -> None:
    """Make a folder, if it does not exist.

    Args:
        path: The folder; the one above it must exist.

    Example:
        >>> import os, tempfile
        >>> rx.io.gfile.mkdir(os.path.join(tempfile.mkdtemp(), "a"))
    """
    if not isdir(path):
        on_paths(_storage.make_folder, path)


def remove(path: Path) -> None:
    """Delete a file.

    Args:
        path: The file.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a")
        >>> rx.io.write_file(path, "x")
        >>> rx.io.gfile.remove(path)
    """
    on_paths(_storage.remove, path)


def rename(src: Path, dst: Path, overwrite: bool = False) -> None:  # noqa: FBT001, FBT002
    """Give a file or a folder another name.

    Args:
        src: Its name.
        dst: Its new name.
        overwrite: Whether a file with that name is replaced.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a")
        >>> rx.io.write_file(path, "x")
        >>> rx.io.gfile.rename(path, path + "2")
    """
    _check_free(src, dst, overwrite=overwrite)
    on_paths(_storage.replace, src, dst)


def rmtree(path: Path) -> None:
    """Delete a folder with everything in it, or a file.

    Args:
        path: The folder.

    Example:
        >>> import tempfile
        >>> rx.io.gfile.rmtree(tempfile.mkdtemp())
    """
    on_paths(_storage.remove_tree if isdir(path) else _storage.remove, path)


def stat(path: Path) -> FileStatistics:
    """What is known of a file.

    Args:
        path: The file.

    Returns:
        Its length, when it was changed, and whether it is a folder.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a")
        >>> rx.io.write_file(path, "four")
        >>> rx.io.gfile.stat(path).length
        4
    """
    found = on_paths(_storage.status, path)
    if found is None:
        text = os.fsdecode(path)
        raise NotFoundError(f"{text!r}: No such file or directory{_storage.here(text)}.")
    return FileStatistics(found.size, on_paths(_storage.modified, path), found.is_folder)


def walk(
    top: Path,
    topdown: bool = True,  # noqa: FBT001, FBT002
    onerror: Callable[[OSError], Any] | None = None,
) -> Iterator[tuple[str, list[str], list[str]]]:
    """A folder and all folders in it.

    Args:
        top: The folder; nothing comes if there is none.
        topdown: Whether a folder comes before those in it.
        onerror: Called with what goes wrong.

    Yields:
        A folder, the names of folders in it, and the names of files in it.

    Example:
        >>> import tempfile
        >>> [(folders, files) for _, folders, files in rx.io.gfile.walk(tempfile.mkdtemp())]
        [([], [])]
    """
    yield from _storage.walk(user_path(top), topdown=topdown, onerror=onerror)


def _check_free(src: Path, dst: Path, *, overwrite: bool) -> None:
    if not overwrite and exists(src) and exists(dst):
        raise AlreadyExistsError(
            f"{os.fsdecode(dst)!r} exists already. Pass overwrite=True to replace it."
        )
