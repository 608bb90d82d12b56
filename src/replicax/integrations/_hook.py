"""How other libraries are joined: when they are imported, and by hooks in their functions.

Hook: a function of a library that is replaced, and the test that it is still there.

Joins another library to replicax when both are imported, in whichever order.

A library that is there already is joined at once; one that is imported later is joined at the end
of its import. Nothing is imported for it, and programs without the library pay nothing.
"""

import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from replicax._errors import ScopeError
from replicax.context._current import current


@dataclass(frozen=True)
class Hook:
    """A function of a library, the parameters it must have, and what is put in its place.

    Attributes:
        place: The module in the library, and the name in it.
        root: The package of the library.
        again: Modules that may have the function under the same name.
    """

    place: str
    parameters: str
    make: Callable[[Any], Any]
    root: str = "keras.src"
    again: tuple[str, ...] = ("keras.src.backend", "keras.src.backend.jax")

    def owner(self) -> tuple[Any, str]:
        """The module or class that has the function, and its name there."""
        module, _, path = self.place.partition(":")
        owner: Any = importlib.import_module(f"{self.root}.{module}")
        *outer, name = path.split(".")
        return functools.reduce(getattr, outer, owner), name

    def fault(self) -> str:
        """How the library differs from what the hook was written for; empty if it does not."""
        try:
            owner, name = self.owner()
            found = ", ".join(inspect.signature(getattr(owner, name)).parameters)
        except (ImportError, AttributeError):
            return f"has no {self.place}"
        return "" if found == self.parameters else f"has {self.place}({found})"

    def install(self) -> None:
        """Put the new function in the place of the old one."""
        owner, name = self.owner()
        original = getattr(owner, name)
        new: Any = functools.wraps(original)(self.make(original))
        new.__signature__ = inspect.signature(original)  # configurations are read off it
        setattr(owner, name, new)
        for module in map(importlib.import_module, self.again):
            if getattr(module, name, None) is original:
                setattr(module, name, new)


def refused(original: Any, what: str, why: str) -> Any:
    """A constructor of variables that refuses in scopes, where this library cannot be joined."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = current().strategy
        if strategy is not None and strategy.topology is not None:
            raise ScopeError(f"{what} cannot be made in the scope of {strategy}: {why}.")
        original(self, *args, **kwargs)

    return init


def replicas() -> Any:
    """The replica that runs, if there are several of them; else None."""
    replica = current().replica
    return replica if replica is not None and replica.num_replicas_in_sync > 1 else None


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
