"""Validation of user paths: local file names, URLs that fsspec can open, or an error.

Every path that a user passes to replicax goes through `user_path`, `local_path` or `local_file`.
"""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from replicax._src.base.tf_errors import InvalidArgumentError, UnimplementedError

# A URL, also with the single slash that `pathlib` leaves, or a chain such as `simplecache::s3:`.
_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*)([A-Za-z][A-Za-z0-9+.-]+):(/+)")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::")
# Schemes followed by a bucket: with a single slash, the missing second one can be restored.
_BUCKETS = {"abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a"}
# Schemes that no local folder has by accident.
_REMOTE = _BUCKETS | {"hdfs", "http", "https"}
_EXTRAS = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}
_QUERIED = {"http", "https"}  # schemes whose URLs may have a query
# Names that a shell, a manifest or an f-string would have replaced: ~, $RUN, ${run}, $(run), {run}.
_UNFILLED = re.compile(
    r"~|.*(\$?\{+ *[A-Za-z_]\w* *\}+|\$\(\w+\)|(?<![^_.=-])\$[A-Z_][A-Z0-9_]*\b).*|\$[A-Za-z_]\w*"
)


def user_path(path: Any) -> str:
    """Return a user's path as text: the name of a local file, or a URL that fsspec can open.

    Args:
        path: A str, bytes or path-like object. ``file:///tmp/x`` becomes ``/tmp/x``; the second
            slash that `pathlib` removes from a URL is restored.

    Raises:
        UnimplementedError: No file system has that scheme. Treated as a local name, it would create
            a folder called ``gs:`` on this machine only.
        ModuleNotFoundError: The package of that file system is not installed.
        InvalidArgumentError: The URL contains a password or a signature; or a part of the path is
            ``~``, or a variable such as ``$RUN`` that nothing has replaced.

    Example:
        >>> from replicax._src.files.paths import user_path
        >>> user_path("file:///tmp/x"), user_path("runs/7"), user_path("memory:/a/b")
        ('/tmp/x', 'runs/7', 'memory://a/b')
    """
    text = os.fsdecode(path)
    found = _URL.match(text)
    _refuse_unfilled(text, found)
    if found is not None:
        return _checked_url(text, found)
    if _CHAIN.match(text):
        raise _refused(text, text.split(":")[0], "is a chain of file systems")
    _refuse_nearly_url(text)
    return text


def local_path(path: Any) -> str:
    """Return a user's path as the name of a local file, where URLs are not supported.

    Raises:
        UnimplementedError: It is a URL.
        InvalidArgumentError: As for `user_path`.

    Example:
        >>> from replicax._src.files.paths import local_path
        >>> local_path("file:///tmp/x"), local_path("runs/7")
        ('/tmp/x', 'runs/7')
    """
    text = os.fsdecode(path)
    found = _URL.match(text)
    _refuse_unfilled(text, found)
    if found is not None and not text.startswith("file:///"):
        raise _refused(text, found[2], "is a URL, and this function takes local files only")
    if found is None:
        _refuse_nearly_url(text)
    return text.removeprefix("file://") if found is not None else text


def local_file(path: Any) -> Path:
    """Return `local_path` as a `Path`: the ``type`` of file arguments of the command line."""
    return Path(local_path(path))


def is_url(path: str) -> bool:
    """Whether a path that `user_path` returned is a URL."""
    return "://" in path and _URL.match(path) is not None


def parent(path: str) -> str:
    """Return the folder that contains a path; the bucket or host of a URL is its own parent."""
    if not is_url(path):
        return os.path.dirname(path)
    scheme, _, rest = path.partition("://")
    above = rest.rstrip("/").rpartition("/")[0]
    return f"{scheme}://{above}" if above else path


