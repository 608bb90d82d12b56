"""File access under TensorFlow's names: `read_file`, `write_file`, `matching_files` and `GFile`."""

import glob as globbing
import os
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn, Self

import numpy as np

from replicax._src.base.tf_errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    StructureError,
)
from replicax._src.data.leaves import Array, to_array
from replicax._src.files import storage
from replicax._src.files.paths import is_url, parent, user_path

Path = str | bytes | os.PathLike[Any]

_MODES = ("r", "w", "a", "r+", "w+", "a+")


def read_file(filename: Any, name: str | None = None) -> bytes:
    """Return the content of a file.

    Args:
        filename: The file.
        name: Ignored.

    Returns:
        The content as bytes.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.txt")
        >>> rx.io.write_file(path, "hello")
        >>> rx.io.read_file(path)
        b'hello'
    """
    del name
    path = _single_path(filename, "read_file")
    try:
        return storage.read_bytes(path)
    except OSError as error:
        explain(error, path)


def write_file(filename: Any, contents: Any, name: str | None = None) -> None:
    """Write a file, creating missing parent folders.

    Args:
        filename: The file, which is overwritten if it exists.
        contents: The bytes to write; a str is encoded as UTF-8.
        name: Ignored.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "new", "a.txt")
        >>> rx.io.write_file(path, b"hello")
    """
    del name
    path = _single_path(filename, "write_file")
    data = contents if isinstance(contents, (str, bytes)) else np.asarray(contents)[()]
    if not isinstance(data, (str, bytes)):
        raise StructureError(
            f"write_file() writes bytes or a str, got {type(contents).__name__}. Convert it first,"
            " for example with `rx.io.serialize_tensor(array)`."
        )
    try:
        storage.make_folders(parent(path))
        with storage.open_file(path, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        explain(error, path)


def matching_files(pattern: Any, name: str | None = None) -> Array:
    """Return the sorted names of files that match patterns.

    Args:
        pattern: A pattern such as ``"data/*.csv"``, or several.
        name: Ignored.

    Returns:
        An array of names, as bytes; a file that matches two patterns is listed twice.

    Example:
        >>> rx.io.matching_files("/no/such/*.csv")
        array([], dtype=object)
    """
    del name
    patterns = to_array(pattern).reshape(-1).tolist()
    found = sorted(os.fsencode(path) for p in patterns for path in _matching(user_path(p)))
    result = np.empty(len(found), object)
    result[:] = found
    return result


def _matching(pattern: str) -> list[str]:
    return storage.glob(pattern) if is_url(pattern) else globbing.glob(pattern)


class GFile:
    r"""A file that is opened on first use; a context manager.

    Args:
        name: The file.
        mode: ``"r"``, ``"w"`` or ``"a"``; add ``"+"`` to read and write, ``"b"`` for bytes.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.txt")
        >>> with rx.io.gfile.GFile(path, "w") as file:
        ...     file.write("one\ntwo\n")
        >>> with rx.io.gfile.GFile(path) as file:
        ...     file.readlines()
        ['one\n', 'two\n']
    """

    def __init__(self, name: Path, mode: str = "r") -> None:
        if mode.replace("b", "") not in _MODES:
            raise InvalidArgumentError(
                f"GFile(mode={mode!r}): the modes are {', '.join(_MODES)}, each also with a 'b'."
            )
        self.name = os.fsdecode(name)
        self.mode = mode
        self._file: IO[Any] | None = None

    def read(self, n: int = -1) -> Any:
        """Return the content from the current position on.

        Args:
            n: The maximum number of characters, or bytes; no limit if -1.

        Returns:
            A str, or bytes if the mode has a "b".
        """
        return self._open(reads=True).read(n)

    def readline(self) -> Any:
        """Return the next line with its line ending; empty at the end of the file.

        Returns:
            A str, or bytes if the mode has a "b".
        """
        return self._open(reads=True).readline()

    def readlines(self) -> list[Any]:
        """Return the remaining lines with their line endings.

        Returns:
            A list of lines.
        """
        return self._open(reads=True).readlines()

    def write(self, file_content: Any) -> None:
        """Write to the file.

        Args:
            file_content: A str, or bytes if the mode has a "b".
        """
        self._open(reads=False).write(file_content)

    def seek(self, offset: int | None = None, whence: int = 0, position: int | None = None) -> None:
        """Move to a position in the file.

        Args:
            offset: The offset from ``whence``.
            whence: 0 for the start, 1 for the current position, 2 for the end.
            position: A deprecated name of ``offset``.

        Raises:
            TypeError: If neither or both of ``offset`` and ``position`` are given.
            InvalidArgumentError: If ``whence`` is not 0, 1 or 2.
        """
        if (offset is None) == (position is None):
            raise TypeError(f"seek() takes offset, got {offset!r} and position={position!r}.")
        if whence not in (0, 1, 2):
            raise InvalidArgumentError(f"seek(whence={whence!r}): it must be 0, 1 or 2.")
        file = self._open(reads="r" in self.mode)
        base = (0, file.tell, self.size)[whence]
        file.seek((offset or position or 0) + (base() if callable(base) else 0))

    def seekable(self) -> bool:
        """Whether the file supports `seek`; always True.

        Returns:
            True.
        """
        return True

    def tell(self) -> int:
        """Return the current position.

        Returns:
            Bytes from the start.
        """
        return self._open(reads="r" in self.mode).tell()

    def size(self) -> int:
        """Return the length of the file.

        Returns:
            The number of bytes.
        """
        found = on_paths(storage.status, self.name)
        if found is None:
            raise NotFoundError(f"There is no file {self.name!r}.")
        return int(found.size)

    def flush(self) -> None:
        """Write buffered data to the file."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "r" not in self.mode:
            self._open(reads=False)  # create the file even if nothing was written
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def next(self) -> Any:
        """Return the next line; a deprecated form of ``next(file)``."""
        return next(self)

    def _open(self, *, reads: bool) -> IO[Any]:
        """Return the open file, opening it on first use; raise if the mode forbids the access."""
        can = "+" in self.mode or ("r" in self.mode) is reads
        if not can:
            raise PermissionDeniedError(
                f"{self.name!r} was opened with mode {self.mode!r}, which does not"
                f" {'read' if reads else 'write'}."
            )
        if self._file is None:
            encoding = None if "b" in self.mode else "utf-8"
            try:
                self._file = storage.open_file(user_path(self.name), self.mode, encoding)
            except OSError as error:
                explain(error, self.name)
        return self._file


def _single_path(filename: Any, verb: str) -> str:
    """Return the validated path of one file; raise for arrays and other types."""
    if isinstance(filename, np.ndarray) and not filename.ndim:
        filename = filename[()]
    if not isinstance(filename, (str, bytes, os.PathLike)):
        raise InvalidArgumentError(
            f"{verb}() takes the name of one file, got {filename!r:.60}. Call it for each, for"
            " example in `Dataset.map`."
        )
    return user_path(filename)


def on_paths(function: Callable[..., Any], *paths: Path) -> Any:
    """Return `function(*paths)` with validated paths; convert errors to TensorFlow's classes."""
    try:
        return function(*map(user_path, paths))
    except OSError as error:
        explain(error, os.fsdecode(paths[0]))


def explain(error: OSError, path: str) -> NoReturn:
    """Raise the class with TensorFlow's name for `error`, or `error` itself if there is none."""
    text = f"{path!r}: {error.strerror or error}{storage.here(path)}."
    if isinstance(error, FileNotFoundError):
        raise NotFoundError(text) from None
    if isinstance(error, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        raise FailedPreconditionError(text) from None
    if isinstance(error, PermissionError):
        raise PermissionDeniedError(text) from None
    raise error
