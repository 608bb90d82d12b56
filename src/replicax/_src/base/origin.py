"""Distinguish the user's program from installed libraries, by the file that code comes from.

The distinction decides three things: which line an error message names, whether a compiled function
depends on a module's globals, and whether a cached dataset depends on a function's code. A wrong
"library" would reuse stale results, so only these count as libraries: the standard library,
replicax, and distributions that were installed from an index, whose code a version identifies.
Projects that were installed from a folder (``pip install .``) are the user's program.
"""

import functools
import importlib.metadata
import os
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGE = str(Path(__file__).absolute().parents[2])
_STANDARD = sysconfig.get_path("stdlib")
_STANDARD_NAMES = sys.stdlib_module_names | {"lib-dynload"}


def is_in(file: str, folder: str) -> bool:
    """Whether ``file`` is in ``folder`` or below it."""
    return file.startswith(os.path.join(folder, ""))


def is_replicax(file: str) -> bool:
    """Whether code in ``file`` is part of replicax."""
    return is_in(file, _PACKAGE)


@functools.cache
def is_library(file: str) -> bool:
    """Whether code in ``file`` is replicax's, Python's or an installed library's."""
    if is_replicax(file) or file.startswith("<"):
        return True
    for folder in _site_folders():
        if is_in(file, folder):
            return _is_from_index(_first_name(file, folder))
    return is_in(file, _STANDARD) and _first_name(file, _STANDARD) in _STANDARD_NAMES


def is_library_module(name: str) -> bool:
    """Whether the code of the loaded module ``name`` is a library's."""
    module = sys.modules.get(name)
    file: str | None = getattr(module, "__file__", None)
    if file is None:  # a builtin module has a spec; a module object created by user code has none
        return getattr(module, "__spec__", None) is not None
    return is_library(file)


def is_standard_module(name: str) -> bool:
    """Whether the loaded module ``name`` is Python's own, not a user's file of the same name."""
    return name.partition(".")[0] in sys.stdlib_module_names and is_library_module(name)


def _first_name(file: str, folder: str) -> str:
    """Return the module or package right below ``folder`` that ``file`` is part of."""
    return os.path.relpath(file, folder).split(os.sep)[0].partition(".")[0]


@functools.cache
def _site_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    paths.update(site.getsitepackages(), [site.getusersitepackages()])
    # A nested folder must come before its parent: the first match decides.
    return tuple(sorted(paths, key=len, reverse=True))


def _is_from_index(package: str) -> bool:
    """Whether every distribution that ships ``package`` was installed from an index.

    Installers write ``direct_url.json`` for anything else: a folder, an archive, a repository.
    """
    found = _distributions(package)
    return bool(found) and not any(d.read_text("direct_url.json") for d in found)


def _distributions(package: str) -> Sequence[importlib.metadata.Distribution]:
    try:
        return [importlib.metadata.distribution(package)]
    except importlib.metadata.PackageNotFoundError:
        names = _names_by_package().get(package, ())
        return [importlib.metadata.distribution(name) for name in names]


@functools.cache
def _names_by_package() -> Mapping[str, Sequence[str]]:
    return importlib.metadata.packages_distributions()
