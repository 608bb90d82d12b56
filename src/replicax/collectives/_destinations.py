"""Destinations: where the result of a reduction is wanted, and what has no parts to reduce."""

from collections.abc import Sequence
from typing import Any

import jax

from replicax._enums import ReduceOp
from replicax.topology._devices import resolve
from replicax.topology._mesh import Topology
from replicax.values._indexed_slices import IndexedSlices, is_slices, reduce_slices
from replicax.values._per_replica import DistributedValues, InBody, Mirrored, mirrored
from replicax.values._placement import is_array, on_device, replicate

Pairs = Sequence[tuple[Any, Any]]


def plain_reduction(op: ReduceOp, value: Any, size: int) -> Any:
    """The reduction of a value that has no per-replica parts.

    Raises:
        ValueError: For the sum over several replicas, which could mean two things.
    """
    if op is ReduceOp.MEAN or size == 1 or (isinstance(value, int | float) and value == 0):
        return value
    raise ValueError(
        f"{value!r} is one value, not one for each of the {size} replicas, so that its SUM could"
        " mean the value or the value times the replicas. Reduce what `strategy.run` returned, or"
        ' use "MEAN".'
    )


def place(value: Any, destinations: Any) -> Any:
    """``value`` on all of ``destinations``."""
    topology = topology_of(destinations)
    if topology is None:
        return on_device(value, resolve(destinations))
    return mirrored(replicate(value, topology), topology)


def common_topology(pairs: Pairs) -> Topology:
    """Where the values of several pairs live.

    Raises:
        ValueError: If neither a value nor its destination lies on devices.
    """
    for value, destinations in pairs:
        if found := topology_of(value) or topology_of(destinations):
            return found
    raise ValueError(
        f"The replicas hold {pairs[0][0]!r}, which lies on no devices, and the destination names"
        " one device at most. Make the components arrays on their replicas' devices, for example"
        " with `strategy.run`, or give the list of all replicas' devices as destinations."
    )


def topology_of(x: Any) -> Topology | None:
    """Where a variable, a distributed value or a list of devices lives; None for one device."""
    if isinstance(x, DistributedValues):
        found = x.topology
        if found is not None or not all(map(is_array, x.values)):
            return found
        devices = tuple(next(iter(v.devices())) for v in x.values)
        return Topology(devices) if len(set(devices)) == len(devices) else None
    if isinstance(x, str | jax.Device):
        return None
    if is_slices(x):
        return topology_of(x.values)
    if isinstance(x, list | tuple):
        return Topology.local(x)
    if is_array(x):
        return Topology(tuple(x.devices())) if len(x.devices()) == 1 else None
    held: Topology | None = getattr(x, "topology", None)
    return held


def replicas_of(destinations: Any) -> int:
    """How many replicas a destination spans."""
    topology = topology_of(destinations)
    return topology.num_replicas if topology else 1


def deliver(result: Mirrored, destinations: Any) -> Any:
    """The result where it is wanted: on one device, or on all replicas as it is."""
    if isinstance(destinations, str | jax.Device) and not isinstance(result.form, InBody):
        return on_device(result.values[0], resolve(destinations))
    return result


def joined_slices(op: ReduceOp, slices: IndexedSlices, destinations: Any) -> IndexedSlices:
    """The rows of all replicas, where they are wanted."""
    topology, form = common_topology([(slices, destinations)]), slices.values.form
    joined: IndexedSlices = reduce_slices(op, slices, None, topology)
    put = lambda x: place(x, destinations)  # noqa: E731
    if isinstance(form, InBody):
        across = form.across
        put = lambda x: Mirrored.of(InBody(x, topology, across))  # noqa: E731
    return IndexedSlices(put(joined.values), put(joined.indices), joined.dense_shape)


def check_destinations(destinations: Any) -> None:
    """Refuse a missing destination.

    Raises:
        ValueError: If it is None.
    """
    if destinations is None:
        raise ValueError(
            "destinations is None: say where the result is wanted, with a variable, a distributed"
            " value, a device's name or a list of names."
        )


def checked_pairs(pairs: Any) -> Pairs:
    """``pairs``, if they are pairs of a value and its destinations.

    Raises:
        ValueError: If they are not.
    """
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(p, list | tuple) and len(p) == 2 for p in pairs
    ):
        raise ValueError(
            "value_destination_pairs must be a list of (per-replica value, destinations) pairs,"
            f" got {pairs!r}."
        )
    for _, destinations in pairs:
        check_destinations(destinations)
    return pairs
