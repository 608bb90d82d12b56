"""Pulls: elements of a distributed iterator as inputs of a compiled function.

While a function is traced, ``next(iterator)`` gives stand-ins for the element that is coming, which
is looked at and not taken. Each call of the compiled function then takes as many elements as it was
traced with, and hands them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import jax

from replicax.function._signals import Unfilled
from replicax.topology._mesh import Topology
from replicax.values._per_replica import PerReplica, Stacked, is_distributed
from replicax.values._placement import is_array
from replicax.variables._cell import Cell

if TYPE_CHECKING:
    from replicax.input._distributed import DistributedIterator
    from replicax.variables._levels import TraceLevel


def pulled(iterator: DistributedIterator, level: TraceLevel) -> Any:
    """Stand-ins for the next element, in a function that is being traced."""
    ahead = level.pulls.get(iterator, 0)
    try:
        element = iterator.peek(ahead)
    except StopIteration:
        raise Unfilled from None
    level.pulls[iterator] = ahead + 1
    leaves, treedef = jax.tree.flatten(element, is_leaf=is_distributed)
    return jax.tree.unflatten(
        treedef, [_stand_in(x, iterator, ahead, i, level) for i, x in enumerate(leaves)]
    )


def _stand_in(x: Any, iterator: Any, ahead: int, leaf: int, level: TraceLevel) -> Any:
    if is_array(x):
        return level.read(Pull(iterator, ahead, leaf, x, None))
    if isinstance(x, PerReplica) and isinstance(x.form, Stacked):
        return level.read(Pull(iterator, ahead, leaf, x.form.array, x.form.topology))
    raise Unfilled


@final
class Pull(Cell):
    """One leaf of one coming element; a cell that is filled anew for every call."""

    __slots__ = ("_ahead", "_iterator", "_leaf")

    transient = True

    def __init__(
        self, iterator: Any, ahead: int, leaf: int, like: jax.Array, topology: Topology | None
    ) -> None:
        self.shape = tuple(like.shape if topology is None else like.shape[1:])
        self.dtype = like.dtype
        self.topology = topology
        self.per_replica = topology is not None
        self.name = f"element {ahead} of an iterator"
        self.owned = False
        self.guards = None
        self._iterator, self._ahead, self._leaf = iterator, ahead, leaf

    def array(self) -> jax.Array:
        """The leaf of the element that is coming now.

        Raises:
            Unfilled: If there is none, or it has another shape.
        """
        if not self._iterator.reaches(self._ahead + 1):
            raise Unfilled
        leaves = jax.tree.leaves(self._iterator.peek(self._ahead), is_leaf=is_distributed)
        x: Any = leaves[self._leaf]
        array: Any = (
            x.form.array if isinstance(x, PerReplica) and isinstance(x.form, Stacked) else x
        )
        rows = () if self.topology is None else (self.topology.num_replicas,)
        if not is_array(array) or tuple(array.shape) != (*rows, *self.shape):
            raise Unfilled
        taken: jax.Array = array
        return taken
