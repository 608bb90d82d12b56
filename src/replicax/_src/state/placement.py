"""`Placed`: the devices and layout of a variable or array, found without reading its value."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from replicax._src.base.rendering import Sheet, show_bytes
from replicax._src.state.cell import Cell
from replicax._src.state.declaration import Awaited, is_planned
from replicax._src.topology.devices import shown_devices
from replicax._src.values.placement import WHOLE


@dataclass(frozen=True)
class Placed:
    """The devices and layout of an array or a variable, found without reading its value.

    Attributes:
        name: Its name.
        shape: Its shape, as programs see it.
        dtype: Its dtype.
        layout: A description of its layout on the devices.
        parts: For each device, its range along the sharded axis, as two fractions of that axis,
            and the number of bytes that it stores.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    parts: dict[jax.Device, tuple[float, float, int]]

    @classmethod
    def of_cell(cls, cell: Cell, name: str) -> Placed:
        """Return the placement of a variable."""
        topology, value = cell.topology, cell.value
        if isinstance(value, Awaited):
            value = value.value
        arrays = value if isinstance(value, tuple) else (value,)
        parts: dict[jax.Device, tuple[float, float, int]] = {}
        for array in {id(x): x for x in arrays}.values():  # fresh copies may share one array
            where = cell.sharding if is_planned(array) and topology else array.sharding
            for device, part in _parts(tuple(array.shape), array.dtype, where).items():
                before = parts.get(device, (0.0, 0.0, 0))[-1]
                parts[device] = (*part[:2], before + part[-1])
        return cls(name, cell.shape, str(cell.dtype), _describe_layout(cell, len(parts)), parts)

    @classmethod
    def of_array(cls, array: jax.Array, name: str) -> Placed:
        """Return the placement of an array."""
        parts = _parts(tuple(array.shape), array.dtype, array.sharding)
        count, spec = len(parts), getattr(array.sharding, "spec", None)
        if count == 1:
            layout = "one device"
        elif array.sharding.is_fully_replicated:
            layout = f"the same on {count} devices"
        else:
            layout = f"cut, {spec}" if spec is not None else f"cut over {count} devices"
        return cls(name, tuple(array.shape), str(array.dtype), layout, parts)

    @property
    def most_bytes(self) -> int:
        """The number of bytes on the device that stores the most of it."""
        return max((size for _, _, size in self.parts.values()), default=0)

    def sheet(self, title: str) -> Sheet:
        """Return the placement as a table for display."""
        facts = (
            ("name", self.name),
            ("shape", str(self.shape)),
            ("dtype", self.dtype),
            ("layout", self.layout),
            ("devices", shown_devices(self.parts)),
            ("bytes per device", show_bytes(self.most_bytes)),
        )
        return Sheet(title, facts)


def _parts(shape: tuple[int, ...], dtype: Any, sharding: Any) -> dict[Any, Any]:
    """Return the range and the bytes of the shard on each device."""
    size = prod(sharding.shard_shape(shape)) * dtype.itemsize
    found = {}
    for device, index in sharding.devices_indices_map(shape).items():
        begin, end = 0.0, 1.0
        for cut, length in zip(index, shape, strict=True):
            start, stop, _ = cut.indices(length)
            if (start, stop) != (0, length):
                begin, end = start / length, stop / length
                break
        found[device] = (begin, end, size)
    return found


def _describe_layout(cell: Cell, count: int) -> str:
    """Return a description of the layout of a variable on `count` devices."""
    topology = cell.topology
    if topology is None or topology.num_replicas * topology.cores == 1:
        return "one device"
    if cell.per_replica:
        return f"a value of its own on each of {topology.num_replicas} replicas"
    if isinstance(cell.value, tuple):
        return f"written copy by copy on {len(cell.value)} replicas"
    if cell.sharded:
        parts = f"in {topology.shard_count} parts, one on each replica"
        if topology.shard_count < topology.num_replicas:
            parts += f" of a group of {topology.shard_count}"
        cut = f", cut over {topology.cores} logical devices: {cell.spec}"
        return parts if cell.spec == WHOLE else parts + cut
    if cell.spec != WHOLE:
        return f"mirrored, each copy cut over {topology.cores} logical devices: {cell.spec}"
    return f"mirrored on {count} devices"