def absolute(path: str) -> str:
    """Return the absolute path; a URL unchanged, without trailing slashes."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)


def _checked_url(text: str, found: re.Match[str]) -> str:
    """Return the URL that ``found`` divides, or the local name that it stands for."""
    chain, scheme, slashes = found[1], found[2].lower(), found[3]
    rest = text[found.end() :]
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    if chain:
        raise _refused(text, chain.split(":")[0], "is a chain of file systems")
    if scheme in ("file", "local"):
        raise _refused(text, scheme, "is not of the form 'file:///path'")
    if scheme in _BUCKETS - {"memory"} and (not rest or len(slashes) > 2):
        raise _refused(text, scheme, "names no bucket")
    _check_installed(text, scheme)
    if len(slashes) == 1:
        if scheme not in _BUCKETS:
            raise _refused(text, scheme, "has one slash after the scheme (pathlib removes one)")
        slashes = "//"
    return f"{scheme}:{slashes}{rest}"


def _refuse_nearly_url(text: str) -> None:
    """Raise if a text that is not a URL would create a folder such as ``gs:`` on this machine.

    Such texts are slips of the pen, and URLs that ``os.path.abspath`` or `pathlib` made absolute as
    if they were local names.
    """
    parts = text.split("/")
    first = parts[0].partition(":")[0].strip()
    if ":" in parts[0] and (first.lower() in _REMOTE or _is_scheme(parts, 0)):
        raise _refused(text, first, "is almost a URL: '://' follows a scheme")
    for i in range(1, len(parts) - 1):
        if _is_scheme(parts, i) and parts[i - 1] != ".":
            raise _refused(text, parts[i][:-1], "has a URL behind a local folder")


def _refuse_unfilled(text: str, url: re.Match[str] | None) -> None:
    """Raise for a part that a shell, a manifest or an f-string should have replaced.

    It would be a folder called ``~`` in the current one, or ``$RUN``, which all runs share.
    """
    if url is not None and not text.startswith("file:///"):
        _refuse_secrets(url[2].lower(), text[url.end() :])  # before a message that has the text
    parts = text.split("/")
    for i, part in enumerate(parts):
        if parts[i - 1 : i] == ["."] or not _UNFILLED.fullmatch(part):
            continue
        if part == "~":
            why = "only a shell replaces it, and not in words such as --directory=~/run"
            how = "Pass os.path.expanduser(path)"
        else:
            why = "nothing has replaced that variable, and all runs would share a folder called so"
            how = "Pass its value, for example os.path.expandvars(path) or an f-string"
        raise InvalidArgumentError(
            f"{text!r} has the part {part!r}: {why}. {how}. For a folder that is really called"
            f" {part!r}, write ./{part}"
        )


def _is_scheme(parts: list[str], i: int) -> bool:
    """Whether a name between slashes is a scheme: one of a store, or with two slashes behind it."""
    is_doubled = parts[i + 1 : -1][:1] == [""]
    return parts[i].endswith(":") and (is_doubled or parts[i][:-1].lower() in _REMOTE)


def _check_installed(text: str, scheme: str) -> None:
    """Raise if fsspec, or the package that it needs for `scheme`, is not installed."""
    extra = _EXTRAS.get(scheme)
    try:
        fsspec = importlib.import_module("fsspec")
    except ModuleNotFoundError as error:
        package = f"replicax[{extra}]" if extra else "fsspec"
        raise ModuleNotFoundError(
            f"{text!r} is in the file system {scheme!r}, which needs fsspec:"
            f" `pip install '{package}'`.",
            name=error.name,
        ) from None
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise _refused(text, scheme, "names a file system that fsspec does not know") from None
    except ImportError as error:
        hint = f"`pip install 'replicax[{extra}]'`" if extra else f"fsspec says: {error}"
        raise ModuleNotFoundError(
            f"{text!r} is in the file system {scheme!r}, whose package is not installed: {hint}.",
            name=getattr(error.__cause__, "name", None),
        ) from None


def _refuse_secrets(scheme: str, rest: str) -> None:
    """Raise if a URL contains credentials: paths appear in messages, logs and manifests."""
    user, at, _ = rest.partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise InvalidArgumentError(
            f"A URL of {scheme!r} contains a password (not shown). Paths are written to logs; give"
            " credentials to the file system's own library instead, by its environment variables,"
            " its configuration files or fsspec's configuration."
        )
    if scheme in _QUERIED and "?" in rest:
        raise InvalidArgumentError(
            f"A URL of {scheme!r} has a query, which may contain a signature (not shown). Paths"
            " are written to logs. Use the scheme of the store, such as gs:// or s3://, or download"
            " the file first."
        )


def _refused(text: str, scheme: str, why: str) -> UnimplementedError:
    return UnimplementedError(
        f"{text!r} {why}; replicax does not read or write it. It takes local paths, file:///path,"
        " and URLs of one file system of fsspec, such as gs://bucket/run or s3://bucket/run. Else"
        " mount the file system, or copy the files. For a local folder that is really called"
        f" {scheme + ':'!r}, write ./{scheme}:/..."
    )
