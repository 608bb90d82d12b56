"""Attaching replicax's hooks to libraries when they are imported.

`join_libraries` attaches to a library that is already imported, or installs an import hook that
does so at the end of its import. Programs that do not import the library pay nothing. The contract
of each library lists the hooks, and the features that are lost with other versions of it.

Hooks use the predicates in this module to find out in which context they are called.
"""

import functools
import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from replicax._src.base.errors import ScopeError
from replicax._src.context.current import current


def replicas() -> Any:
    """Return the current replica context if the strategy has several replicas; else None."""
    replica = current().replica
    return replica if replica is not None and replica.num_replicas_in_sync > 1 else None


def is_inside(*_: Any, **__: Any) -> bool:
    """Whether the code runs in a scope, a replica function or an `rx.function`."""
    frame = current()
    is_scoped = frame.strategy is not None and frame.strategy.topology is not None
    return is_scoped or frame.replica is not None or frame.level is not None


def in_replicas(*_: Any, **__: Any) -> bool:
    """Whether the code runs in replica context with several replicas."""
    return replicas() is not None


def refuse_in_scopes(original: Any, what: str, why: str) -> Any:
    """Wrap a variable's constructor ``original`` to raise `ScopeError` in a strategy's scope."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = current().strategy
        if strategy is not None and strategy.topology is not None:
            raise ScopeError(f"{what} cannot be made in the scope of {strategy}: {why}.")
        original(self, *args, **kwargs)

    return init


# Imports.


ADAPTERS = {
    "flax.nnx": "replicax._src.integrations.nnx",
    "keras": "replicax._src.integrations.keras",
}


def join_libraries(adapters: Mapping[str, str] = ADAPTERS) -> None:
    """Import the adapter of each library in ``adapters``, now or after the library is imported.

    Args:
        adapters: Names of adapter modules, by the name of the library's module. An adapter attaches
            its hooks when it is imported.
    """
    later = {}
    for name, adapter in adapters.items():
        if name in sys.modules:
            importlib.import_module(adapter)
        else:
            later[name] = adapter
    if later:
        sys.meta_path.insert(0, _Finder(later))


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that delegates to the other finders, and imports the adapter after the library."""

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._adapters = adapters
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a library that has an adapter; None for all other modules."""
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
    # Patch the loader in place: a wrapper would not be the loader that tools expect.
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        try:
            execute(module)
        except ModuleNotFoundError as error:
            if module.__name__ == "keras":  # its default backend is TensorFlow
                error.add_note(
                    "replicax runs Keras on JAX: set KERAS_BACKEND=jax in the environment of the"
                    " program, or write `keras = rx.keras` in place of `import keras`."
                )
            raise
        importlib.import_module(adapter)

    loader.exec_module = exec_module
