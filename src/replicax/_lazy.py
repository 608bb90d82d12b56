"""Names that are imported when they are first asked for.

``import replicax`` brings what every program uses. Datasets, clusters, TPUs and the rest come with
the first use of their names; to type checkers and readers the lists look as if all were there.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

# What is left out of the lists of strategies, and what to say of it.
_SYNCHRONOUS = "replicax trains synchronously, with every variable on its replicas' devices."
_NO_SERVERS = f"{_SYNCHRONOUS} Use MirroredStrategy or MultiWorkerMirroredStrategy."
ASYNCHRONOUS = {
    "ParameterServerStrategy": _NO_SERVERS,
    "CentralStorageStrategy": (
        f"{_SYNCHRONOUS} Use MirroredStrategy, which keeps a copy on each device."
    ),
    "Server": (
        "There is no server to start: start the program on each machine, with `replicax launch`"
        " or TF_CONFIG."
    ),
    "coordinator": _NO_SERVERS,
    "partitioners": (
        'Variables are not cut over servers. `MirroredStrategy(variable_policy="sharded")` keeps'
        " a part of each on every device, `rx.tpu.LayoutMap` cuts those that it names."
    ),
    "rpc": "There are no remote calls: every worker runs the whole program.",
    "PreemptionWatcher": (
        "Use `rx.distribute.experimental.PreemptionCheckpointHandler`, which saves and stops when"
        " the machine is about to be taken away."
    ),
}


def on_demand(
    package: str,
    homes: Mapping[str, str],
    absent: Mapping[str, str] | None = None,
    adviser: str | None = None,
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a public list.

    Args:
        package: The list's own name.
        homes: For each name, the module that defines it; a name that is a module of the list
            itself has its own full name.
        absent: For names of TensorFlow that do not exist here, why, and what to use.
        adviser: A module whose ``advice(name)`` says what to write for other names of TensorFlow.
    """

    def find(name: str) -> Any:
        if absent and name in absent:
            raise AttributeError(f"{package} has no {name}. {absent[name]}")
        home = homes.get(name)
        if home is None:
            words = ""
            if adviser and not name.startswith("_"):
                path = f"{package}.{name}".partition(".")[2]
                words = importlib.import_module(adviser).advice(path)
            told = f"{package} has no {name}. {words}"
            plain = f"module {package!r} has no attribute {name!r}"
            here = sys.modules[package]
            raise AttributeError(told if words else plain, name=name, obj=here)
        module = importlib.import_module(home)
        value = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find


class LeavesOut:
    """A class that leaves out methods of TensorFlow's: asking for one says what to use."""

    left_out: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name in type(self).left_out:
                raise AttributeError(f"{kind} has no {name}. {type(self).left_out[name]}")
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)


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
