"""Enumeration of an object's children: attributes and items, with and without a stable name.

A checkpoint stores a value under the names that lead to it, so a child needs a name that is the
same in the next run: an attribute, a str or int key, or an index in a sequence. Children without
such a name are listed too, because a variable among them must not be lost silently. Python's
garbage collector finds them: it enumerates the references of any object.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax._src.base.closures import captured
from replicax._src.base.origin import is_library
from replicax._src.state.variable import Variable

# The attributes of `rx.Variable`; all others on a variable are the user's.
OF_VARIABLES = frozenset(
    {
        "_name",
        "_trainable",
        "_synchronization",
        "_aggregation",
        "_strategy",
        "_whole",
        "_components",
        "_policy",
        "constraint",
        "is_written",
    }
)
_LIBRARIES = ("keras", "flax", "jax", "jaxlib", "numpy", "replicax")
_EXACT_VALUES = frozenset({str, bytes, bool, int, float, complex, type(None)})
_VALUES = (str, bytes, bytearray, int, float, complex, np.generic)
# Code that has no closure, and weak references, none of which own state to save. Generators and
# frames are not listed: their local variables may be state.
_CODE = (
    property,
    classmethod,
    staticmethod,
    types.ModuleType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    weakref.ReferenceType,
)
# Bound methods: of Python classes, of builtin classes, and of operators such as `x.__add__`.
_METHODS = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
_SEQUENCES = (list, tuple, deque)
_BARE = frozenset({dict, list, tuple, set, frozenset, deque})
_MISSING = object()


class Unnamed(NamedTuple):
    """A child without a stable name.

    Attributes:
        label: The child's label in error messages, appended to that of its parent.
        why: Why it has no name, and what to write instead.
        value: The child.
    """

    label: str
    why: str
    value: Any


class Contents(NamedTuple):
    """The children of an object.

    Attributes:
        named: The children with a stable name, by name.
        unnamed: All others.
    """

    named: Mapping[str, Any]
    unnamed: list[Unnamed]


_EMPTY = Contents({}, [])


class _Kind(NamedTuple):
    """How to enumerate the attributes of a class's instances."""

    slots: tuple[str, ...]
    skipped: frozenset[str]
    has_attributes: bool  # False if the instances are only collections of items
    classes: tuple[type, ...]  # the user's classes, whose attributes the instances share
    is_library: bool  # whether a library defines the class, whose references need no names


def has_no_parts(x: Any) -> bool:
    """Whether ``x`` has no children to save: a plain value, a numeric array, or code."""
    kind: Any = type(x)
    known = _has_no_parts(kind)
    if known is not None:
        return known
    if isinstance(x, np.ndarray):
        return bool(x.dtype != object)
    return isinstance(x, jax.Array) or (isinstance(x, _VALUES) and not getattr(x, "__dict__", None))


@lru_cache(4096)
def _has_no_parts(kind: Any) -> bool | None:
    """Answer `has_no_parts` for every instance of a class; None if it depends on the instance."""
    if kind in _EXACT_VALUES or issubclass(kind, _CODE):
        return True
    differ = issubclass(kind, (np.ndarray, *_VALUES)) or _home(kind) in ("jax", "jaxlib")
    return None if differ else False


def contents_of(x: Any) -> Contents:
    """Return the children of ``x``: its items and its attributes.

    A `Contents` is returned unchanged, so it can be passed in place of an object.
    """
    if isinstance(x, Contents):
        return x
    if has_no_parts(x):
        return _EMPTY
    if isinstance(x, types.FunctionType):
        # Not `__module__`, which `functools.wraps` copies from another function.
        return _function_contents(x) if _is_users(x.__globals__.get("__name__")) else _EMPTY
    if isinstance(x, type):
        return Contents({}, _of_classes(_kind(x), {}))
    if isinstance(x, _METHODS):
        return Contents({name: getattr(x, name, None) for name in ("__self__", "__func__")}, [])
    return _items_and_attributes(x)


def _items_and_attributes(x: Any) -> Contents:
    cls: Any = type(x)
    kind = _kind(cls)
    named, unnamed = _items_of(x)
    if not kind.has_attributes:
        return Contents(named, unnamed)
    skipped = []
    for name, value in _attributes(x, kind):
        if name in kind.skipped:
            skipped.append(value)
        elif named.setdefault(name, value) is not value:
            why = f"an item is named {name!r} too; rename one of them"
            unnamed.append(Unnamed(f".{name}", why, value))
    unnamed += _of_classes(kind, named)
    if not kind.is_library:
        unnamed += _referents(x, [cls, getattr(x, "__dict__", None), *named.values(), *skipped])
    return Contents(named, unnamed)


