"""Functions of `tf` in Keras's functional models, whose tensors have no values yet."""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from replicax._src.tf_ops.core import StaticShape

_IMPLEMENTATION = "replicax._src.integrations.keras_functional"
_KINDS = frozenset(["KerasTensor", "SymbolicSize"])


def accept_symbolic(namespace: str) -> None:
    """Make the functions of a public namespace accept Keras's symbolic tensors.

    Args:
        namespace: The name of the module, whose functions are replaced.
    """
    module = sys.modules[namespace]
    for name in module.__all__:
        function = getattr(module, name)
        home = getattr(function, "__module__", "")
        if inspect.isfunction(function) and home.startswith("replicax._src.tf_ops."):
            setattr(module, name, _accepting(function, namespace, name))


# One for each function, so that `tf.abs` stays `tf.math.abs`.
_KNOWN: dict[Callable[..., Any], Callable[..., Any]] = {}


def _accepting(function: Any, namespace: str, name: str) -> Callable[..., Any]:
    if function in _KNOWN:
        return _KNOWN[function]
    path = f"{namespace}.{name}".removeprefix("replicax.compat.tf.")

    @functools.wraps(function)
    def accepting(*args: Any, **kwargs: Any) -> Any:
        if not (_is_symbolic(args) or _is_symbolic(kwargs)):
            return function(*args, **kwargs)
        if path in _STATIC and _is_tensor(args[0] if args else kwargs.get("input")):
            return _STATIC[path](*args, **kwargs)
        return importlib.import_module(_IMPLEMENTATION).apply(path, args, kwargs)

    accepting.__module__, accepting.__qualname__ = namespace, name  # where pickle finds it
    _KNOWN[function] = accepting
    return accepting


def _is_symbolic(value: Any) -> bool:
    """Whether a nest of arguments contains a symbolic tensor, or the size of one.

    Classes are compared by name: this is asked at every call, and Keras may not be imported.
    """
    if isinstance(value, tuple | list):
        return any(_is_symbolic(x) for x in value)
    if isinstance(value, dict):
        return any(_is_symbolic(x) for x in value.values())
    if isinstance(value, StaticShape):
        return value.dtype == object and _is_symbolic(value.tolist())
    return type(value).__name__ in _KINDS


def _is_tensor(value: Any) -> bool:
    return type(value).__name__ == "KerasTensor"


def _shape(input: Any, out_type: Any = None, name: str | None = None) -> Any:
    """Return the shape, with a `SymbolicSize` for each size that is known only at run time."""
    sizes = importlib.import_module(_IMPLEMENTATION).shape_of(input)
    is_known = all(isinstance(size, int) for size in sizes)
    return np.asarray(sizes, out_type or np.int32 if is_known else object).view(StaticShape)


def _rank(input: Any, name: str | None = None) -> Any:
    return np.int32(len(input.shape))


# Functions of a tensor's description, which is known before its values are.
_STATIC: dict[str, Callable[..., Any]] = {"rank": _rank, "shape": _shape}
