"""Joins another library to replicax when both are imported, in whichever order.

A library that is there already is joined at once; one that is imported later is joined at the end
of its import. Nothing is imported for it, and programs without the library pay nothing.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ADAPTERS = {
    "flax.nnx": "replicax.integrations._nnx",
    "keras": "replicax.integrations._keras",
}


def join_libraries(adapters: Mapping[str, str] = ADAPTERS) -> None:
    """Have each library of ``adapters`` joined by its adapter, which does so when imported."""
    later = {}
    for name, adapter in adapters.items():
        if name in sys.modules:
            importlib.import_module(adapter)
        else:
            later[name] = adapter
    if later:
        sys.meta_path.insert(0, _Finder(later))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what the other finders do, and lets the adapter follow the import."""

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._adapters = adapters
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a library that is to be joined; None for all other modules."""
        adapter = self._adapters.get(name)
        if adapter is None or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, adapter)
        return spec


def _follow(loader: Any, adapter: str) -> None:
    # On the loader itself, so that it stays what the library and its tools take it for.
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        importlib.import_module(adapter)

    loader.exec_module = exec_module
