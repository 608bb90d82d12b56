"""Compare the functions and objects that replicas pass to one collective, write or merge_call."""

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.closures import captured
from replicax._src.base.origin import is_library
from replicax._src.values.placement import is_traced

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic, slice, type(Ellipsis))
_Pair = tuple[str, Any, Any]
_default_eq: Any = object.__eq__
_identities: dict[type, Callable[[Any], Any]] = {}


@dataclass(frozen=True, slots=True)
class Call:
    """A call in which all replicas meet.

    Attributes:
        purpose: Its description in messages.
        subject: The objects it acts on, by label: a variable, a function, a value's structure.
    """

    purpose: str
    subject: Mapping[str, Any] = field(default_factory=dict)


def identify(kind: type, identity: Callable[[Any], Any]) -> None:
    """Compare objects of class `kind` by the identity of `identity(object)`."""
    _identities[kind] = identity


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe how the objects that two replicas pass differ; return "" if they are equivalent.

    Functions defined by the same line are equivalent if the data that they close over are equal,
    since the rendezvous calls only one of them. Objects that cannot be compared are equivalent only
    if they are the same object.

    Args:
        one: The objects of one replica, by label.
        other: The objects of another replica, by label.
    """
    seen: set[tuple[int, int]] = set()
    if one.keys() != other.keys():
        return f"one is given {', '.join(one) or 'nothing'} and another {', '.join(other)}"
    todo = [(label, one[label], other[label]) for label in one]
    while todo:
        label, a, b = todo.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen.add((id(a), id(b)))
        found = _look(label, a, b)
        if isinstance(found, str):
            return found
        todo.extend(found)
    return ""


def _look(label: str, a: Any, b: Any) -> str | list[_Pair]:
    """Return how two objects differ, or the pairs of parts to compare next."""
    if type(a) is not type(b):
        return _unlike(label, a, b)
    if is_traced(a) or is_traced(b):  # values are unknown; each replica uses its own
        return []
    identity = next((i for kinds, i in _identities.items() if isinstance(a, kinds)), None)
    if identity is not None:
        return [] if identity(a) is identity(b) else _unlike(label, a, b)
    look = next((look for kinds, look in _LOOKS if isinstance(a, kinds)), None)
    if look is not None:
        return look(label, a, b)
    if getattr(type(a), "__eq__", None) is not _default_eq:
        return [] if (a == b) is True else _unlike(label, a, b)
    if _is_user_class(type(a)) and hasattr(a, "__dict__"):
        return _mapping(f"vars({label})", vars(a), vars(b))
    return _unlike(label, a, b)


def _unlike(label: str, a: Any, b: Any) -> str:
    return f"{label} is {_shown(a)} on the first and {_shown(b)} on the second"


def _scalar(label: str, a: Any, b: Any) -> str | list[_Pair]:
    # By repr, because 0.0 equals -0.0 but is not interchangeable, and NaN does not equal itself.
    return (
        []
        if repr(a) == repr(b)
        else f"{label} is {a!r:.80} on the first and {b!r:.80} on the second"
    )


def _array(label: str, a: Any, b: Any) -> str | list[_Pair]:
    kinds = [f"{x.dtype}{list(x.shape)}" for x in (a, b)]
    if kinds[0] != kinds[1]:
        return f"{label} is {kinds[0]} on the first and {kinds[1]} on the second"
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = map(jax.random.key_data, (a, b))
    x, y = np.asarray(a), np.asarray(b)
    same = ((x == y) | ((x != x) & (y != y))).all()  # NaN is the same as NaN
    return [] if same else f"the values of {label} ({kinds[0]}) differ"


def _function(label: str, a: Any, b: Any) -> str | list[_Pair]:
    if a.__code__ != b.__code__:
        return _unlike(label, a, b)
    first, second = captured(a), captured(b)
    return [
        *((f"`{name}` in {label}", x, second[name]) for name, x in first.items()),
        (f"the defaults of {label}", a.__defaults__, b.__defaults__),
        (f"the defaults of {label}", a.__kwdefaults__, b.__kwdefaults__),
    ]


def _method(label: str, a: Any, b: Any) -> str | list[_Pair]:
    return [(label, a.__func__, b.__func__), (f"{label}.__self__", a.__self__, b.__self__)]


def _partial(label: str, a: Any, b: Any) -> str | list[_Pair]:
    return [(f"{label}.{n}", getattr(a, n), getattr(b, n)) for n in ("func", "args", "keywords")]


def _sequence(label: str, a: Any, b: Any) -> str | list[_Pair]:
    if len(a) != len(b):
        return f"{label} has {len(a)} items on the first and {len(b)} on the second"
    return [(f"{label}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]


def _mapping(label: str, a: Any, b: Any) -> str | list[_Pair]:
    if list(a) != list(b):
        return f"{label} has the keys {list(a)} on the first and {list(b)} on the second"
    return [(f"{label}[{k!r}]", a[k], b[k]) for k in a]


_LOOKS: list[tuple[Any, Callable[[str, Any, Any], str | list[_Pair]]]] = [
    (_SCALARS, _scalar),
    ((jax.Array, np.ndarray), _array),
    (FunctionType, _function),
    (MethodType, _method),
    (functools.partial, _partial),
    ((list, tuple), _sequence),
    (dict, _mapping),
    (type, _unlike),
]


def _is_user_class(kind: type) -> bool:
    home = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return home is None or not is_library(home)


def _shown(x: Any) -> str:
    if isinstance(x, FunctionType):
        return f"{x.__qualname__} ({x.__code__.co_filename}:{x.__code__.co_firstlineno})"
    return f"{x!r:.80}"
