"""Cache keys of Python values: equal only for values that a traced function cannot distinguish.

Python's equality is too weak for that. ``1``, ``1.0`` and ``True`` are equal, and so are ``0.0``
and ``-0.0``, also inside containers, while the programs traced for them differ. Mutable values are
identified by their content, because they may change between two calls.
"""

import array
import datetime
import decimal
import fractions
import pathlib
import struct
import types
import uuid
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from replicax.values._per_replica import is_opaque

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


def python_words(key: Any) -> str:
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
    # JAX warns about generators in pytrees. The content of an iterator is its position.
    if is_opaque(x) or isinstance(x, jax.Array | type | types.FunctionType | Iterator):
        return Identity(x)
    if id(x) in within:  # a container that contains itself
        return "cycle", within.index(id(x))
    inside = (*within, id(x))
    for kinds, look in _LOOKS:
        if issubclass(kind, kinds):
            found = look(x, lambda held: _key(held, inside))
            own = None if kind in _BARE or _is_member(x) else getattr(x, "__dict__", None)
            return (kind, found, _key(own, inside)) if own else (kind, found)
    return _object(x, kind, inside)


def _object(x: Any, kind: Any, inside: tuple[int, ...]) -> Any:
    if kind not in receivers:
        if hasattr(kind, "__dataclass_fields__"):
            # By the values of its fields, which may change while the object stays the same.
            return kind, tuple(_key(getattr(x, n, None), inside) for n in kind.__dataclass_fields__)
        held, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
        if len(held) != 1 or held[0] is not x:  # a pytree inside a value that is not one
            return structure_key(treedef), tuple(_key(y, inside) for y in held)
    if kind.__hash__ is None or kind.__hash__ is object.__hash__:
        is_value = kind.__hash__ is None and kind not in receivers
        own = getattr(x, "__dict__", None) if is_value else None
        # An unhashable object compares by content, which may have changed since.
        return Identity(x) if own is None else (Identity(x), _key(own, inside))
    try:
        hash(x)
    except TypeError:
        return Identity(x)
    return kind, x


def _is_member(x: Any) -> bool:
    """Whether `x` is an enum member, whose attributes belong to the class."""
    return hasattr(type(x), "__members__")


_Look = Callable[[Any, Callable[[Any], Any]], Any]


def _float(x: Any, key: Any) -> Any:
    # `repr` distinguishes 0.0 from -0.0, but not the sign and payload of NaN.
    return repr(x) if x == x else (repr(x), struct.pack("<2d", x.real, x.imag))


def _items(x: Any, key: Any) -> Any:
    return tuple((key(k), key(v)) for k, v in x.items())


def _buffer(x: Any, key: Any) -> Any:
    view = memoryview(x)
    return view.format, view.shape, view.tobytes()


def _array(x: Any, key: Any) -> Any:
    if x.dtype.hasobject:
        return x.shape, x.dtype.str, tuple(map(key, x.ravel().tolist()))
    return x.shape, x.dtype.str, x.tobytes()


# For each class, the content that distinguishes its values. The first matching class is used.
_LOOKS: list[tuple[Any, _Look]] = [
    ((np.ndarray, np.generic), _array),
    (str, lambda x, key: str.__str__(x)),
    (bytes, lambda x, key: bytes.__getitem__(x, slice(None))),
    (int, lambda x, key: int.__index__(x)),
    ((float, complex), _float),
    (decimal.Decimal, lambda x, key: str(x)),
    ((fractions.Fraction, uuid.UUID, pathlib.PurePath), lambda x, key: str(x)),
    ((datetime.datetime, datetime.time), lambda x, key: (x.isoformat(), x.fold, key(x.tzinfo))),
    (defaultdict, lambda x, key: (key(x.default_factory), _items(x, key))),
    ((dict, OrderedDict, types.MappingProxyType), _items),
    (deque, lambda x, key: (x.maxlen, tuple(map(key, x)))),
    # In iteration order, which may differ between equal sets.
    ((tuple, list, set, frozenset), lambda x, key: tuple(map(key, x))),
    ((type({}.keys()), type({}.values()), type({}.items())), lambda x, key: tuple(map(key, x))),
    ((slice, range), lambda x, key: (key(x.start), key(x.stop), key(x.step))),
    ((bytearray, memoryview, array.array), _buffer),
]
_HASHED = frozenset({str, int, bool, bytes})
_BARE = frozenset({float, complex, dict, tuple, list, set, frozenset, deque, np.ndarray})
