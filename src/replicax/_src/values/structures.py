"""Structures of distributed values: dataclasses, per-replica results and specs.

- Dataclasses that contain arrays are treated as pytrees even if they are not registered with JAX.
- `regroup` combines the results of all replicas into one structure, `select` extracts one
  replica's. A leaf on which all replicas agree as plain Python (the same object, or an equal
  number, string or None) stays that value; every other leaf becomes a `PerReplica`.
- `PerReplicaSpec` describes the components of a per-replica value.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import (
    Distributed,
    Stacked,
    is_distributed,
    is_opaque,
    is_ragged,
    is_result_leaf,
    num_components,
    pieces,
)
from replicax._src.values.placement import check_count, is_array


@dataclasses.dataclass(frozen=True)
class _Record:
    """A dataclass instance as a registered pytree node."""

    kind: type
    fields: tuple[Any, ...]


jax.tree_util.register_pytree_node(
    _Record, lambda r: (r.fields, r.kind), lambda kind, fields: _Record(kind, tuple(fields))
)


_SORTED = (dict, defaultdict)  # JAX sorts their items by key when flattening


def dict_orders(tree: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[Any, ...]]:
    """Return the keys of each non-empty dict in `tree`, in order; [] if all are sorted."""
    found: list[tuple[Any, ...]] = []

    def look(x: Any) -> bool:
        if is_leaf(x):
            return True
        if type(x) in _SORTED and x:
            found.append(tuple(x))
        return False

    jax.tree.structure(tree, is_leaf=look)
    return found if any(list(keys) != sorted(keys) for keys in found) else []


def in_order(tree: Any, orders: Sequence[tuple[Any, ...]], leaves: Sequence[Any]) -> Any:
    """Restore the insertion order of the dicts in a tree that JAX has just unflattened.

    Args:
        tree: The tree; its dicts are reordered in place.
        orders: The result of `dict_orders` for the original tree.
        leaves: The leaves of `tree`.
    """
    if not orders:
        return tree
    rest, known = iter(orders), set(map(id, leaves))

    def look(x: Any) -> bool:
        if id(x) in known:
            return True
        if type(x) in _SORTED and x:
            items = {key: x[key] for key in next(rest)}
            x.clear()
            x.update(items)
        return False

    jax.tree.structure(tree, is_leaf=look)
    return tree


def unflatten_as(tree: Any, leaves: Sequence[Any], is_leaf: Callable[[Any], bool]) -> Any:
    """Unflatten `leaves` into the structure of `tree`, keeping the order of its dicts."""
    made = jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_leaf), leaves)
    return in_order(made, dict_orders(tree, is_leaf), leaves)


def map_in_order(fn: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """Apply `fn` to each leaf, as `jax.tree.map`, keeping the order of the dicts."""
    return unflatten_as(tree, list(map(fn, jax.tree.leaves(tree, is_leaf=is_leaf))), is_leaf)


def expand_dataclasses(tree: Any) -> Any:
    """Return `tree` with dataclasses that contain arrays replaced by pytree nodes."""
    return map_in_order(_open, tree, is_result_leaf)


def rebuild_dataclasses(tree: Any) -> Any:
    """Reverse `expand_dataclasses`: rebuild the dataclasses from the current leaves."""
    return map_in_order(
        lambda x: _close(x) if isinstance(x, _Record) else x,
        tree,
        lambda x: isinstance(x, _Record) or is_result_leaf(x),
    )


def has_dataclasses(tree: Any) -> bool:
    """Whether a tree returned by `expand_dataclasses` contains a dataclass."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, _Record) or is_result_leaf(x))
    return any(isinstance(x, _Record) for x in leaves)


def record_type(kind: type, data: Any) -> Any:
    """Return the class that a pytree node represents; for `_Record` the dataclass."""
    return data if kind is _Record else kind


def _open(x: Any) -> Any:
    if not dataclasses.is_dataclass(x) or isinstance(x, type) or not _holds_arrays(x):
        return x
    return _Record(type(x), tuple(expand_dataclasses(value) for value in _fields(x).values()))


def _close(record: _Record) -> Any:
    made: Any = object.__new__(record.kind)
    for field, value in zip(dataclasses.fields(record.kind), record.fields, strict=True):
        object.__setattr__(made, field.name, rebuild_dataclasses(value))
    return made


def _fields(x: Any) -> dict[str, Any]:
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}


def _holds_arrays(x: Any) -> bool:
    """Whether a dataclass contains arrays, at any depth."""
    leaves = jax.tree.leaves(_fields(x), is_leaf=is_opaque)
    return any(
        is_array(v)
        or is_distributed(v)
        or (dataclasses.is_dataclass(v) and not isinstance(v, type) and _holds_arrays(v))
        for v in leaves
    )


