"""Across: how code of one replica reaches the others.

Code inside a compiled replica function reaches them over the mesh. A replica that is compiled by
itself, because its shapes differ from the others', meets them; see ``collectives._eager``.
"""

from abc import abstractmethod
from typing import Any, Protocol

import jax

from replicax.topology._mesh import REPLICA_AXIS


class Across(Protocol):
    """The collectives that everything else is made of."""

    @abstractmethod
    def index(self) -> Any:
        """This replica's number."""

    @abstractmethod
    def sum(self, xs: list[Any]) -> list[Any]:
        """The sum over all replicas of each array."""

    @abstractmethod
    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """All replicas' arrays, joined along ``axis``."""


class MeshAxis:
    """The replicas are one program, and an axis of its mesh."""

    def index(self) -> Any:
        """Known when the program runs."""
        return jax.lax.axis_index(REPLICA_AXIS)

    def sum(self, xs: list[Any]) -> list[Any]:
        """One all-reduce."""
        sums: list[Any] = jax.lax.psum(xs, REPLICA_AXIS)
        return sums

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """One all-gather."""
        joined: jax.Array = jax.lax.all_gather(x, REPLICA_AXIS, axis=axis, tiled=True)
        return joined


MESH_AXIS = MeshAxis()
