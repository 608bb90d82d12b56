"""A structure of arrays -> the same structure of variables."""

from typing import Any

import jax

from replicax.variables._variable import Variable


def variables(tree: Any, name: str | None = None, **declared: Any) -> Any:
    """A variable for each array of a structure, named by its path.

    Args:
        tree: Dictionaries, lists, tuples and other pytrees of arrays and numbers. A list is a
            structure here, also a list of numbers.
        name: What the paths begin with.
        **declared: What `rx.Variable` takes, the same for all: ``trainable``, ``dtype``,
            ``synchronization``, ``aggregation``.

    Returns:
        The same structure, of variables.

    Raises:
        ValueError: If something in it is no array.

    Example:
        >>> model = rx.variables({"dense": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)}})
        >>> model["dense"]["kernel"].name
        'dense/kernel:0'
        >>> [v.shape for v in jax.tree.leaves(model)]
        [(3,), (2, 3)]
    """

    def made(path: Any, leaf: Any) -> Variable:
        own = jax.tree_util.keystr(path, simple=True, separator="/")
        variable: Variable = Variable(
            leaf, name="/".join(part for part in (name, own) if part) or None, **declared
        )
        return variable

    return jax.tree_util.tree_map_with_path(made, tree)
