"""Flattening of nested elements to lists of leaves, and back.

Tuples, named tuples, mappings, dataclasses, attrs classes and ``None`` are structure; everything
else, including lists, is a leaf.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from replicax._src.base.tf_errors import StructureError

_Kind = Literal["leaf", "none", "tuple", "named", "dict", "object"]


@dataclass(frozen=True, slots=True)
class Structure:
    """The nesting of an element without its leaves (like a treedef); compared by value."""

    kind: _Kind
    children: tuple["Structure", ...] = ()
    keys: tuple[Any, ...] = ()
    factory: Callable[..., Any] | None = None
    num_leaves: int = 1
    is_flat_tuple: bool = False

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the nested value with these leaves."""
        if self.kind == "leaf":
            return leaves[0]
        if self.is_flat_tuple:
            return tuple(leaves)
        return self.build(iter(leaves))

    def leaves_of(self, value: Any, *, takes_tuples: bool = False) -> list[Any]:
        """Return the leaves of `value`; raise `StructureError` if its structure differs.

        Args:
            value: The nested value.
            takes_tuples: Whether to accept a tuple as a leaf, as lists are.
        """
        if self.kind == "leaf" and not isinstance(value, (tuple, dict)):
            return [value]
        is_alike = self.is_flat_tuple and type(value) is tuple and len(value) == self.num_leaves
        if is_alike and not any(p is None or isinstance(p, (tuple, Mapping)) for p in value):
            return list(value)
        leaves: list[Any] = []
        self.collect(value, leaves, value, takes_tuples=takes_tuples)
        return leaves

    @property
    def is_uneven(self) -> bool:
        """Whether this is the structure of a sparse or ragged tensor."""
        return bool(getattr(self.factory, "is_uneven", False))

    def nested(self) -> Iterator["Structure"]:
        """Yield this structure and all structures nested in it."""
        yield self
        for child in self.children:
            yield from child.nested()

    def __str__(self) -> str:
        return _describe(self.unflatten(["*"] * self.num_leaves))

    def build(self, leaves: Iterable[Any]) -> Any:
        """Return the nested value, taking the leaves it needs from an iterator."""
        if self.kind == "leaf":
            return next(leaves)  # type: ignore[call-overload]
        if self.kind == "none":
            return None
        parts = [child.build(leaves) for child in self.children]
        if self.keys:
            named = zip(self.keys, parts, strict=True)
            if self.kind == "object":
                assert self.factory is not None
                # attrs strips leading underscores from the names of __init__ arguments.
                is_attrs = hasattr(self.factory, "__attrs_attrs__")
                return self.factory(**{k.lstrip("_") if is_attrs else k: v for k, v in named})
            return dict(named) if self.factory is None else self.factory(named)
        if self.factory is not None:
            return self.factory(*parts)
        return {} if self.kind == "dict" else tuple(parts)

    def collect(
        self, value: Any, leaves: list[Any], whole: Any, *, takes_tuples: bool = False
    ) -> None:
        """Append the leaves of `value`, a part of ``whole``, to `leaves`.

        Raises:
            StructureError: If the structure differs; the message shows ``whole``.
        """
        if self.kind == "leaf":
            nested = Mapping if takes_tuples else (tuple, Mapping)
            if value is None or isinstance(value, nested) or field_names(value):
                raise self._mismatch(whole)
            leaves.append(value)
            return
        for child, part in zip(self.children, self._parts_of(value, whole), strict=True):
            child.collect(part, leaves, whole, takes_tuples=takes_tuples)

    def _parts_of(self, value: Any, whole: Any) -> Iterable[Any]:
        if self.kind == "none" and value is None:
            return ()
        if self.kind == "dict" and isinstance(value, Mapping) and value.keys() == set(self.keys):
            return [value[key] for key in self.keys]
        if self.kind == "object" and field_names(value) == self.keys:
            return [getattr(value, key) for key in self.keys]
        is_tuple = self.kind in ("tuple", "named") and isinstance(value, tuple)
        if is_tuple and len(value) == len(self.children):
            parts: Iterable[Any] = value
            return parts
        raise self._mismatch(whole)

    def _mismatch(self, value: Any) -> StructureError:
        return StructureError(f"expected {self}, got {_describe(value)}")


LEAF = Structure("leaf")


def flatten(value: Any) -> tuple[Structure, list[Any]]:
    """Return the structure of a nested value and its leaves; dicts keep insertion order."""
    leaves: list[Any] = []
    return _flatten_into(value, leaves), leaves


def tuple_of(children: Iterable[Structure]) -> Structure:
    """Return the structure of a tuple with these parts."""
    return _tuple(tuple(children), "tuple", None)


def map_leaves(function: Callable[..., Any], value: Any) -> Any:
    """Return `value` with ``function`` applied to each leaf."""
    structure, leaves = flatten(value)
    return structure.unflatten([function(leaf) for leaf in leaves])


