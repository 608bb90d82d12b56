"""Functions on nested structures, like `jax.tree`, under TensorFlow's names.

Example:
    >>> rx.nest.flatten({"b": 2, "a": [1]})
    [1, 2]
"""

from replicax._src.values.nest import (
    assert_same_structure,
    flatten,
    is_nested,
    map_structure,
    pack_sequence_as,
)

__all__ = ["assert_same_structure", "flatten", "is_nested", "map_structure", "pack_sequence_as"]

__dir__ = __all__.copy