def merged(*contents: Mapping[str, Any] | Contents, why: str) -> Contents:
    """Merge the children of several objects; a later child replaces an earlier one of its name.

    Args:
        *contents: The children.
        why: The reason to record for replaced children, which become unnamed.
    """
    named: dict[str, Any] = {}
    unnamed: list[Unnamed] = []
    for one in contents:
        if isinstance(one, Contents):
            unnamed += one.unnamed
        for name, value in (one.named if isinstance(one, Contents) else one).items():
            if named.get(name, value) is not value:
                unnamed.append(Unnamed(f".{name}", why, named[name]))
            named[name] = value
    return Contents(named, unnamed)


def _items_of(x: Any) -> tuple[dict[str, Any], list[Unnamed]]:
    """Return the named and unnamed items of a collection; none for any other object."""
    if isinstance(x, Mapping):
        return _items(x)
    if isinstance(x, tuple) and (fields := getattr(x, "_fields", None)) is not None:
        return dict(zip(fields, x, strict=True)), []
    if isinstance(x, (*_SEQUENCES, np.ndarray)):
        return {str(i): v for i, v in enumerate(x.flat if isinstance(x, np.ndarray) else x)}, []
    if isinstance(x, set | frozenset):
        return {}, [Unnamed("{...}", _why_none(x), v) for v in x]
    return {}, []


def _items(x: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Unnamed]]:
    """Return the items of a mapping: named if the key is a str or int, unnamed otherwise."""
    if type(x) is dict and all(type(k) is str for k in x):
        return dict(x), []
    named: dict[str, Any] = {}
    unnamed: list[Unnamed] = []
    for key, value in x.items():
        if not isinstance(key, str | int):
            why = (
                f"a key of type {type(key).__name__} is not a name; use a str or an int as the key"
            )
            unnamed.append(Unnamed(f"[{key!r}]", why, value))
            if not isinstance(x, weakref.WeakKeyDictionary):
                unnamed.append(Unnamed(f"[{key!r}]", "a key of a dict is not saved", key))
            continue
        name = str(key)
        if named.get(name, value) is not value:
            why = f"two keys are both named {name!r}; rename one of them"
            unnamed.append(Unnamed(f"[{key!r}]", why, named[name]))
        named[name] = value
    return named, unnamed


def _function_contents(function: types.FunctionType) -> Contents:
    """Return the values that a function captures: closure, defaults and attributes, by name.

    Globals are not among them: they belong to the module, and so to the whole program.
    """
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    why = "another value that the function captures has this name; rename one of them"
    return merged(function.__dict__, defaults, captured(function), why=why)


def _attributes(x: Any, kind: _Kind) -> Iterable[tuple[str, Any]]:
    own = getattr(x, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())
    for name in kind.slots:
        if (value := getattr(x, name, _MISSING)) is not _MISSING:
            yield name, value


def _of_classes(kind: _Kind, named: Mapping[str, Any]) -> list[Unnamed]:
    """Return the class attributes of an object that no attribute of its own overrides."""
    return [
        Unnamed(
            f".{name}",
            f"it is an attribute of the class {base.__name__}, which all its objects share; set it"
            f" in `__init__`: `self.{name} = ...`",
            value,
        )
        for base in kind.classes
        for name, value in list(vars(base).items())
        if not (name.startswith(("__", "_abc_")) or has_no_parts(value) or name in named)
        and not hasattr(type(value), "__get__")
    ]


def _referents(x: Any, known: Iterable[Any]) -> list[Unnamed]:
    """Return the objects in ``x`` that are not known, such as an iterator's items."""
    ids = set(map(id, known))
    others = [v for v in gc.get_referents(x) if id(v) not in ids and not has_no_parts(v)]
    return [Unnamed("{...}", _why_none(x), v) for v in others]


def _why_none(x: Any) -> str:
    return f"a {type(x).__name__} gives its items no names; keep them in a list or a dict"


@lru_cache(4096)
def _kind(kind: Any) -> _Kind:
    is_collection = issubclass(kind, (*_SEQUENCES, set, frozenset, Mapping, np.ndarray))
    homes = set(map(_home, kind.__mro__))
    slots = [
        name
        for base in kind.__mro__
        if _home(base) not in _LIBRARIES
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and not name.endswith("__")
    ]
    return _Kind(
        tuple(dict.fromkeys(slots)),
        OF_VARIABLES
        if issubclass(kind, Variable)
        else frozenset(getattr(kind, "__rx_bookkeeping__", ())),
        # A library's collection stores its items in its attributes: do not list them twice.
        kind not in _BARE and not (is_collection and _home(kind) in _LIBRARIES),
        tuple(base for base in kind.__mro__ if _is_users(base.__module__)),
        not homes.isdisjoint(_LIBRARIES),
    )


def _is_users(name: Any) -> bool:
    """Whether the module called ``name`` is part of the user's program, not of a library."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    return file is not None and not is_library(file)


def is_of_library(kind: type) -> bool:
    """Whether a class is one of the libraries whose objects a checkpoint knows."""
    return _home(kind) in _LIBRARIES


def _home(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]
