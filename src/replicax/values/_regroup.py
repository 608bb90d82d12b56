"""The results of the replicas as one structure, and back.

Each leaf that all replicas agree on as plain Python (the same object, or an equal number, text or
None) stays one bare value; every other leaf becomes a `PerReplica`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from replicax.topology._mesh import Topology
from replicax.values._per_replica import (
    is_distributed,
    is_opaque,
    is_ragged,
    num_components,
    pieces,
)
from replicax.values._placement import check_count
from replicax.values._records import closed, opened

_PLAIN = (int, float, complex, bool, str, bytes, type(None), np.generic)


def regroup(results: Sequence[Any], topology: Topology) -> Any:
    """One structure whose leaves hold each replica's leaf.

    Raises:
        ValueError: If the replicas returned different structures.
    """
    leaves, treedefs = zip(
        *(
            jax.tree.flatten(opened(r), is_leaf=lambda x: x is None or is_opaque(x))
            for r in results
        ),
        strict=True,
    )
    for i, treedef in enumerate(treedefs[1:], 1):
        if treedef != treedefs[0]:
            raise ValueError(
                "The replicas returned different structures, which cannot be put together:"
                f" replica 0 {treedefs[0]}, replica {i} {treedef}."
            )
    merged = [_merge(column, topology) for column in zip(*leaves, strict=True)]
    return closed(jax.tree.unflatten(treedefs[0], merged))


def select(value: Any, replica: int) -> Any:
    """What replica number ``replica`` sees of a structure with distributed values in it."""
    return jax.tree.map(
        lambda v: v.values[replica] if is_distributed(v) else v, value, is_leaf=is_opaque
    )


def check_counts(value: Any, topology: Topology) -> bool:
    """Refuse distributed values of another number of replicas in a structure.

    Returns:
        Whether there is a distributed value in it.

    Raises:
        ValueError: If one does not have a component for each replica.
    """
    found = False
    for v in jax.tree.leaves(value, is_leaf=is_opaque):
        if is_distributed(v):
            check_count(num_components(v), topology)
            found = True
    return found


def has_distributed(value: Any) -> bool:
    """Whether a structure has a distributed value in it."""
    return any(map(is_distributed, jax.tree.leaves(value, is_leaf=is_opaque)))


def who_has_rows(value: Any, topology: Topology) -> list[bool]:
    """Which of this process's replicas were given rows of a batch that is short for some."""
    found = [True] * topology.num_replicas
    for v in jax.tree.leaves(value, is_leaf=is_opaque):
        if is_ragged(v):
            rows = [bool(not shape or shape[0]) for shape, _ in v.form.everyones]
            if any(rows):
                found = [a and b for a, b in zip(found, rows, strict=True)]
    return [found[number] for number in topology.own]


def _merge(column: Sequence[Any], topology: Topology) -> Any:
    head = column[0]
    if isinstance(head, jax.Array | np.ndarray):
        return pieces(column, topology)
    if all(x is head for x in column):
        return head
    if isinstance(head, _PLAIN) and all(type(x) is type(head) and x == head for x in column):
        return head
    return pieces(column, topology)
