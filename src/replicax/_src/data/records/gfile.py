"""The functions of tf.io.gfile, for local files and URLs."""

import glob as globbing
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from replicax._src.base.tf_errors import AlreadyExistsError, NotFoundError
from replicax._src.data.records.file_io import Path, on_paths
from replicax._src.files import storage
from replicax._src.files.paths import is_url, user_path

# A backslash escapes the next character, except on systems where it is the path separator.
_ESCAPED = re.compile(r"\\(.)" if os.sep == "/" else r"(?!)")


class FileStatistics(NamedTuple):
    """The result of `rx.io.gfile.stat`.

    Attributes:
        length: The size of the file in bytes.
        mtime_nsec: The modification time in nanoseconds.
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
        dst: The name of the copy.
        overwrite: Whether to replace an existing file of that name.

    Example:
        >>> import os, tempfile
        >>> a = os.path.join(tempfile.mkdtemp(), "a")
        >>> rx.io.write_file(a, "x")
        >>> rx.io.gfile.copy(a, a + "2")
        >>> rx.io.read_file(a + "2")
        b'x'
    """
    _check_target(src, dst, overwrite=overwrite)
    on_paths(storage.copy, src, dst)


def exists(path: Path) -> bool:
    """Whether a file or a folder exists.

    Args:
        path: The path.

    Returns:
        True if it exists.

    Example:
        >>> rx.io.gfile.exists("/no/such/file")
        False
    """
    return storage.exists(user_path(path))


def get_registered_schemes() -> list[str]:
    """Return the URL schemes whose packages are installed, and ``""`` for local files.

    Returns:
        The schemes. Other fsspec file systems also work but are not listed.

    Example:
        >>> "" in rx.io.gfile.get_registered_schemes()
        True
    """
    packages = {"gs": "gcsfs", "memory": "fsspec", "s3": "s3fs"}
    return ["", *(s for s, package in packages.items() if importlib.util.find_spec(package))]


def matching(pattern: str) -> list[str]:
    r"""Return the sorted paths that match a pattern by TensorFlow's rules.

    Unlike in a shell, wildcards also match a leading dot; ``[^a]`` means ``[!a]``, and ``\\*`` a
    literal star.
    """
    python_pattern = _ESCAPED.sub(lambda found: globbing.escape(found[1]), pattern)
    python_pattern = python_pattern.replace("[^", "[!")
    if is_url(python_pattern):
        return storage.glob(python_pattern)
    return sorted(globbing.glob(python_pattern, include_hidden=True))


def glob(pattern: Path | Sequence[Path]) -> list[str]:
    """Return the paths that match patterns.

    Args:
        pattern: A pattern such as ``"data/*.csv"``, or several.

    Returns:
        The paths, sorted within each pattern.

    Example:
        >>> rx.io.gfile.glob("/no/such/*.csv")
        []
    """
    patterns = [pattern] if isinstance(pattern, (str, bytes, os.PathLike)) else pattern
    return [path for p in patterns for path in matching(user_path(p))]


def isdir(path: Path) -> bool:
    """Whether a path is an existing folder.

    Args:
        path: The path.

    Returns:
        True if it is a folder.

    Example:
        >>> import tempfile
        >>> rx.io.gfile.isdir(tempfile.mkdtemp())
        True
    """
    return storage.is_folder(user_path(path))


def join(path: Any, *paths: Any) -> Any:
    """Join the parts of a path.

    Args:
        path: The first part.
        *paths: The other parts; an absolute one discards the parts before it.

    Returns:
        The path.

    Example:
        >>> rx.io.gfile.join("data", "a.csv")
        'data/a.csv'
    """
    return os.path.join(path, *paths)


def listdir(path: Path) -> list[str]:
    """Return the names in a folder.

    Args:
        path: The folder.

    Returns:
        The names, without the path of the folder.

    Example:
        >>> import tempfile
        >>> rx.io.gfile.listdir(tempfile.mkdtemp())
        []
    """
    return list(on_paths(storage.entries, path))


def makedirs(path: Path) -> None:
    """Create a folder and its missing parents.

    Args:
        path: The folder.

    Example:
        >>> import os, tempfile
        >>> rx.io.gfile.makedirs(os.path.join(tempfile.mkdtemp(), "a", "b"))
    """
    on_paths(storage.make_folders, path)


def mkdir(path: Path) -> None:
    """Create a folder if it does not exist.

    Args:
        path: The folder; its parent must exist.

    Example:
        >>> import os, tempfile
        >>> rx.io.gfile.mkdir(os.path.join(tempfile.mkdtemp(), "a"))
    """
    if not isdir(path):
        on_paths(storage.make_folder, path)


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
    on_paths(storage.remove, path)


def rename(src: Path, dst: Path, overwrite: bool = False) -> None:  # noqa: FBT001, FBT002
    """Rename a file or a folder.

    Args:
        src: The current path.
        dst: The new path.
        overwrite: Whether to replace an existing file of that name.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a")
        >>> rx.io.write_file(path, "x")
        >>> rx.io.gfile.rename(path, path + "2")
    """
    _check_target(src, dst, overwrite=overwrite)
    on_paths(storage.replace, src, dst)


def rmtree(path: Path) -> None:
    """Delete a folder with everything in it, or a file.

    Args:
        path: The folder.

    Example:
        >>> import tempfile
        >>> rx.io.gfile.rmtree(tempfile.mkdtemp())
    """
    on_paths(storage.remove_tree if isdir(path) else storage.remove, path)


def stat(path: Path) -> FileStatistics:
    """Return the size, modification time and kind of a file or folder.

    Args:
        path: The path.

    Returns:
        A `FileStatistics`.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a")
        >>> rx.io.write_file(path, "four")
        >>> rx.io.gfile.stat(path).length
        4
    """
    found = on_paths(storage.status, path)
    if found is None:
        text = os.fsdecode(path)
        where = storage.here(text)
        raise NotFoundError(f"{text!r}: No such file or directory{where}.")
    return FileStatistics(found.size, on_paths(storage.modified, path), found.is_folder)


def walk(
    top: Path,
    topdown: bool = True,  # noqa: FBT001, FBT002
    onerror: Callable[[OSError], Any] | None = None,
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder tree, like `os.walk`.

    Args:
        top: The folder; nothing is yielded if it does not exist.
        topdown: Whether a folder comes before its subfolders.
        onerror: Called with the error if a folder cannot be listed.

    Yields:
        A folder, the names of its subfolders, and the names of its files.

    Example:
        >>> import tempfile
        >>> [(folders, files) for _, folders, files in rx.io.gfile.walk(tempfile.mkdtemp())]
        [([], [])]
    """
    yield from storage.walk(user_path(top), topdown=topdown, onerror=onerror)


def _check_target(src: Path, dst: Path, *, overwrite: bool) -> None:
    if not overwrite and exists(src) and exists(dst):
        raise AlreadyExistsError(
            f"{os.fsdecode(dst)!r} exists already. Pass overwrite=True to replace it."
        )
