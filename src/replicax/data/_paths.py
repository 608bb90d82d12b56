"""The one function that every path of a user passes through: a local name, a URL, or refused."""

import importlib
import os
import re
from typing import Any

from replicax.data._errors import InvalidArgumentError, UnimplementedError

# A URL, one that `pathlib` has written with a single slash, or a chain such as `simplecache::s3:`.
_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]*::)*)([A-Za-z][A-Za-z0-9+.-]+):(/+)")
_CHAIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*::")
# Where a bucket follows the scheme: a name with a single slash can mean one thing only.
_BUCKETS = {"abfs", "abfss", "az", "gcs", "gs", "memory", "oci", "oss", "r2", "s3", "s3a"}
_EXTRAS = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}
_QUERIED = {"http", "https"}


def user_path(path: Any) -> str:
    """Return a user's path as text: the name of a local file, or a URL that fsspec can open.

    Args:
        path: A str, bytes or path-like object. ``file:///tmp/x`` is ``/tmp/x``; a URL that
            `pathlib` has written with one slash gets its second one back.

    Raises:
        UnimplementedError: No file system has that scheme. Taken for a local name, it would be a
            folder called ``gs:`` that is lost with the machine.
        ModuleNotFoundError: The package of that file system is not installed.
        InvalidArgumentError: The URL contains a password or a signature.

    Example:
        >>> from replicax.data._paths import user_path
        >>> user_path("file:///tmp/x"), user_path("runs/7"), user_path("memory:/a/b")
        ('/tmp/x', 'runs/7', 'memory://a/b')
    """
    text = os.fsdecode(path)
    found = _URL.match(text)
    if found is None:
        if _CHAIN.match(text):
            raise _refused(text, text.split(":")[0], "is a chain of file systems")
        return text
    chain, scheme, slashes = found[1], found[2].lower(), found[3]
    rest = text[found.end() :]
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    _refuse_secrets(scheme, rest)
    if chain:
        raise _refused(text, chain.split(":")[0], "is a chain of file systems")
    if scheme in ("file", "local"):
        raise _refused(text, scheme, "is not of the form 'file:///path'")
    _check_installed(text, scheme)
    if len(slashes) == 1:
        if scheme not in _BUCKETS:
            raise _refused(text, scheme, "has one slash after the scheme (pathlib removes one)")
        slashes = "//"
    return f"{scheme}:{slashes}{rest}"


def local_path(path: Any) -> str:
    """Return a user's path as the name of a local file, where URLs are not supported.

    Raises:
        UnimplementedError: It is a URL.

    Example:
        >>> from replicax.data._paths import local_path
        >>> local_path("file:///tmp/x"), local_path("runs/7")
        ('/tmp/x', 'runs/7')
    """
    text = os.fsdecode(path)
    found = _URL.match(text)
    if found is not None and not text.startswith("file:///"):
        _refuse_secrets(found[2].lower(), text[found.end() :])
        raise _refused(text, found[2], "is a URL, and this function takes local files only")
    return text.removeprefix("file://") if found is not None else text


def is_url(path: str) -> bool:
    """Whether a path that `user_path` returned is a URL."""
    return "://" in path and _URL.match(path) is not None


def parent(path: str) -> str:
    """Return the folder that a path is in; of the top of a URL, itself."""
    if not is_url(path):
        return os.path.dirname(path)
    scheme, _, rest = path.partition("://")
    above = rest.rstrip("/").rpartition("/")[0]
    return f"{scheme}://{above}" if above else path


def absolute(path: str) -> str:
    """Return the path from the root; a URL as it is, without a slash at its end."""
    return path.rstrip("/") if is_url(path) else os.path.abspath(path)


def _check_installed(text: str, scheme: str) -> None:
    extra = _EXTRAS.get(scheme)
    try:
        fsspec = importlib.import_module("fsspec")
    except ModuleNotFoundError as error:
        what = f"replicax[{extra}]" if extra else "fsspec"
        raise ModuleNotFoundError(
            f"{text!r} is in the file system {scheme!r}, which needs fsspec:"
            f" `pip install '{what}'`.",
            name=error.name,
        ) from None
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise _refused(text, scheme, "names a file system that fsspec does not know") from None
    except ImportError as error:
        what = f"`pip install 'replicax[{extra}]'`" if extra else f"fsspec says: {error}"
        raise ModuleNotFoundError(
            f"{text!r} is in the file system {scheme!r}, whose package is not installed: {what}.",
            name=getattr(error.__cause__, "name", None),
        ) from None


def _refuse_secrets(scheme: str, rest: str) -> None:
    """Refuse credentials in a URL: paths appear in messages, logs and manifests."""
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
