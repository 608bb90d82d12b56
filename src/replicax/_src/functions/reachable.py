"""The objects that a function can reach through closures, globals and attributes.

Python values that a traced function reads are part of its program, so a cached program is valid
only while they are unchanged. A tracer stored in one of them during the trace is an error, since
it has no value afterwards.
"""

import functools
import operator
from collections import ChainMap, UserDict, UserList, UserString, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, ValuesView
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax._src.base.closures import captured, content
from replicax._src.base.errors import TracingError
from replicax._src.base.origin import is_library_module, is_standard_module
from replicax._src.functions.cache_keys import (
    Identity,
    describe_key,
    slot_names,
    static_key,
    unstable_part,
)
from replicax._src.state.variable import Variable
from replicax._src.values.per_replica import Form, InBody, Pieces, is_distributed, is_opaque
from replicax._src.values.placement import is_traced

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, CodeType)
_CONTAINERS = (list, tuple, set, frozenset, deque)
# Containers with their items in an attribute that only methods of the standard library name.
_USER_CONTAINERS = (UserDict, UserList, UserString, ChainMap)
_PLAIN_CONTAINERS = frozenset({*_CONTAINERS, dict})
# Code that uses one of these names may read attributes that it does not name.
_DYNAMIC_ACCESS = frozenset(
    {"getattr", "vars", "__dict__", "attrgetter", "asdict", "astuple", "fields"}
)
# Methods that only code which creates or prints an object calls.
_CONSTRUCTION = frozenset(
    {"__init__", "__new__", "__post_init__", "__repr__", "__str__", "__reduce__"}
)
_MISSING = object()
_call: Any = operator.call


class Edge(NamedTuple):
    """A reference from one object to another: its Python expression, and its target."""

    label: str
    value: Any


