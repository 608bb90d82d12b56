"""Tracing of user functions with abstract arrays, to infer the spec of their results.

A trace must have no side effects. A copy of the function runs in a sandbox: captured values are
replaced by copies (containers) or abstract arrays (arrays), and libraries by the functions that
have a shape rule. Anything else, such as an object of a user's class, an import or a ``print``,
makes the function untraceable.
"""

import dis
import enum
import functools
import importlib
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.data.abstract_arrays import (
    AbstractArray,
    Trace,
    UntraceableError,
    abstract_array,
    call,
    elementwise,
    give_up,
    is_abstract,
    spec_of,
    trace,
)
from replicax._src.data.leaves import DatasetSpec, leaf_spec, to_leaf
from replicax._src.data.numpy_rules import as_array, has_rule
from replicax._src.data.seeds import Run, Seeds, nested_seeds
from replicax._src.data.structure import Structure, flatten
from replicax._src.data.user_functions import all_codes, loaded_names

_BUILTINS: dict[str, Any] = {
    each.__name__: each
    for each in (
        abs,
        all,
        any,
        bool,
        dict,
        Exception,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        enumerate,
        float,
        frozenset,
        int,
        len,
        list,
        map,
        max,
        min,
        range,
        reversed,
        set,
        slice,
        sorted,
        sum,
        tuple,
        zip,
    )
}
_FORBIDDEN = frozenset(
    {
        "DELETE_ATTR",
        "DELETE_GLOBAL",
        "DELETE_NAME",
        "IMPORT_FROM",
        "IMPORT_NAME",
        "LOAD_BUILD_CLASS",
        "LOAD_LOCALS",
        "STORE_ATTR",
        "STORE_GLOBAL",
        "STORE_NAME",
        "YIELD_VALUE",
    }
)
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_PRIVATE = {"_asdict", "_fields", "_replace"}  # public attributes of named tuples
_FRAMES = ("gi_", "cr_", "ag_", "f_", "tb_", "co_", "func_")  # attributes that lead to frames
_CONSTANTS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)


class Verdict(enum.Enum):
    """The outcome of a trace."""

    PROVED = "the spec holds for every element"
    VALUE = "the result depends on the data of an element"
    UNPROVED = "the function cannot be traced"


@dataclass(frozen=True)
class TraceOutcome:
    """A verdict, and the result if it is `Verdict.PROVED`."""

    verdict: Verdict
    result: Any = None


# Replacements of functions and classes in traces, by the id of the original, which is kept alive.
_stand_ins: dict[int, tuple[Any, Any]] = {}
_MODULES = ("numpy", "replicax", "replicax.data", "replicax.data.experimental")
_MOST_PARTS = 1024  # largest captured container that is copied
_dataset_of: list[Callable[[Any], Any]] = []


def register(real: Any, stand_in: Any) -> None:
    """Replace the function or class `real` by `stand_in` in traces."""
    _stand_ins[id(real)] = (real, stand_in)


def register_dataset(make: Callable[[Any], Any]) -> None:
    """Set the function that creates an abstract dataset from a spec, for nested datasets."""
    _dataset_of[:] = [make]


def traced(function: Callable[..., Any], *specs: Any, is_tuple: bool = False) -> TraceOutcome:
    """Call `function` on abstract values in a sandbox; return the spec of its result if proved.

    Args:
        function: The user's function.
        *specs: One nested spec for each argument.
        is_tuple: Whether to unpack a single spec that is a tuple into arguments.
    """
    if not _dataset_of:
        # Imported here because of an import cycle: datasets consist of nodes, which use traces.
        importlib.import_module("replicax._src.data.traced_datasets")
    state = Trace()
    is_inside = trace.get() is not None
    token = trace.set(state)
    try:
        # Seeds drawn during the trace must not advance the program's seed source.
        with nullcontext() if is_inside else nested_seeds(Run(), Seeds(0)):
            return _outcome(function, specs, state, is_tuple=is_tuple)
    except UntraceableError:
        pass
    except Exception:  # the user's own error is raised when the function runs on an element
        state.is_untraceable = True
    finally:
        trace.reset(token)
    is_value = state.needs_value and not state.is_untraceable
    return TraceOutcome(Verdict.VALUE if is_value else Verdict.UNPROVED)


