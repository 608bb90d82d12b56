"""Structures of values; None and distributed values are leaves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from replicax.values._per_replica import is_distributed


def _is_leaf(x: Any) -> bool:
    return x is None or is_distributed(x)


def flatten(structure: Any) -> list[Any]:
    """The leaves of a structure.

    Example:
        >>> rx.nest.flatten((1, [2, None]))
        [1, 2, None]
    """
    return jax.tree.leaves(structure, is_leaf=_is_leaf)


def map_structure(func: Callable[..., Any], *structures: Any) -> Any:
    """``func`` of the leaves of one or more structures, in their structure.

    Example:
        >>> rx.nest.map_structure(lambda a, b: a + b, [1, 2], [10, 20])
        [11, 22]
    """
    return jax.tree.map(func, *structures, is_leaf=_is_leaf)


def pack_sequence_as(structure: Any, flat_sequence: Sequence[Any]) -> Any:
    """Leaves put into a structure.

    Example:
        >>> rx.nest.pack_sequence_as({"a": 0, "b": 0}, [1, 2])
        {'a': 1, 'b': 2}
    """
    return jax.tree.unflatten(jax.tree.structure(structure, is_leaf=_is_leaf), flat_sequence)


def is_nested(structure: Any) -> bool:
    """Whether a value is a structure rather than a leaf.

    Example:
        >>> rx.nest.is_nested([1]), rx.nest.is_nested(1)
        (True, False)
    """
    leaves, treedef = jax.tree.flatten(structure, is_leaf=_is_leaf)
    return not leaves or not jax.tree_util.treedef_is_leaf(treedef)