class ReachableObjects:
    """All objects reachable from some roots.

    Only attributes whose names occur in the reachable code count: a counter that the training loop
    keeps on the same object, for example, is not part of the replica function.

    Attributes:
        facts: The keys of the objects found and their expressions, in traversal order.
        traced: The expressions that lead to tracers.
    """

    def __init__(self, *roots: Edge, everything: bool = False) -> None:
        self._names: set[str] = set()  # names in the user's code
        self._library_names: set[str] = set()  # names in methods of libraries that it calls
        self._everything = everything
        size = -1
        # Repeat until the reachable code names no further attributes.
        while size != len(self._names) + len(self._library_names) and not (
            everything and size >= 0
        ):
            size = len(self._names) + len(self._library_names)
            self._seen: dict[Any, int] = {}
            self._kept: list[Any] = []
            self._looked: list[tuple[Callable[[Any], Any], Any, Any]] = []
            self._sized: list[tuple[Any, int]] = []
            self._checks: list[Callable[[], bool]] = []
            self.facts: list[tuple[str, Any]] = []
            self.traced: list[str] = []
            for root in roots:
                self._visit(root)
        # Columns for `map`, whose loops run in C: a model may have a thousand attributes, and they
        # are checked before every step.
        self._looks = [list(column) for column in zip(*self._looked, strict=True)] or [[], [], []]
        self._sizes = [list(column) for column in zip(*self._sized, strict=True)] or [[], []]

    @property
    def key(self) -> Any:
        """A key that is equal for two equivalent functions."""
        return tuple(fact for _, fact in self.facts)

    def is_unchanged(self) -> bool:
        """Whether all objects are identical to those found before, so that `key` is unchanged.

        If not, the key may still be equal: this is only the fast check.
        """
        looks, keys, values = self._looks
        containers, sizes = self._sizes
        return (
            all(map(operator.eq, map(len, containers), sizes))
            and all(map(operator.is_, map(_call, looks, keys), values))
            and all(check() for check in self._checks)
        )

    def _visit(self, edge: Edge) -> None:
        todo = [edge]
        while todo:
            label, x = todo.pop()
            if isinstance(x, _SCALARS):
                # Attributes of a subclass of text or numbers may change.
                key = self._value(x) if hasattr(x, "__dict__") else static_key(x)
                self.facts.append((label, key))
                continue
            if id(x) in self._seen:
                self.facts.append((label, self._seen[id(x)]))
                continue
            self._seen[id(x)] = len(self._kept)
            self._kept.append(x)
            fact, edges = self._look(x, label)
            self.facts.append((label, fact))
            todo.extend(reversed(edges))

    def _look(self, x: Any, label: str) -> tuple[Any, list[Edge]]:
        """Return the key of `x` and its references."""
        if is_traced(x) or (is_distributed(x) and any(map(is_traced, _arrays_of(x)))):
            self.traced.append(label)
            return Identity(x), []
        if is_opaque(x) or isinstance(x, Variable):  # their `==` is elementwise
            return Identity(x), []
        for kinds, look in _LOOKS:
            if isinstance(x, kinds):
                looked: tuple[Any, list[Edge]] = getattr(self, look)(x, label)
                return looked
        wrapped = getattr(x, "__wrapped__", None) if callable(x) else None
        if isinstance(wrapped, FunctionType):  # jax.jit, rx.function and the like
            return Identity(x), [Edge(label, wrapped)]
        kind: Any = type(x)
        is_value = _is_opaque(kind) or _is_standard_value(kind)
        return (self._value(x), []) if is_value else self._instance(x, label)

    def _value(self, x: Any) -> Any:
        """Return the key of an object without references; if mutable, it is checked again."""
        key: Any = static_key(x)
        if _can_change(x):
            self._checks.append(lambda: static_key(x) == key)
        elif unstable_part(key) is not None:
            self._checks.append(lambda: False)
        return key

    def _array(self, x: np.ndarray, label: str) -> tuple[Any, list[Edge]]:
        if self._everything:
            return None, []
        if x.dtype.hasobject:  # its bytes are pointers
            return self._value(x), []
        mine = x.tobytes()
        self._checks.append(lambda: x.tobytes() == mine)
        return (x.shape, x.dtype.str, mine), []

    def _function(self, x: FunctionType, label: str) -> tuple[Any, list[Edge]]:
        code, names = x.__code__, code_names(x.__code__)
        in_library = is_library(x.__module__)
        (self._library_names if in_library else self._names).update(names)
        cells = x.__closure__ or ()
        edges = [Edge(name, value) for name, value in captured(x).items()]
        self._looked += [(content, c, e.value) for c, e in zip(cells, edges, strict=True)]
        edges += [Edge(f"{label}.__defaults__", x.__defaults__)]
        edges += [Edge(f"{label}.__kwdefaults__", x.__kwdefaults__)]
        if not in_library:
            edges += self._named(x.__globals__, names, "")
        if x.__dict__:
            edges += self._named(x.__dict__, self._names - {"__wrapped__"}, f"{label}.")
        return code, edges

    def _named(
        self, table: Any, names: Iterable[str], prefix: str, owner: Any = None
    ) -> list[Edge]:
        known = sorted(n for n in names if n in table)
        place = ("class", id(owner))
        if owner is None or place not in self._seen:  # once per class, not per instance
            self._seen[place] = 0
            self._looked += [(table.get, n, table[n]) for n in known]
            self._sized.append((table, len(table)))
        return [Edge(f"{prefix}{n}", table[n]) for n in known]

    def _instance(self, x: Any, label: str) -> tuple[Any, list[Edge]]:
        if not hasattr(x, "__dict__") and not slot_names(type(x)):
            return self._value(x), []  # an extension type: no attributes to inspect
        kind: Any = type(x)
        state = self._value(x) if _has_native_state(kind) else None
        return (kind, state), self._attributes(x, label)

    def _attributes(self, x: Any, label: str) -> list[Edge]:
        """Return the attributes of an instance and of its class that the code may read."""
        own, edges = getattr(x, "__dict__", None), []
        blind = self._everything or bool(self._names & _DYNAMIC_ACCESS)
        if isinstance(own, dict):
            named = self._names
            if is_library(type(x).__module__) or isinstance(x, _USER_CONTAINERS):
                named = self._names | self._library_names
            names = [n for n in own if isinstance(n, str)] if blind else named
            edges += self._named(own, names, f"{label}.")
        slots = slot_names(type(x))
        for name in slots if blind else self._names.intersection(slots):
            value = _slot(x, name)
            self._looked.append((functools.partial(_slot, x), name, value))
            edges.append(Edge(f"{label}.{name}", None if value is _MISSING else value))
        return [*edges, *self._inherited(type(x), label)]

    def _inherited(self, kind: type, label: str) -> list[Edge]:
        """Return the class attributes an instance uses: named in code, or implied by operators."""
        edges = []
        for base in kind.__mro__:
            if not _is_opaque(base) and not (self._everything and is_library(base.__module__)):
                table = vars(base)
                implied = {
                    n for n, v in table.items() if n[:2] == "__" and callable(v)
                } - _CONSTRUCTION
                edges += self._named(
                    table, (self._names & table.keys()) | implied, f"{label}.", base
                )
        return edges

    def _class(self, x: type, label: str) -> tuple[Any, list[Edge]]:
        making = [n for n in _CONSTRUCTION if n in vars(x)] if not is_library(x.__module__) else []
        edges = self._named(vars(x), making, f"{label}.")
        return Identity(x), [*edges, *self._inherited(x, label)]

    def _mapping(self, x: dict[Any, Any], label: str) -> tuple[Any, list[Edge]]:
        keys, values = list(x), list(x.values())
        self._sized.append((x, len(x)))
        self._looked += [(x.get, k, v) for k, v in x.items()]
        self._checks.append(lambda: all(map(operator.is_, x, keys)))  # in the same order
        fact = (type(x), tuple(map(static_key, keys)))
        edges = [Edge(f"{label}[{k!r}]", v) for k, v in zip(keys, values, strict=True)]
        return fact, edges + self._besides(x, label)

    def _besides(self, x: Any, label: str) -> list[Edge]:
        """Return the references of a container other than its items: a subclass's attributes."""
        if type(x) in _PLAIN_CONTAINERS:
            return []
        factory = [Edge(label, x.default_factory)] if isinstance(x, defaultdict) else []
        has_more = hasattr(x, "__dict__") or slot_names(type(x))
        return factory + self._attributes(x, label) if has_more else factory

    def _container(self, x: Any, label: str) -> tuple[Any, list[Edge]]:
        items = list(x)
        if not isinstance(x, tuple | frozenset):
            self._checks.append(lambda: len(x) == len(items) and all(map(operator.is_, x, items)))
        edges = [Edge(f"{label}[{i}]", v) for i, v in enumerate(items)]
        fact = (type(x), len(items), getattr(x, "maxlen", None))
        return fact, edges + self._besides(x, label)

    def _method(self, x: MethodType, label: str) -> tuple[Any, list[Edge]]:
        return "method", [Edge(label, x.__func__), Edge(f"{label}.__self__", x.__self__)]

    def _partial(self, x: Any, label: str) -> tuple[Any, list[Edge]]:
        return "partial", [
            Edge(f"{label}.func", x.func),
            Edge(f"{label}.args", x.args),
            Edge(f"{label}.keywords", x.keywords),
        ]

    def _wrapped(self, x: Any, label: str) -> tuple[Any, list[Edge]]:
        functions = [x.fget, x.fset] if isinstance(x, property) else [x.__func__]
        return type(x), [Edge(label, f) for f in functions]

    def _module(self, x: ModuleType, label: str) -> tuple[Any, list[Edge]]:
        if is_library(x.__name__):
            return Identity(x), []
        return Identity(x), self._named(vars(x), self._names, f"{label}.")


