"""Records: dataclasses that hold arrays, taken for containers also if JAX was not told of them."""

import dataclasses
from typing import Any

import jax

from replicax.values._per_replica import is_distributed, is_opaque
from replicax.values._placement import is_array


@dataclasses.dataclass(frozen=True)
class _Record:
    """A dataclass's fields, as a container that JAX knows."""

    kind: type
    fields: tuple[Any, ...]


jax.tree_util.register_pytree_node(
    _Record, lambda r: (r.fields, r.kind), lambda kind, fields: _Record(kind, tuple(fields))
)


def opened(tree: Any) -> Any:
    """``tree`` with the dataclasses in it that hold arrays as containers; see `closed`."""
    return jax.tree.map(_open, tree, is_leaf=_is_leaf)


def closed(tree: Any) -> Any:
    """The reverse of `opened`: the dataclasses again, with what has taken their fields' places."""
    return jax.tree.map(
        lambda x: _close(x) if isinstance(x, _Record) else x,
        tree,
        is_leaf=lambda x: isinstance(x, _Record) or _is_leaf(x),
    )


def has_records(tree: Any) -> bool:
    """Whether an opened tree has a dataclass in it."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, _Record) or _is_leaf(x))
    return any(isinstance(x, _Record) for x in leaves)


def _is_leaf(x: Any) -> bool:
    return x is None or is_opaque(x)


def _open(x: Any) -> Any:
    if not dataclasses.is_dataclass(x) or isinstance(x, type) or not _holds_arrays(x):
        return x
    return _Record(type(x), tuple(opened(value) for value in _fields(x).values()))


def _close(record: _Record) -> Any:
    made: Any = object.__new__(record.kind)
    for field, value in zip(dataclasses.fields(record.kind), record.fields, strict=True):
        object.__setattr__(made, field.name, closed(value))
    return made


def _fields(x: Any) -> dict[str, Any]:
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}


def _holds_arrays(x: Any) -> bool:
    leaves = jax.tree.leaves(_fields(x), is_leaf=is_opaque)
    return any(
        is_array(v)
        or is_distributed(v)
        or (dataclasses.is_dataclass(v) and not isinstance(v, type) and _holds_arrays(v))
        for v in leaves
    )
