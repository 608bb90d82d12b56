"""Whole files, and files that are read and written piece by piece."""

import glob as globbing
import os
from collections.abc import Callable, Iterator
from typing import IO, Any, NoReturn, Self

import numpy as np

from replicax.data import _storage
from replicax.data._errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    StructureError,
)
from replicax.data._leaves import Array, to_array
from replicax.data._paths import is_url, parent, user_path

Path = str | bytes | os.PathLike[Any]

_MODES = ("r", "w", "a", "r+", "w+", "a+")


def read_file(filename: Any, name: str | None = None) -> bytes:
    """The whole content of a file.

    Args:
        filename: The file.
        name: Ignored.

    Returns:
        Its bytes.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.txt")
        >>> rx.io.write_file(path, "hello")
        >>> rx.io.read_file(path)
        b'hello'
    """
    del name
    path = _one(filename, "read_file")
    try:
        return _storage.read_bytes(path)
    except OSError as error:
        explain(error, path)


def write_file(filename: Any, contents: Any, name: str | None = None) -> None:
    """Write a file; folders on its way are made.

    Args:
        filename: The file, which is replaced if it exists.
        contents: Its bytes; a str is written as UTF-8.
        name: Ignored.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "new", "a.txt")
        >>> rx.io.write_file(path, b"hello")
    """
    del name
    path = _one(filename, "write_file")
    data = contents if isinstance(contents, (str, bytes)) else np.asarray(contents)[()]
    if not isinstance(data, (str, bytes)):
        raise StructureError(
            f"write_file() writes bytes or a str, got {type(contents).__name__}. Convert it first,"
            " for example with `rx.io.serialize_tensor(array)`."
        )
    try:
        _storage.make_folders(parent(path))
        with _storage.open_file(path, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        explain(error, path)


def matching_files(pattern: Any, name: str | None = None) -> Array:
    """The names of files that match patterns, sorted.

    Args:
        pattern: A pattern such as ``"data/*.csv"``, or several.
        name: Ignored.

    Returns:
        An array of names, as bytes; a file that matches two patterns is there twice.

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
    return _storage.glob(pattern) if is_url(pattern) else globbing.glob(pattern)


class GFile:
    r"""A file that is opened when it is first used; a context manager.

    Args:
        name: The file.
        mode: ``"r"``, ``"w"``, ``"a"``, with ``"+"`` for both, with ``"b"`` for bytes.

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
        """The content, from here on.

        Args:
            n: At most so many characters, or bytes; all if -1.

        Returns:
            A str, or bytes if the mode has a "b".
        """
        return self._opened(reads=True).read(n)

    def readline(self) -> Any:
        """The next line, with its end; empty at the end of the file.

        Returns:
            A str, or bytes if the mode has a "b".
        """
        return self._opened(reads=True).readline()

    def readlines(self) -> list[Any]:
        """The lines that are left, with their ends.

        Returns:
            A list of them.
        """
        return self._opened(reads=True).readlines()

    def write(self, file_content: Any) -> None:
        """Add to the file.

        Args:
            file_content: A str, or bytes if the mode has a "b".
        """
        self._opened(reads=False).write(file_content)

    def seek(self, offset: int | None = None, whence: int = 0, position: int | None = None) -> None:
        """Go to a place in the file.

        Args:
            offset: How far.
            whence: 0 from the start, 1 from here, 2 from the end.
            position: An older name of offset.

        Raises:
            TypeError: If neither or both are given.
            InvalidArgumentError: For another ``whence``.
        """
        if (offset is None) == (position is None):
            raise TypeError(f"seek() takes offset, got {offset!r} and position={position!r}.")
        if whence not in (0, 1, 2):
            raise InvalidArgumentError(f"seek(whence={whence!r}): it must be 0, 1 or 2.")
        file = self._opened(reads="r" in self.mode)
        base = (0, file.tell, self.size)[whence]
        file.seek((offset or position or 0) + (base() if callable(base) else 0))

    def seekable(self) -> bool:
        """Whether `seek` works: always.

        Returns:
            True.
        """
        return True

    def tell(self) -> int:
        """The place in the file.

        Returns:
            Bytes from the start.
        """
        return self._opened(reads="r" in self.mode).tell()

    def size(self) -> int:
        """The length of the file.

        Returns:
            Its bytes.
        """
        found = on_paths(_storage.status, self.name)
        if found is None:
            raise NotFoundError(f"There is no file {self.name!r}.")
        return int(found.size)

    def flush(self) -> None:
        """Bring what was written to the file."""
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
            self._opened(reads=False)
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
        """The next line; an older name of ``next(file)``."""
        return next(self)

    def _opened(self, *, reads: bool) -> IO[Any]:
        can = "+" in self.mode or ("r" in self.mode) is reads
        if not can:
            raise PermissionDeniedError(
                f"{self.name!r} was opened with mode {self.mode!r}, which does not"
                f" {'read' if reads else 'write'}."
            )
        if self._file is None:
            encoding = None if "b" in self.mode else "utf-8"
            try:
                self._file = _storage.open_file(user_path(self.name), self.mode, encoding)
            except OSError as error:
                explain(error, self.name)
        return self._file


def _one(filename: Any, verb: str) -> str:
    if isinstance(filename, np.ndarray) and not filename.ndim:
        filename = filename[()]
    if not isinstance(filename, (str, bytes, os.PathLike)):
        raise InvalidArgumentError(
            f"{verb}() takes the name of one file, got {filename!r:.60}. Call it for each, for"
            " example in `Dataset.map`."
        )
    return user_path(filename)


def on_paths(function: Callable[..., Any], *paths: Path) -> Any:
    """What a function of names gives; errors have TensorFlow's names."""
    try:
        return function(*map(user_path, paths))
    except OSError as error:
        explain(error, os.fsdecode(paths[0]))


def explain(error: OSError, path: str) -> NoReturn:
    """The same with TensorFlow's name, if it has one for it."""
    text = f"{path!r}: {error.strerror or error}{_storage.here(path)}."
    if isinstance(error, FileNotFoundError):
        raise NotFoundError(text) from None
    if isinstance(error, (IsADirectoryError, NotADirectoryError, FileExistsError)):
        raise FailedPreconditionError(text) from None
    if isinstance(error, PermissionError):
        raise PermissionDeniedError(text) from None
    raise error