# The method that inspects each kind of object; any other object is inspected as an instance.
_LOOKS: list[tuple[Any, str]] = [
    (np.ndarray, "_array"),
    (FunctionType, "_function"),
    (MethodType, "_method"),
    (functools.partial, "_partial"),
    ((property, classmethod, staticmethod), "_wrapped"),
    (ModuleType, "_module"),
    (type, "_class"),
    (dict, "_mapping"),
    (_CONTAINERS, "_container"),
]


def first_difference(old: ReachableObjects, new: ReachableObjects) -> str:
    """Return a description of the first difference between two sets of reachable objects."""
    for (_, a), (label, b) in zip(old.facts, new.facts, strict=False):
        if a != b:
            return f"`{label}` changed from {describe_key(a)} to {describe_key(b)}"
    return "what it can reach changed"


def refuse_lost(name: str, fn: Callable[..., Any], arguments: Iterable[Any]) -> None:
    """Refuse tracers that are still stored in objects `fn` or its arguments reach.

    Raises:
        TracingError: If there are any; names the expressions.
    """
    given = [Edge("an argument", x) for x in arguments]
    lost = ReachableObjects(Edge(name, fn), *given, everything=True).traced
    if lost:
        raise TracingError(
            f"{name} left values of its trace in {', '.join(f'`{place}`' for place in lost[:3])}:"
            " Python runs once, when the function is traced, so they would never be set again"
            " and cannot be used outside. Keep state that the function changes in an rx.Variable,"
            " or return the values and set them outside."
        )


