"""Aim: trace a program for other devices than those it runs on.

A strategy and the variables of its scope ask here which topology they are on. While a program is
traced for a slice that this machine does not have, the answer is that slice: replicas in another
number, on a mesh without devices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh

from replicax.topology._mesh import REPLICA_AXIS, Topology, lines_of

_T = TypeVar("_T", Topology, Topology | None)

_target: ContextVar[Topology | None] = ContextVar("replicax_target", default=None)


@dataclass(frozen=True)
class PlannedTopology(Topology):
    """Replicas that exist on paper: enough to trace and lower a program, not to run it.

    Attributes:
        shape: The dimensions of the slice that the devices fill, and the devices of a chip.
    """

    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, num_devices: int, cores: int, shape: tuple[int, ...] = ()) -> "PlannedTopology":
        """``num_devices`` in replicas of ``cores`` each."""
        return cls((jax.local_devices()[0],) * num_devices, cores, shape=shape)

    @cached_property
    def lines(self) -> tuple[int, ...]:
        """The dimensions of the slice, if the replicas fill it."""
        return lines_of(self.shape, self)

    @cached_property
    def mesh(self) -> Any:
        """The axes and their sizes, without devices."""
        sizes = (self.num_replicas, *self.logical_axes.values())
        return AbstractMesh(sizes, (REPLICA_AXIS, *self.logical_axes))


def aimed(topology: _T) -> _T:
    """The topology to compute on where ``topology`` is the one at hand."""
    target: Any = _target.get()
    if target is None or topology is None:
        return topology
    other: _T = target
    return other


@contextmanager
def aimed_at(target: Topology) -> Iterator[None]:
    """Trace for ``target`` until the block ends."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)
