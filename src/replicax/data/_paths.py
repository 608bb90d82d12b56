"""The one function that every path of a user passes through: files of this machine, or refused."""

import os
import re
from typing import Any

from replicax.data._errors import UnimplementedError

# A URL, or one that `pathlib` has written with a single slash.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_path(path: Any) -> str:
    """Return a path of a user's as text.

    Args:
        path: A str, bytes or path-like object; ``file:///tmp/x`` is ``/tmp/x``.

    Raises:
        UnimplementedError: It is a URL of another file system, such as ``gs://bucket/x``. Taken
            for a local name, it would be a folder called ``gs:`` that is lost with the machine.

    Example:
        >>> from replicax.data._paths import local_path
        >>> local_path("file:///tmp/x"), local_path("runs/7")
        ('/tmp/x', 'runs/7')
    """
    text = os.fsdecode(path)
    found = _URL.match(text)
    if found is None:
        return text
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    scheme = found[1]
    raise UnimplementedError(
        f"{text!r} is in the file system {scheme!r}, which replicax does not read or write yet: it"
        " uses files of this machine only. Mount the bucket (gcsfuse, mountpoint-s3) and give the"
        f" path of the mount, or copy the files with the tools of {scheme!r}. For a local folder"
        f" that is really called {scheme + ':'!r}, write ./{scheme}:/..."
    )
