"""Layouts: which variables are cut over the logical devices of a replica, and how."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicax._errors import VariableError
from replicax.topology._mesh import Topology, partition_spec
from replicax.values._placement import WHOLE


class LayoutMap(MutableMapping[str, Sequence[int]]):
    """Patterns of variable names, with the parts into which such a variable is cut.

    Under a `TPUStrategy` whose replicas own several logical devices, a variable made inside
    `scope` whose name matches lies in parts on them, so that each device holds only its part. The
    state that an optimizer keeps for it is best created with ``jnp.zeros_like(variable)``, or in
    ``strategy.extended.colocate_vars_with(variable)``: both follow the variable's layout.

    Args:
        layouts: From pattern to partition dimensions, one number for each axis of the variable.
            Their product must divide the number of logical devices.

    Example:
        >>> layouts = rx.tpu.LayoutMap({"up/kernel": [1, 2], "down/kernel": [2, 1]})
        >>> topology = rx.tpu.experimental.initialize_tpu_system()
        >>> pairs = rx.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 2], num_replicas=4)
        >>> strategy = rx.distribute.experimental.TPUStrategy(device_assignment=pairs)
        >>> with strategy.scope(), layouts.scope():
        ...     kernel = rx.Variable(jnp.zeros((8, 32)), name="block_0/up/kernel")
        >>> kernel.read_value().addressable_shards[0].data.shape
        (8, 16)
    """

    def __init__(self, layouts: Mapping[str, Sequence[int]] | None = None) -> None:
        self._layouts: dict[str, tuple[int, ...]] = {}
        self.update(layouts or {})

    def __getitem__(self, pattern: str) -> Sequence[int]:
        return self._layouts[pattern]

    def __setitem__(self, pattern: str, partition_dimensions: Sequence[int]) -> None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise VariableError(
                f"{pattern!r} is no pattern for names of variables: {error}. It is a regular"
                " expression, such as 'dense_[0-9]+/kernel'."
            ) from error
        self._layouts[pattern] = tuple(partition_dimensions)

    def __delitem__(self, pattern: str) -> None:
        del self._layouts[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    @contextmanager
    def scope(self) -> Iterator[LayoutMap]:
        """Lay out the variables that are made until the block ends.

        Example:
            >>> with rx.tpu.LayoutMap({"kernel": [1, 2]}).scope() as layouts:
            ...     len(layouts)
            1
        """
        token = _layouts.set(self)
        try:
            yield self
        finally:
            _layouts.reset(token)

    def find(self, name: str) -> Sequence[int] | None:
        """The partition dimensions of a variable; None if no pattern matches its name.

        Raises:
            VariableError: If several patterns match, and none is the name itself.

        Example:
            >>> rx.tpu.LayoutMap({"dense.*kernel": [1, 2]}).find("dense_1/kernel")
            (1, 2)
        """
        if name in self._layouts:
            return self._layouts[name]
        found = [pattern for pattern in self._layouts if re.search(pattern, name)]
        if len(found) > 1:
            raise VariableError(
                f"The name of variable {name!r} matches several patterns of the layout map:"
                f" {', '.join(map(repr, found))}. Make them exclude each other."
            )
        return self._layouts[found[0]] if found else None


_layouts: ContextVar[LayoutMap | None] = ContextVar("replicax_layouts", default=None)
_example: ContextVar[Any] = ContextVar("replicax_layout_example", default=None)


@contextmanager
def laid_out_like(cell: Any) -> Iterator[None]:
    """Variables of the same shape that are made in the block are cut as ``cell`` is."""
    token = _example.set(cell)
    try:
        yield
    finally:
        _example.reset(token)


def layout_of(
    value: jax.Array, name: str, topology: Topology | None, *, per_replica: bool
) -> PartitionSpec:
    """How a new variable is cut over logical devices.

    As its initial value is; else as the variable that it is created with; else as the layout map
    says; else not at all.
    """
    if topology is None or topology.cores == 1 or per_replica:
        return WHOLE
    where = getattr(value, "sharding", None)
    if (
        isinstance(where, NamedSharding)
        and where.mesh == topology.mesh
        and not where.is_fully_replicated
    ):
        return where.spec
    example = _example.get()
    if example is not None and example.topology == topology and example.shape == value.shape:
        spec: PartitionSpec = example.spec
        return spec
    layouts = _layouts.get()
    parts = layouts.find(name) if layouts is not None else None
    if parts is None:
        return WHOLE
    return partition_spec(topology, parts, value.shape, what=f"variable {name!r}", may_repeat=True)