def _outcome(
    function: Callable[..., Any], specs: Sequence[Any], state: Trace, *, is_tuple: bool
) -> TraceOutcome:
    """Run the trace; raise `UntraceableError`, or any error of the function, if it fails."""
    sandbox = _Sandbox()
    copied = sandbox.value(function)
    elements = [element_of(spec) for spec in specs]
    args = elements[0] if is_tuple and type(elements[0]) is tuple else elements
    result = copied(*args)
    spec = result_spec(tuple(result) if type(result) is list else result)
    if sandbox.is_changed() or state.is_untraceable:
        give_up("a function that writes into a container it captured")
    return TraceOutcome(Verdict.VALUE) if state.needs_value else TraceOutcome(Verdict.PROVED, spec)


def element_of(spec: Any) -> Any:
    """Return an abstract element of `spec`."""
    structure, leaves = flatten(spec)
    for part in structure.nested():
        if not _is_plain(part):
            give_up("an element that is an object of a class")
    return structure.unflatten([_leaf_of(leaf) for leaf in leaves])


def result_spec(result: Any) -> Any:
    """Return the nested spec of a traced function's result."""
    structure, leaves = flatten(result)
    return structure.unflatten([_spec_of_leaf(leaf) for leaf in leaves])


def _leaf_of(spec: Any) -> Any:
    if isinstance(spec, DatasetSpec) and _dataset_of:
        return _dataset_of[0](spec.element_spec)
    if not isinstance(spec, TensorSpec):
        give_up(f"a part of the spec {spec}")
    return AbstractArray(spec.shape, spec.dtype)


def _spec_of_leaf(leaf: Any) -> Any:
    if is_abstract(leaf):
        leaf = abstract_array(leaf)
    if isinstance(leaf, AbstractArray):
        return spec_of(leaf)
    return leaf_spec(to_leaf(leaf))


def _is_plain(structure: Structure) -> bool:
    """Whether building a value of this structure runs no user code."""
    factory = structure.factory
    if structure.kind == "object":
        return False
    return factory is None or factory is OrderedDict or _is_named_tuple(factory)


def _is_named_tuple(value: Any) -> bool:
    is_one = isinstance(value, type) and value.__bases__ == (tuple,) and hasattr(value, "_fields")
    return is_one and not {"__init__", "__getattribute__", "__getattr__"} & vars(value).keys()


class _Library:
    """A proxy of a module in a trace, whose attributes are replaced by sandboxed ones."""

    def __init__(self, sandbox: "_Sandbox", module: ModuleType) -> None:
        self._sandbox = sandbox
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return self._sandbox.value(getattr(self._module, name))


class _Sandbox:
    """Copies functions and the values they reference, so a trace cannot affect the originals."""

    def __init__(self) -> None:
        self._copies: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._containers: list[tuple[Any, list[Any]]] = []  # copies and their initial content

    def is_changed(self) -> bool:
        """Whether the traced function modified a container that it captured."""
        return any(
            len(now := _items(copied)) != len(before)
            or any(a is not b for a, b in zip(now, before, strict=True))
            for copied, before in self._containers
        )

    def value(self, value: Any) -> Any:  # noqa: C901 - one case for each kind of value
        """Return the sandboxed replacement of a captured value; abort the trace if none exists."""
        if type(value) in _CONSTANTS or isinstance(value, (AbstractArray, TypeSpec, np.dtype)):
            return value
        if isinstance(value, np.ndarray):
            return AbstractArray(value.shape, value.dtype) if value.ndim else value[()]
        if isinstance(value, (np.number, np.bool_)):
            return value
        if id(value) in _stand_ins:
            return _stand_ins[id(value)][1]
        if isinstance(value, np.ufunc):
            return functools.partial(_call_ufunc, value)
        if isinstance(value, type):
            return _type(value)
        if id(value) in self._copies:
            return self._copies[id(value)]
        self._alive.append(value)
        if isinstance(value, FunctionType) and not _is_numpy(value):
            return self._function(value)
        if type(value) is functools.partial:
            args = [self.value(arg) for arg in value.args]
            named = {name: self.value(arg) for name, arg in value.keywords.items()}
            return functools.partial(self.value(value.func), *args, **named)
        if isinstance(value, MethodType) and isinstance(value.__self__, type):
            return getattr(self.value(value.__self__), value.__name__)
        if isinstance(value, ModuleType) and value.__name__ in _MODULES:
            return _Library(self, value)
        if type(value) in (tuple, list, dict, set, frozenset) or _is_named_tuple(type(value)):
            return self._container(value)
        if hasattr(value, "node") and _dataset_of:
            return value  # immutable
        if _is_numpy(value):
            return functools.partial(_call_numpy, value)
        return give_up(f"a captured {type(value).__name__}")

    def _container(self, value: Any) -> Any:
        if len(value) > _MOST_PARTS:
            give_up("a large container")
        copied: Any
        if isinstance(value, dict):
            copied = {self.value(key): self.value(part) for key, part in value.items()}
        elif isinstance(value, tuple) and type(value) is not tuple:
            copied = type(value)(*map(self.value, value))
        else:
            copied = type(value)(map(self.value, value))
        self._copies[id(value)] = copied
        if not isinstance(value, tuple):
            self._containers.append((copied, _items(copied)))
        return copied

    def _function(self, function: FunctionType) -> Any:
        """Return a copy of a plain function whose globals and cells hold sandboxed values."""
        code = function.__code__
        _check_code(code)
        scope: dict[str, Any] = {"__builtins__": _BUILTINS, "__name__": "replicax_trace"}
        cells = tuple(CellType() for _ in function.__closure__ or ())
        copied = FunctionType(code, scope, function.__name__, None, cells)
        self._copies[id(function)] = copied
        for name in loaded_names(code):
            if name in function.__globals__:
                scope[name] = self.value(function.__globals__[name])
            elif name not in _BUILTINS:
                give_up(f"the name {name}")
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            new.cell_contents = self.value(old.cell_contents)
        copied.__defaults__ = function.__defaults__ and tuple(
            map(self.value, function.__defaults__)
        )
        copied.__kwdefaults__ = function.__kwdefaults__ and {
            name: self.value(value) for name, value in function.__kwdefaults__.items()
        }
        return copied


