"""Cache keys of Python values: equal only for values that a traced function cannot distinguish.

Python's equality is too weak for that. ``1``, ``1.0`` and ``True`` are equal, and so are ``0.0``
and ``-0.0``, also inside containers, while the programs traced for them differ. Mutable values are
identified by their content, because they may change between two calls. A value whose content cannot
be inspected, such as an iterator, gets a key that equals no other, so the function is traced again.
"""

import array
import datetime
import decimal
import fractions
import functools
import io
import pathlib
import struct
import sys
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax._src.base.origin import is_library, is_standard_module
from replicax._src.values.per_replica import is_opaque

# Classes with methods that are `rx.function`s: their instances are identified by `id`, and their
# attributes are not part of the key.
receivers: weakref.WeakSet[type] = weakref.WeakSet()


class Identity:
    """A key equal only to that of the same object, for as long as the object lives."""

    __slots__ = ("_hash", "_keep", "_ref")

    def __init__(self, x: Any) -> None:
        self._hash = id(x)
        try:
            self._ref: Any = weakref.ref(x)
            self._keep = None
        except TypeError:
            self._ref, self._keep = None, x

    def target(self) -> Any:
        """Return the object, or None if it has been deleted."""
        return self._ref() if self._ref is not None else self._keep

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._hash != other._hash:
            return False
        target = self.target()
        return target is not None and target is other.target()

    def __repr__(self) -> str:
        return f"the object {self.target()!r}"


class Unstable:
    """The key of a value that may change without being seen: equal to no other key."""

    __slots__ = ("kind",)

    def __init__(self, x: Any) -> None:
        self.kind = type(x)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return f"a {self.kind.__name__}, which may change without being seen"


def unstable_part(key: Any) -> Unstable | None:
    """Return the part of a key that keeps it from being found again, if there is one."""
    if isinstance(key, Unstable):
        return key
    parts = map(unstable_part, key) if isinstance(key, tuple) else ()
    return next((part for part in parts if part is not None), None)


def static_key(x: Any) -> Any:
    """Return a key that is equal for Python values that are equivalent to a traced function."""
    if x is None:
        return None
    kind = type(x)
    if kind is str or kind is int or kind is bool or kind is bytes:
        return kind, x
    if kind is float:
        return kind, _float(x, None)
    return _key(x, ())


def structure_key(treedef: Any) -> Any:
    """Return a key of a pytree structure that compares dict keys and static fields by value."""
    data = treedef.node_data()
    if data is None:  # a leaf
        return None
    kind, own = data
    return kind, static_key(own), tuple(map(structure_key, treedef.children()))


def describe_key(key: Any) -> str:
    """Return a description of the value that a key represents."""
    if not (isinstance(key, tuple) and len(key) > 1 and isinstance(key[0], type)):
        return repr(key)
    kind, value = key[:2]
    if issubclass(kind, float | complex):
        return value if isinstance(value, str) else str(value[0])
    if isinstance(value, str | bytes | int):
        return repr(value)
    return f"a {kind.__name__}"


def _key(x: Any, within: tuple[int, ...]) -> Any:
    """Return the key of `x`, where `within` are the ids of the containers around it."""
    kind: Any = type(x)
    if x is None or kind in _HASHED:
        return kind, x
    if is_opaque(x) or isinstance(x, jax.Array | type | types.FunctionType):
        return Identity(x)
    if isinstance(x, Iterator):  # before JAX, which warns about generators in pytrees
        # Its position cannot be read. Files and replicax's iterators count by identity.
        is_known = isinstance(x, io.IOBase) or _home(kind) == "replicax"
        return Identity(x) if is_known else Unstable(x)
    if id(x) in within:  # a container that contains itself
        return "cycle", within.index(id(x))
    inside = (*within, id(x))
    for kinds, look in _LOOKS:
        if issubclass(kind, kinds):
            found = look(x, lambda part: _key(part, inside))
            bare = kind in _BARE or _is_member(x)
            own = None if bare else _attributes(x, kind, kinds)
            return (kind, found, _key(own, inside)) if own else (kind, found)
    return _object(x, kind, inside)


def _object(x: Any, kind: Any, inside: tuple[int, ...]) -> Any:
    if kind in receivers:
        return (kind, x) if _has_own_hash(x, kind) else Identity(x)
    if hasattr(kind, "__dataclass_fields__"):
        return _dataclass(x, kind, inside)
    leaves, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
    if len(leaves) != 1 or leaves[0] is not x:  # a pytree inside a value that is not one
        return structure_key(treedef), tuple(_key(y, inside) for y in leaves)
    if kind.__hash__ is object.__hash__:
        return Identity(x)
    own = _attributes(x, kind)
    if _has_own_hash(x, kind):
        # Its `__eq__` may treat 1 and True as equal, or ignore attributes.
        is_exact = _is_member(x) or _home(_defining(kind, "__eq__")) in _EXACT_EQUALITY
        return (kind, x) if is_exact or not own else (kind, x, _key(own, inside))
    # An object that compares by content may have changed, and may have state that is not visible.
    is_seen = kind.__hash__ is None and own is not None
    return (Identity(x), _key(own, inside)) if is_seen else Unstable(x)


def _has_own_hash(x: Any, kind: Any) -> bool:
    if kind.__hash__ is None or kind.__hash__ is object.__hash__:
        return False
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _dataclass(x: Any, kind: Any, inside: tuple[int, ...]) -> Any:
    """Return the key of a dataclass: its fields, which may change while it is the same object."""
    names = kind.__dataclass_fields__
    fields = tuple(_key(getattr(x, n, None), inside) for n in names)
    # A class that only inherits from a dataclass keeps values of its own beside the fields.
    is_own = "__dataclass_fields__" in vars(kind)
    own = _attributes(x, kind) or {}
    # Libraries cache values in private attributes of their dataclasses; users keep state there.
    has_caches = is_own and _is_of_library(kind)
    rest = {n: v for n, v in own.items() if n not in names and not (has_caches and n[:1] == "_")}
    return (kind, fields, _key(rest, inside)) if rest else (kind, fields)


