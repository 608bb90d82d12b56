"""Across: how code of one replica reaches the others.

Code inside a compiled replica function reaches them over the mesh. A replica that is compiled by
itself, because its shapes differ from the others', meets them; see ``collectives._eager``.
"""

from abc import abstractmethod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer

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
        return sum_over_mesh(xs)

    def gather(self, x: jax.Array, axis: int) -> jax.Array:
        """One all-gather."""
        if x.size == 0:  # XLA has no all-gather of nothing
            rows = x.shape[axis] * jax.lax.axis_size(REPLICA_AXIS)
            return jnp.zeros((*x.shape[:axis], rows, *x.shape[axis + 1 :]), x.dtype)
        joined: jax.Array = jax.lax.all_gather(x, REPLICA_AXIS, axis=axis, tiled=True)
        return joined


MESH_AXIS = MeshAxis()


def sum_over_mesh(xs: list[Any], groups: list[list[int]] | None = None) -> list[Any]:
    """The sum over all replicas of each array, inside compiled code.

    Args:
        xs: Arrays; of Python's numbers, which are the same everywhere, the sum is known already.
        groups: The replicas that add up among themselves; all by default.
    """
    seen = [_seen(x) for x in xs]
    sums: list[Any] = jax.lax.psum(seen, REPLICA_AXIS, axis_index_groups=groups)
    return sums


def widened(x: Any) -> Any:
    """``x``, with narrow integers as wide ones: the sum that becomes a mean must not wrap."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4
    return x.astype(jnp.int32) if is_narrow else x


def _seen(x: Any) -> Any:
    # An array that the function closed over is a constant of this process's program, and another
    # one in other processes'. JAX would multiply it by the number of replicas.
    is_constant = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return jax.lax.optimization_barrier(x) if is_constant and jax.process_count() > 1 else x
