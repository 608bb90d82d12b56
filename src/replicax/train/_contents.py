"""Enumeration of an object's children: attributes and items, with and without a stable name.

A checkpoint stores a value under the names that lead to it, so a child needs a name that is the
same in the next run: an attribute, a str or int key, or an index in a sequence. Children without
such a name are listed too, because a variable among them must not be lost silently.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import numpy as np

# Attributes in which libraries keep bookkeeping; the objects are reachable in other ways.
_BOOKKEEPING = frozenset(
    {"_tracker", "_inbound_nodes", "_outbound_nodes", "_parent_path", "_obj_type"}
)
_LIBRARIES = ("keras", "flax", "jax", "jaxlib", "numpy", "replicax")
_EXACT_VALUES = frozenset({str, bytes, bool, int, float, complex, type(None)})
_VALUES = (str, bytes, bytearray, int, float, complex, np.generic)
# Code, stack frames, and weak references, none of which own state to save.
_CODE = (
    type,
    property,
    classmethod,
    staticmethod,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.CellType,
    types.FrameType,
    types.TracebackType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    weakref.ReferenceType,
)
_SEQUENCES = (list, tuple, deque)
# Collections whose items have neither a key nor an index.
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_UNORDERED: tuple[Any, ...] = (set, frozenset, *_VIEWS, SimpleQueue)
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
    cls: Any = type(x)
    kind = _kind(cls)
    named, unnamed = _items_of(x)
    if kind.has_attributes:
        for name, value in _attributes(x, kind):
            if named.setdefault(name, value) is not value:
                why = f"an item is named {name!r} too; rename one of them"
                unnamed.append(Unnamed(f".{name}", why, value))
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
    if isinstance(x, _UNORDERED):
        why = f"a {type(x).__name__} gives its items no names; keep them in a list or a dict"
        return {}, [Unnamed("{...}", why, v) for v in gc.get_referents(x)]
    return {}, []


def _items(x: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Unnamed]]:
    """Return the items of a mapping: named if the key is a str or int, unnamed otherwise."""
    if type(x) is dict and all(type(k) is str for k in x):
        return dict(x), []
    named: dict[str, Any] = {}
    unnamed: list[Unnamed] = []
    for key, value in x.items():
        if not isinstance(key, str | int):
            why = f"a key of type {type(key).__name__} is no name; use a str or an int as the key"
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


def _attributes(x: Any, kind: _Kind) -> Iterable[tuple[str, Any]]:
    own = getattr(x, "__dict__", None)
    if isinstance(own, dict):
        yield from [(k, v) for k, v in own.items() if k not in kind.skipped]
    for name in kind.slots:
        if (value := getattr(x, name, _MISSING)) is not _MISSING:
            yield name, value


@lru_cache(4096)
def _kind(kind: Any) -> _Kind:
    is_collection = issubclass(kind, (*_SEQUENCES, *_UNORDERED, Mapping, np.ndarray))
    slots = [
        name
        for base in kind.__mro__
        if _home(base) not in _LIBRARIES
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType) and not name.endswith("__")
    ]
    return _Kind(
        tuple(dict.fromkeys(slots)),
        _BOOKKEEPING if {"keras", "flax"} & set(map(_home, kind.__mro__)) else frozenset(),
        # A library's collection stores its items in its attributes: do not list them twice.
        kind not in _BARE and not (is_collection and _home(kind) in _LIBRARIES),
    )


def _home(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]