def _attributes(x: Any, kind: Any, known: Any = ()) -> dict[str, Any] | None:
    """Return the attributes of the instance ``x`` by name; None if instances have none.

    Args:
        x: Any object.
        kind: Its class.
        known: Classes whose slots are left out, because their content is inspected otherwise.
    """
    table, slots = getattr(x, "__dict__", None), slot_names(kind, known)
    if not isinstance(table, dict):
        if not slots:
            return None
        table = {}
    found = {n: v for n, v in table.items() if not _is_cached(kind, n)}
    for name in slots:
        value = getattr(x, name, _MISSING)
        if value is not _MISSING:
            found[name] = value
    return found


def slot_names(kind: Any, known: Any = ()) -> list[str]:
    """Return the names of a class's slots, as `getattr` takes them.

    Args:
        kind: A class.
        known: Bases to leave out. If there are any, those from the standard library are too.
    """
    found = []
    for base in kind.__mro__:
        named = vars(base).get("__slots__", ())
        if not named or (
            known and (base in _several(known) or is_standard_module(str(base.__module__)))
        ):
            continue
        for name in [named] if isinstance(named, str) else list(named):
            if not name.endswith("__"):
                private = name.startswith("__")
                found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return found


def _several(kinds: Any) -> tuple[Any, ...]:
    """Return one class or several as a tuple."""
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _is_of_library(kind: Any) -> bool:
    """Whether a class is defined by Python, replicax or an installed library."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_library(file)


def _is_cached(kind: Any, name: str) -> bool:
    """Whether an attribute is the result of a `cached_property`, which reads may add."""
    found = getattr(_defining(kind, name), "__dict__", {}).get(name)
    return isinstance(found, functools.cached_property)


def _defining(kind: Any, name: str) -> Any:
    """Return the class that an attribute of instances is defined in, or None."""
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def _home(kind: Any) -> str:
    """Return the name of the package that a class is from."""
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def _is_member(x: Any) -> bool:
    """Whether `x` is an enum member, whose attributes belong to the class."""
    return hasattr(type(x), "__members__")


_Look = Callable[[Any, Callable[[Any], Any]], Any]


def _float(x: Any, key: Any) -> Any:
    # Not `repr(x)`, which a subclass may override. It shows the sign of zeros, but not of NaN.
    base: Any = float if isinstance(x, float) else complex
    text: str = base.__repr__(x)
    if "nan" not in text:
        return text
    return text, struct.pack("<2d", base.real.__get__(x), base.imag.__get__(x))


def _method(x: Any, key: Any) -> Any:
    # Every access makes a new bound method, and its object may have changed.
    function = getattr(x, "__func__", None)
    name = x.__name__ if function is None else Identity(function)
    return name, Identity(x.__self__), key(x.__self__)


def _items(x: Any, key: Any) -> Any:
    return tuple((key(k), key(v)) for k, v in x.items())


def _buffer(x: Any, key: Any) -> Any:
    view = memoryview(x)
    return view.format, view.shape, view.tobytes()


def _array(x: Any, key: Any) -> Any:
    if x.dtype.hasobject:
        return x.shape, _dtype(x.dtype, key), tuple(map(key, x.ravel().tolist()))
    return x.shape, _dtype(x.dtype, key), x.tobytes()


def _dtype(x: Any, key: Any) -> Any:
    # `==` compares the fields of a structure, which `str` leaves out; neither has the metadata.
    return x, x.char, key(x.metadata) if x.metadata else None


# For each class, the content that distinguishes its values. The first matching class is used.
_LOOKS: list[tuple[Any, _Look]] = [
    ((np.ndarray, np.generic), _array),
    (str, lambda x, key: str.__str__(x)),
    (bytes, lambda x, key: bytes.__getitem__(x, slice(None))),
    (int, lambda x, key: int.__index__(x)),
    ((float, complex), _float),
    (decimal.Decimal, lambda x, key: decimal.Decimal.__str__(x)),
    (fractions.Fraction, lambda x, key: (x.numerator, x.denominator)),
    (uuid.UUID, lambda x, key: (x.int, x.is_safe)),
    (pathlib.PurePath, lambda x, key: str(x)),
    (np.dtype, _dtype),
    (datetime.timezone, lambda x, key: (x.utcoffset(None), x.tzname(None))),
    ((datetime.datetime, datetime.time), lambda x, key: (x.isoformat(), x.fold, key(x.tzinfo))),
    (defaultdict, lambda x, key: (key(x.default_factory), _items(x, key))),
    ((dict, OrderedDict, types.MappingProxyType), _items),
    (deque, lambda x, key: (x.maxlen, tuple(map(key, x)))),
    # In iteration order, which may differ between equal sets.
    ((tuple, list, set, frozenset), lambda x, key: tuple(map(key, x))),
    ((type({}.keys()), type({}.values()), type({}.items())), lambda x, key: tuple(map(key, x))),
    ((slice, range), lambda x, key: (key(x.start), key(x.stop), key(x.step))),
    ((bytearray, memoryview, array.array), _buffer),
    ((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), _method),
]
_MISSING = object()
# Packages whose `__eq__` holds for all that a trace may read.
_EXACT_EQUALITY = frozenset({"jax", "jaxlib", "numpy", "replicax"})
_HASHED = frozenset({str, int, bool, bytes})
_BARE = frozenset({float, complex, dict, tuple, list, set, frozenset, deque, np.ndarray, range})