def _items(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return [part for pair in container.items() for part in pair]
    return list(container)


@functools.lru_cache(maxsize=1024)
def _refusal(code: CodeType) -> str:
    """Return the reason why code cannot be traced; "" if it can."""
    for part in all_codes(code):
        for step in dis.get_instructions(part):
            name = str(step.argval)
            if step.opname in _FORBIDDEN and not (
                step.opname == "YIELD_VALUE" and part.co_name == "<genexpr>"
            ):
                return step.opname
            if step.opname == "STORE_DEREF" and name in code.co_freevars:
                return "nonlocal"
            is_hidden = name.startswith(("_", *_FRAMES)) and name not in _PRIVATE
            if step.opname in _ATTRIBUTES and is_hidden:
                return f"the attribute {name}"
    return ""


def _check_code(code: CodeType) -> None:
    if reason := _refusal(code):
        give_up(reason)


def _is_numpy(value: Any) -> bool:
    name = getattr(value, "__name__", "")
    return isinstance(name, str) and callable(value) and getattr(np, name, None) is value


def _call_numpy(function: Any, *args: Any, **kwargs: Any) -> Any:
    if not has_rule(function):
        give_up(f"np.{function.__name__}")
    if is_abstract(args) or is_abstract(kwargs):
        return call(function, args, kwargs)
    return function(*args, **kwargs)


def _call_ufunc(ufunc: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs:
        give_up(f"np.{ufunc.__name__} with {list(kwargs)}")
    return elementwise(ufunc, args) if is_abstract(args) else ufunc(*args)


_scalar_types: dict[Any, Any] = {}


def _scalar_type(kind: Any) -> Any:
    """Return a subclass of a NumPy scalar type whose constructor accepts abstract values."""
    if kind in _scalar_types:
        return _scalar_types[kind]

    def new(_: Any, *args: Any) -> Any:
        if is_abstract(args):
            return as_array(args[0], kind)
        return kind(*args)

    # As a subclass it denotes the same dtype to NumPy.
    return _scalar_types.setdefault(kind, type(kind.__name__, (kind,), {"__new__": new}))


def _type(kind: type) -> Any:
    """Return the sandboxed replacement of a class; abort the trace for user-defined ones."""
    if kind in _BUILTINS.values() or kind in (str, bytes):
        return kind
    if _is_named_tuple(kind) or kind in (TensorSpec, DatasetSpec):
        return kind
    if kind.__module__ == "numpy" and issubclass(kind, (np.number, np.bool_)):
        return kind if kind is np.bool_ else _scalar_type(kind)
    return give_up(f"the class {kind.__name__}")
