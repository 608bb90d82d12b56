"""Names that are imported when they are first asked for.

``import replicax`` brings what every program uses. Datasets, clusters, TPUs and the rest come with
the first use of their names; to type checkers and readers the lists look as if all were there.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

# What is left out of the lists of strategies, and what to say of it.
ASYNCHRONOUS = {
    name: (
        f"replicax has no {name}: it trains synchronously, with every variable on its replicas'"
        f" devices. Use {instead}."
    )
    for name, instead in {
        "ParameterServerStrategy": "MirroredStrategy or MultiWorkerMirroredStrategy",
        "CentralStorageStrategy": "MirroredStrategy, which keeps a copy on each device",
    }.items()
}


def on_demand(
    package: str, homes: Mapping[str, str], absent: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a public list.

    Args:
        package: The list's own name.
        homes: For each name, the module that defines it; a name that is a module of the list
            itself has its own full name.
        absent: For names that do not exist, what to say when somebody asks for them.
    """

    def find(name: str) -> Any:
        if absent and name in absent:
            raise AttributeError(absent[name])
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home)
        value = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find


class LazyModule:
    """A module that is imported when something in it is first used.

    Args:
        name: The module.
        extra: The extra of replicax that brings it, for what is not installed by itself.
    """

    def __init__(self, name: str, extra: str | None = None) -> None:
        self._name = name
        self._extra = extra

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except ModuleNotFoundError as error:
            if self._extra is None:
                raise
            raise ModuleNotFoundError(
                f"This needs {self._name}: `pip install 'replicax[{self._extra}]'`.",
                name=error.name,
            ) from error
        return getattr(module, attribute)
