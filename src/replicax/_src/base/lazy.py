"""Lazy imports of public names and optional modules.

``import replicax`` imports only the modules that every program uses. Datasets, clusters, TPUs and
others are imported on the first use of their names; type checkers see all names.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

# Names of `tf.distribute` that do not exist here, with the explanation for error messages.
_SYNCHRONOUS = "replicax trains synchronously, with every variable on its replicas' devices."
_NO_SERVERS = (
    f"{_SYNCHRONOUS} Use MirroredStrategy or MultiWorkerMirroredStrategy: docs/estimators.md shows"
    " how to port such a program."
)
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
    **dict.fromkeys(
        ("DataParallel", "DistributedDataParallel", "DDPStrategy"),
        "Write `MirroredStrategy` for one machine, `MultiWorkerMirroredStrategy` for several.",
    ),
    **dict.fromkeys(
        ("FSDP", "FSDPStrategy", "FullyShardedDataParallel", "ModelParallel"),
        'Write `MirroredStrategy(variable_policy="sharded")`, which keeps a part of each variable'
        " on every device.",
    ),
    "rpc": "There are no remote calls: every worker runs the whole program.",
    "PreemptionWatcher": (
        "Use `rx.distribute.experimental.PreemptionCheckpointHandler`, which saves and stops when"
        " the machine is about to be taken away."
    ),
}

# Names that newcomers look for here, with the library that has them.
_KERAS = "Layers, losses and optimizers are Keras's: `rx.keras.{}`; or use Flax NNX and Optax."
OTHER_LIBRARIES = {
    **{
        name: _KERAS.format(name)
        for name in ("Model", "Sequential", "callbacks", "layers", "losses", "optimizers")
    },
    **{name: f"Transformations are JAX's: `jax.{name}`." for name in ("jvp", "vjp", "vmap")},
    "jit": "Write `rx.function`, which also carries variables; or `jax.jit` without them.",
    "pmap": "Write `strategy.run(fn, args=...)` inside an `rx.function`.",
}


def advised_error(text: str, name: str) -> AttributeError:
    """Return an error whose text says what to write.

    Python would append the most similar name of ``obj`` ("Did you mean: ...?"), which misleads.
    """
    return AttributeError(text, name=name, obj=None)


def on_demand(
    package: str,
    homes: Mapping[str, str],
    absent: Mapping[str, str] | None = None,
    adviser: str | None = None,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a public package.

    Args:
        package: The name of the package.
        homes: The module that defines each name; for a submodule of the package, its full name.
        absent: For names of TensorFlow that do not exist here, the reason and an alternative.
        adviser: A module whose ``advice(name)`` returns an alternative to other names of
            TensorFlow.
    """

    def find(name: str) -> Any:
        if absent and name in absent:
            raise advised_error(f"{package} has no {name}. {absent[name]}", name)
        home = homes.get(name)
        if home is None:
            advice = ""
            if adviser and not name.startswith("_"):
                path = f"{package}.{name}".partition(".")[2]
                advice = importlib.import_module(adviser).advice(path)
            if advice:
                raise advised_error(f"{package} has no {name}. {advice}", name)
            plain = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(plain, name=name, obj=sys.modules[package])
        module = importlib.import_module(home)
        value = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return find


class LeavesOut:
    """A base class whose ``__getattr__`` explains TensorFlow methods that do not exist here.

    Attributes:
        left_out: For each such method, the reason and an alternative.
    """

    left_out: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers must still report unknown attributes

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name in type(self).left_out:
                raise advised_error(f"{kind} has no {name}. {type(self).left_out[name]}", name)
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)


class LazyModule:
    """A module that is imported on first use of an attribute.

    Args:
        name: The name of the module.
        extra: The extra of replicax that installs it, if it is optional.
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