def parts_like(structure: Structure, value: Any) -> list[Any]:
    """Return the subtree of ``value`` at the position of each leaf of `structure`.

    Raises:
        StructureError: The nesting above the leaves differs.
    """
    if structure.kind == "leaf":
        return [value]
    if structure.kind == "dict":
        if not isinstance(value, Mapping) or value.keys() != set(structure.keys):
            raise StructureError(f"expected the keys {list(structure.keys)}, got {value!r}")
        parts: list[Any] = [value[key] for key in structure.keys]
    elif structure.kind == "object":
        parts = [getattr(value, key, None) for key in structure.keys]
    else:
        parts = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(parts) != len(structure.children):
        raise StructureError(f"expected {len(structure.children)} parts, got {value!r}")
    pairs = zip(structure.children, parts, strict=True)
    return [leaf for child, part in pairs for leaf in parts_like(child, part)]


def require_dense(structure: Structure, verb: str) -> None:
    """Raise `StructureError` for sparse and ragged tensors: their parts must not be stacked."""
    if structure.is_flat_tuple or structure.kind == "leaf":
        return
    found = next((part for part in structure.nested() if part.is_uneven), None)
    if found is not None:
        name = getattr(found.factory, "__name__", "")
        dense = "to_tensor" if "Ragged" in name else "to_dense"
        raise StructureError(
            f"{verb}() cannot put together elements with a {name}. Make it an array in a `map`"
            f" before, `x.{dense}()`, and use `padded_batch` if lengths differ; or batch the"
            " serialized examples and call `rx.io.parse_example` on the batch."
        )


def field_names(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or attrs object; empty for other values."""
    if is_dataclass(value) and not isinstance(value, type):
        return tuple(part.name for part in fields(value) if part.init)
    return tuple(part.name for part in getattr(type(value), "__attrs_attrs__", ()) if part.init)


def to_json(structure: Structure) -> Any:
    """Return a JSON-serializable form of a structure; None if it contains user-defined types."""
    children = [to_json(child) for child in structure.children]
    if structure.factory is not None or any(not isinstance(key, str) for key in structure.keys):
        return None
    if any(child is None for child in children):
        return None
    return {"kind": structure.kind, "children": children, "keys": structure.keys}


def from_json(stored: Any) -> Structure | None:
    """Return the structure that `to_json` described; None for None."""
    return None if stored is None else flatten(_nested(stored))[0]


def _nested(stored: Any) -> Any:
    children = [_nested(child) for child in stored["children"]]
    if stored["kind"] == "dict":
        return dict(zip(stored["keys"], children, strict=True))
    return {"leaf": 0, "none": None, "tuple": tuple(children)}[stored["kind"]]


def _flatten_into(value: Any, leaves: list[Any]) -> Structure:
    if isinstance(value, tuple):
        children = tuple(_flatten_into(part, leaves) for part in value)
        named = hasattr(value, "_fields")
        return _tuple(children, "named" if named else "tuple", type(value) if named else None)
    if isinstance(value, Mapping):
        children = tuple(_flatten_into(part, leaves) for part in value.values())
        return Structure("dict", children, tuple(value), _factory(value), _count(children))
    if value is None:
        return Structure("none", num_leaves=0)
    names = field_names(value)
    if names:
        children = tuple(_flatten_into(getattr(value, name), leaves) for name in names)
        return Structure("object", children, names, type(value), _count(children))
    leaves.append(value)
    return LEAF


def _factory(value: Mapping[Any, Any]) -> Callable[..., Any] | None:
    """Return a function that creates a mapping of the same type from pairs; None for a dict."""
    if isinstance(value, defaultdict):
        return _DefaultDictFactory(value.default_factory)
    return None if type(value) is dict or not isinstance(value, dict) else type(value)


@dataclass(frozen=True)
class _DefaultDictFactory:
    """Creates a defaultdict from pairs; instances with the same default compare equal."""

    default: Callable[[], Any] | None

    def __call__(self, pairs: Iterable[Any] = ()) -> Any:
        return defaultdict(self.default, pairs)


def _tuple(
    children: tuple[Structure, ...], kind: _Kind, factory: Callable[..., Any] | None
) -> Structure:
    is_flat = factory is None and all(child.kind == "leaf" for child in children)
    return Structure(kind, children, (), factory, _count(children), is_flat)


def _count(children: tuple[Structure, ...]) -> int:
    return sum(child.num_leaves for child in children)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        inner = ", ".join(_describe(part) for part in value)
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({inner},)" if len(value) == 1 else f"{name}({inner})"
    names = field_names(value)
    if names:
        inner = ", ".join(f"{name}={_describe(getattr(value, name))}" for name in names)
        return f"{type(value).__name__}({inner})"
    return "None" if value is None else "*"
