"""Partitions: into how many parts an array is cut along each axis -> a spec of logical axes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from replicax._errors import PlacementError
from replicax.topology._mesh import Topology, prime_factors


def partition_spec(
    topology: Topology,
    partition_dimensions: Sequence[int],
    shape: Sequence[int],
    *,
    what: str,
    may_repeat: bool = False,
) -> PartitionSpec:
    """How an array is cut over the logical devices of a replica.

    Args:
        topology: The replicas and their logical devices.
        partition_dimensions: Into how many parts it is cut along each axis.
        shape: Its shape.
        what: What it is, for messages.
        may_repeat: Whether fewer parts than logical devices are fine, each then on several.

    Raises:
        PlacementError: Checked in TensorFlow's order: not one number for each axis; an axis that
            cannot be cut into so many equal parts; more or fewer parts than logical devices.

    Example:
        >>> from replicax.topology._mesh import Topology
        >>> from replicax.topology._partition import partition_spec
        >>> eight = Topology(tuple(jax.devices()), cores=8)
        >>> partition_spec(eight, [1, 2, 4, 1], (1, 8, 8, 3), what="an image")
        P(None, 'l0', ('l1', 'l2'))
    """
    parts = _numbers(partition_dimensions)
    if len(parts) != len(shape):
        raise PlacementError(
            f"partition_dimensions {parts} has {len(parts)} numbers, but {what} has the shape"
            f" {tuple(shape)}: it needs {len(shape)}, one for each axis, with 1 for an axis that is"
            " not cut."
        )
    for axis, (size, count) in enumerate(zip(shape, parts, strict=True)):
        if size % count:
            raise PlacementError(
                f"partition_dimensions {parts} cuts axis {axis} of {what}, of shape"
                f" {tuple(shape)}, into {count} parts, and {size} is not divisible by {count}."
                " Cut another axis, or pad this one."
            )
    total, cores = math.prod(parts), topology.cores
    if total != cores and not (may_repeat and cores % total == 0):
        wanted = "a divisor of" if may_repeat else "equal to"
        raise PlacementError(
            f"partition_dimensions {parts} makes {total} parts; their number must be {wanted} the"
            f" {cores} logical device(s) of a replica. The device assignment of the strategy says"
            " how many there are: rx.tpu.experimental.DeviceAssignment.build(topology,"
            " computation_shape=...)."
        )
    return _spec(topology, parts)


def _numbers(partition_dimensions: Sequence[int]) -> list[int]:
    try:
        numbers: list[Any] = list(partition_dimensions)
    except TypeError:
        numbers = [None]
    if not all(_is_positive(n) for n in numbers):
        raise PlacementError(
            f"partition_dimensions is {partition_dimensions!r}; it must be a list of positive whole"
            " numbers, one for each axis, such as [1, 2, 4, 1]."
        )
    return [int(n) for n in numbers]


def _is_positive(n: object) -> bool:
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and int(n) > 0


def _spec(topology: Topology, parts: Sequence[int]) -> PartitionSpec:
    free = dict(topology.logical_axes)
    entries: list[str | tuple[str, ...] | None] = []
    for count in parts:
        chosen = tuple(_take_axis(free, prime) for prime in prime_factors(count))
        entries.append(chosen if len(chosen) > 1 else chosen[0] if chosen else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _take_axis(free: dict[str, int], size: int) -> str:
    name = next(axis for axis, s in free.items() if s == size)
    del free[name]
    return name