_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.generic)


def regroup(results: Sequence[Any], topology: Topology) -> Any:
    """Combine each replica's result into one structure with per-replica leaves.

    Raises:
        ValueError: If the replicas returned different structures.
    """
    trees = [expand_dataclasses(r) for r in results]
    leaves, treedefs = zip(
        *(jax.tree.flatten(t, is_leaf=is_result_leaf) for t in trees), strict=True
    )
    for i, treedef in enumerate(treedefs[1:], 1):
        if treedef != treedefs[0]:
            raise ValueError(
                "The replicas returned different structures, which cannot be put together:"
                f" replica 0 {treedefs[0]}, replica {i} {treedef}."
            )
    merged = [_merge(column, topology) for column in zip(*leaves, strict=True)]
    made = jax.tree.unflatten(treedefs[0], merged)
    return rebuild_dataclasses(in_order(made, dict_orders(trees[0], is_result_leaf), merged))


def select(value: Any, replica: int) -> Any:
    """Return the structure with each distributed value replaced by one replica's component."""
    return map_in_order(lambda v: v.values[replica] if is_distributed(v) else v, value, is_opaque)


def check_counts(value: Any, topology: Topology) -> bool:
    """Check that each distributed value in a structure has one component per replica.

    Returns:
        Whether there is a distributed value in it.

    Raises:
        ValueError: If the number of components is wrong.
    """
    found = False
    for v in jax.tree.leaves(value, is_leaf=is_opaque):
        if is_distributed(v):
            check_count(num_components(v), topology)
            found = True
    return found


def has_distributed(value: Any) -> bool:
    """Whether a structure contains a distributed value."""
    return any(map(is_distributed, jax.tree.leaves(value, is_leaf=is_opaque)))


def replicas_with_rows(value: Any, topology: Topology) -> list[bool]:
    """Return, for each local replica, whether it has rows in a batch that is short for some."""
    found = [True] * topology.num_replicas
    for v in jax.tree.leaves(value, is_leaf=is_opaque):
        if is_ragged(v):
            rows = [bool(not shape or shape[0]) for shape, _ in v.form.all_specs]
            if any(rows):
                found = [a and b for a, b in zip(found, rows, strict=True)]
    return [found[number] for number in topology.local_replicas]


def _merge(column: Sequence[Any], topology: Topology) -> Any:
    """Combine one leaf of all replicas."""
    head = column[0]
    if isinstance(head, jax.Array | np.ndarray):
        return pieces(column, topology)
    if all(x is head for x in column):
        return head
    if isinstance(head, _PLAIN) and all(is_same_scalar(x, head) for x in column):
        return head
    return pieces(column, topology)


def is_same_scalar(one: Any, other: Any) -> bool:
    """Whether two Python values have one type and value; 0.0 is not -0.0."""
    if type(one) is not type(other) or one != other:
        return False
    if not isinstance(one, float | complex | np.inexact):
        return True
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


class PerReplicaSpec(TypeSpec):
    """The specs of a per-replica value's components, for `input_signature`.

    Example:
        >>> spec = rx.distribute.PerReplicaSpec(rx.TensorSpec([None]), rx.TensorSpec([None]))
        >>> len(spec.value_specs)
        2
    """

    def __init__(self, *value_specs: Any) -> None:
        self.value_specs = value_specs

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Whether a per-replica value, or its spec, has components compatible with these specs."""
        if isinstance(spec_or_value, PerReplicaSpec):
            parts = spec_or_value.value_specs
        elif isinstance(spec_or_value, Distributed):
            parts = spec_or_value.values
        else:
            return False
        return len(parts) == len(self.value_specs) and all(
            mine.is_compatible_with(part)
            for mine, part in zip(self.value_specs, parts, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.value_specs == other.value_specs

    def __hash__(self) -> int:
        return hash(self.value_specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec{self.value_specs!r}"


def component_specs(value: Distributed) -> tuple[Any, ...]:
    """Return the spec of each component; they differ if the arrays differ in shape."""
    form = value.form
    if isinstance(form, Stacked):
        spec = TensorSpec(form.array.shape[1:], form.array.dtype)
        return (spec,) * len(form.topology.local_replicas)
    return tuple(
        TensorSpec(v.shape, v.dtype) if is_array(v) or isinstance(v, np.ndarray) else v
        for v in value.values
    )


# How `rx.data.Optional` describes such values.
_distributed: Any = Distributed
_distributed.__rx_spec__ = lambda value: PerReplicaSpec(*component_specs(value))
