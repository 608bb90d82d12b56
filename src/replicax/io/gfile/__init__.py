"""Operations on files and folders, under the names of tf.io.gfile.

Example:
    >>> rx.io.gfile.exists("/no/such/file")
    False
"""

from replicax._src.data.records.file_io import GFile
from replicax._src.data.records.gfile import (
    FileStatistics,
    copy,
    exists,
    get_registered_schemes,
    glob,
    isdir,
    join,
    listdir,
    makedirs,
    mkdir,
    remove,
    rename,
    rmtree,
    stat,
    walk,
)

__all__ = [
    "FileStatistics",
    "GFile",
    "copy",
    "exists",
    "get_registered_schemes",
    "glob",
    "isdir",
    "join",
    "listdir",
    "makedirs",
    "mkdir",
    "remove",
    "rename",
    "rmtree",
    "stat",
    "walk",
]

__dir__ = __all__.copy
