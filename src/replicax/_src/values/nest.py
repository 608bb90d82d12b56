"""`rx.nest`: functions on nested structures, with TensorFlow's signatures.

Structures are pytrees, for which None and distributed values are leaves. As in TensorFlow, a value
made of several arrays (`IndexedSlices`) is one leaf unless ``expand_composites`` is true.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from replicax._src.values.per_replica import is_distributed
from replicax._src.values.reduce import is_slices
from replicax._src.values.structures import unflatten_as


def _leaf_test(expand_composites: Any) -> Callable[[Any], bool]:
    """Return the test for leaves, with or without those made of several arrays."""
    if expand_composites:
        return lambda x: x is None or is_distributed(x)
    return lambda x: x is None or is_distributed(x) or is_slices(x)


def flatten(structure: Any, expand_composites: Any = False) -> list[Any]:
    """Return the leaves of a structure; those of a dict in the order of its keys.

    Args:
        structure: Any pytree.
        expand_composites: Whether to return the arrays of an `IndexedSlices` one by one.

    Example:
        >>> rx.nest.flatten((1, [2, None]))
        [1, 2, None]
    """
    return jax.tree.leaves(structure, is_leaf=_leaf_test(expand_composites))


def map_structure(func: Callable[..., Any], *structure: Any, **kwargs: Any) -> Any:
    """Apply ``func`` to the leaves of one or more structures; return the same structure.

    Args:
        func: A function of one leaf of each structure.
        *structure: Structures that differ in their leaves only.
        **kwargs: ``check_types=False`` allows a list in place of a tuple, and other types of
            containers; ``expand_composites=True`` applies ``func`` to the arrays of an
            `IndexedSlices` one by one.

    Raises:
        ValueError: If the structures differ.
        TypeError: If containers have different types.

    Example:
        >>> rx.nest.map_structure(lambda a, b: a + b, [1, 2], [10, 20])
        [11, 22]
    """
    if not callable(func):
        raise TypeError(f"map_structure needs a function, got {func!r}.")
    if not structure:
        raise ValueError("map_structure needs at least one structure.")
    unknown = kwargs.keys() - {"check_types", "expand_composites"}
    if unknown:
        raise ValueError(
            f"map_structure takes check_types and expand_composites, not {sorted(unknown)}."
        )
    expand, check = kwargs.get("expand_composites", False), kwargs.get("check_types", True)
    for other in structure[1:]:
        assert_same_structure(structure[0], other, check, expand)
    columns = zip(*(flatten(each, expand) for each in structure), strict=True)
    made = [func(*leaves) for leaves in columns]
    return unflatten_as(structure[0], made, _leaf_test(expand))


def pack_sequence_as(
    structure: Any, flat_sequence: Sequence[Any], expand_composites: Any = False
) -> Any:
    """Return a structure with the leaves replaced by those of ``flat_sequence``.

    Raises:
        ValueError: If there are more or fewer values than leaves.

    Example:
        >>> rx.nest.pack_sequence_as({"a": 0, "b": 0}, [1, 2])
        {'a': 1, 'b': 2}
    """
    return unflatten_as(structure, list(flat_sequence), _leaf_test(expand_composites))


def is_nested(seq: Any) -> bool:
    """Whether a value is a structure rather than a leaf.

    Example:
        >>> rx.nest.is_nested([1]), rx.nest.is_nested(1)
        (True, False)
    """
    leaves, treedef = jax.tree.flatten(seq, is_leaf=_leaf_test(False))
    return not leaves or not jax.tree_util.treedef_is_leaf(treedef)


def assert_same_structure(
    nest1: Any, nest2: Any, check_types: Any = True, expand_composites: Any = False
) -> None:
    """Raise an error if two structures differ in more than their leaves.

    Args:
        nest1: A structure.
        nest2: Another structure.
        check_types: Whether containers must have one type and the same keys. Any two mappings
            with the same keys, and named tuples with the same name and fields, have one type.
        expand_composites: Whether to compare the parts of an `IndexedSlices` too.

    Raises:
        ValueError: If the structures differ.
        TypeError: If containers have different types.

    Example:
        >>> rx.nest.assert_same_structure([1, (2, 3)], [4, (5, 6)])
        >>> rx.nest.assert_same_structure([1, 2], [3])
        Traceback (most recent call last):
        ValueError: The structures differ: [1, 2] has 2 parts, [3] has 1.
    """
    is_leaf = _leaf_test(expand_composites)
    one, other = _children(nest1, is_leaf), _children(nest2, is_leaf)
    if (one is None) != (other is None):
        leaf, nested = (nest1, nest2) if one is None else (nest2, nest1)
        raise ValueError(f"The structures differ: {leaf!r} is a leaf, {nested!r} is not.")
    if one is None or other is None:
        return
    if check_types and not _is_same_kind(nest1, nest2):
        raise TypeError(
            f"The structures differ: {nest1!r} is a {type(nest1).__name__}, {nest2!r} is a"
            f" {type(nest2).__name__}. check_types=False allows that."
        )
    if check_types and isinstance(nest1, Mapping) and set(nest1) != set(nest2):
        raise ValueError(f"The structures differ: they have the keys {[*nest1]} and {[*nest2]}.")
    if len(one) != len(other):
        raise ValueError(
            f"The structures differ: {nest1!r} has {len(one)} parts, {nest2!r} has {len(other)}."
        )
    for a, b in zip(one, other, strict=True):
        assert_same_structure(a, b, check_types, expand_composites)


def _children(value: Any, is_leaf: Callable[[Any], bool]) -> list[Any] | None:
    """Return the parts of a structure, one level down; None for a leaf."""
    if is_leaf(value):
        return None
    parts, treedef = jax.tree.flatten(value, is_leaf=lambda x: x is not value)
    return None if jax.tree_util.treedef_is_leaf(treedef) and parts else parts


def _is_same_kind(one: Any, other: Any) -> bool:
    """Whether two containers have one type, as TensorFlow compares types."""
    if type(one) is type(other):
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return True
    names = [(type(x).__name__, getattr(x, "_fields", None)) for x in (one, other)]
    return names[0] == names[1] and names[0][1] is not None
