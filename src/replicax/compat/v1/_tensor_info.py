"""TensorInfo: the name under which the pages speak of values made of several arrays."""

from typing import Any

import jax


class _HasArrays(type):
    def __instancecheck__(cls, value: Any) -> bool:
        leaves, treedef = jax.tree.flatten(value)
        return not jax.tree_util.treedef_is_leaf(treedef) and any(
            isinstance(x, jax.Array) for x in leaves
        )


class TensorInfo:
    """What a value is made of.

    Example:
        >>> composite = rx.compat.v1.TensorInfo.CompositeTensor
        >>> isinstance({"a": jnp.ones(2)}, composite), isinstance(jnp.ones(2), composite)
        (True, False)
    """

    class CompositeTensor(metaclass=_HasArrays):
        """A value made of several arrays: any registered pytree, sparse arrays included.

        `strategy.run` takes them apart and puts them together as it does with dicts and tuples.
        """
