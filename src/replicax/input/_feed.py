"""Feed: host step -> per-replica values on the devices."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._jax_private import uncommitted
from replicax.input._split import HostStep
from replicax.topology._mesh import Topology
from replicax.values._per_replica import pieces, stacked
from replicax.values._placement import on_device


@dataclass(frozen=True)
class Feed:
    """Where the elements of a distributed dataset go.

    Attributes:
        topology: The devices of the replicas.
        wraps: Whether elements are per-replica values; with one replica they are plain.
        fetch: Whether they are put on the replicas' devices, or stay on the host's.
    """

    topology: Topology
    wraps: bool
    fetch: bool = True

    def __call__(self, step: HostStep) -> Any:
        """The step on the devices; strings stay on the host, as devices have none."""
        if not self.wraps:
            (part,) = step.pieces(1)
            return jax.tree.map(lambda x: self._single(x), part)
        if step.parts or not self.fetch:
            columns = step.pieces(len(self.topology.own))
            return jax.tree.map(lambda *xs: self._uneven(xs), *columns)
        leaves, treedef = jax.tree.flatten(step.even)
        numeric = [i for i, x in enumerate(leaves) if _is_numeric(x)]
        put = self._put([_own(leaves[i]) for i in numeric])
        values: list[Any] = [pieces(list(x), self.topology) for x in leaves]
        for i, array in zip(numeric, put, strict=True):
            values[i] = stacked(array, self.topology)
        return jax.tree.unflatten(treedef, values)

    def _put(self, rows: list[np.ndarray]) -> list[jax.Array]:
        sharding = self.topology.stacked
        if self.topology.is_whole:
            put: list[jax.Array] = jax.device_put(rows, sharding)
            return put
        return [
            jax.make_array_from_process_local_data(
                sharding, _canonical(x), (self.topology.num_replicas, *x.shape[1:])
            )
            for x in rows
        ]

    def _single(self, x: Any) -> Any:
        if not _is_numeric(x):
            return x
        return uncommitted(jax.device_put(_own(np.asarray(x)), self._device(0)))

    def _uneven(self, parts: tuple[Any, ...]) -> Any:
        if not all(map(_is_numeric, parts)):
            return pieces(parts, self.topology)
        put = [on_device(_own(np.asarray(p)), self._device(i)) for i, p in enumerate(parts)]
        return pieces(put, self.topology)

    def _device(self, replica: int) -> jax.Device:
        return self.topology.leads[replica] if self.fetch else jax.local_devices(backend="cpu")[0]


def _canonical(x: np.ndarray) -> np.ndarray:
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _is_numeric(x: Any) -> bool:
    return np.asarray(x).dtype.kind in "biufcV"


def _own(x: np.ndarray) -> np.ndarray:
    # device_put may alias NumPy memory: a view could be of an array that its owner changes later.
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    return x if base.size == x.size and base.flags.owndata and base is not x else x.copy()
