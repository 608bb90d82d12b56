"""Let Equinox's stateful layers and its deserialisation take values of replicas."""

import functools
import sys
from typing import Any

import jax

from replicax._src.context.current import current
from replicax._src.integrations.registry import Integration
from replicax._src.values.per_replica import MirroredResult


def attach() -> Integration:
    """Wrap `eqx.nn.State.set` and `eqx.tree_deserialise_leaves`."""
    equinox: Any = sys.modules["equinox"]
    equinox.nn.State.set = _on_one_mesh(equinox.nn.State.set)
    equinox.tree_deserialise_leaves = _like_arrays(equinox.tree_deserialise_leaves)
    return Integration()


def _like_arrays(original: Any) -> Any:
    @functools.wraps(original)
    def deserialise(path_or_file: Any, like: Any, *args: Any, **kwargs: Any) -> Any:
        # Equinox reads arrays, and requires that the leaves of `like` are of exactly that type.
        # Parameters that a step returned are arrays of a subclass.
        return original(path_or_file, jax.tree.map(_to_array, like), *args, **kwargs)

    return deserialise


def _to_array(leaf: Any) -> Any:
    return leaf.component if isinstance(leaf, MirroredResult) else leaf


def _on_one_mesh(original: Any) -> Any:
    @functools.wraps(original)
    def set_(self: Any, item: Any, value: Any) -> Any:
        # `State.set` compares the avals of the old and the new value, with their shardings. In a
        # replica arguments are on the mesh of the replicas, and constants, such as the
        # `jnp.array(False)` of BatchNorm, on none.
        if current().replica is None or not jax.sharding.get_abstract_mesh().manual_axes:
            return original(self, item, value)
        if any(map(_is_on_no_mesh, jax.tree.leaves(self))):
            # The copy is invalidated in place of `self`, which is only a safety guard.
            self = jax.tree.map(_to_mesh, self)
        return original(self, item, jax.tree.map(_to_mesh, value))

    return set_


def _is_on_no_mesh(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).sharding.mesh.empty


def _to_mesh(leaf: Any) -> Any:
    if not _is_on_no_mesh(leaf):
        return leaf
    return jax.sharding.reshard(leaf, jax.sharding.PartitionSpec())