def refuse_leaked(name: str, values: Iterable[Any]) -> None:
    """Refuse tracers that leaked from another function's trace.

    Raises:
        TracingError: If `values` contains one.
    """
    if any(map(is_traced, values)):
        raise TracingError(
            f"{name} uses a value that exists only while another function was traced: it leaked out"
            " of that function through a global, an attribute or a list. Return values from traced"
            " functions, or keep them in an rx.Variable."
        )


def code_names(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes named in `code` and in the functions it defines."""
    inner = (code_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def is_library(module: Any) -> bool:
    """Whether a module belongs to a library, whose globals do not change between calls.

    Args:
        module: The ``__module__`` of an object; that of a class may be a descriptor.
    """
    if not isinstance(module, str) or module == "__main__":
        return False
    if module.split(".")[0] in ("replicax", "jax", "jaxlib", "numpy"):
        return True
    return is_library_module(module)


@functools.cache
def _has_native_state(kind: Any) -> bool:
    """Whether instances have state in C, which neither ``__dict__`` nor slots show.

    These are instances of extension types that have a ``__dict__`` as well, such as files, and of
    classes that derive from one, such as a user's subclass of float.
    """
    # CPython's Py_TPFLAGS_HEAPTYPE and Py_TPFLAGS_IMMUTABLETYPE: classes written in Python are
    # mutable heap types. Extensions may define those too, so look at the size of instances as well.
    heap, immutable = 1 << 9, 1 << 8
    if any(
        base is not object and (not base.__flags__ & heap or base.__flags__ & immutable)
        for base in kind.__mro__
    ):
        return True
    pointer = tuple.__itemsize__
    in_python = len(slot_names(kind)) + 2  # and the pointers to __dict__ and to weak references
    return bool(kind.__basicsize__ > object.__basicsize__ + pointer * in_python)


@functools.cache
def _is_opaque(kind: Hashable) -> bool:
    """Whether programs never inspect instances of a class: builtins, JAX's and our own."""
    home = str(getattr(kind, "__module__", "")).split(".")[0]
    if home in ("replicax", "jax", "jaxlib", "numpy", "logging", "threading", "_thread", "weakref"):
        return True
    return home == "builtins"


@functools.cache
def _is_standard_value(kind: Any) -> bool:
    """Whether instances of a standard library class compare by value: dates, paths, ..."""
    return is_standard_module(str(kind.__module__)) and kind.__hash__ not in (None, object.__hash__)


def _can_change(x: Any) -> bool:
    """Whether the key of an object without references may change during its lifetime."""
    if isinstance(x, BuiltinMethodType | MethodWrapperType):
        return not isinstance(x.__self__, ModuleType | None)
    is_view = isinstance(x, MappingProxyType | memoryview | ValuesView)
    has_attributes = isinstance(x, _SCALARS) and hasattr(x, "__dict__")
    return is_view or has_attributes or type(x).__hash__ is None


def _slot(x: Any, name: str) -> Any:
    return getattr(x, name, _MISSING)


def _arrays_of(x: Any) -> Iterable[Any]:
    """Return the arrays in a distributed value without splitting it, which would run a program."""
    stored: Form = x.stored
    if isinstance(stored, Pieces):
        return jax.tree.leaves(stored.values)
    return jax.tree.leaves(stored.piece) if isinstance(stored, InBody) else (stored.array,)
