"""Declarations of variables: consistency checks, planned and awaited values, and layouts.

- Checks of a declaration, and of the dtypes that may be assigned to a variable.
- Planned variables have only a shape and a dtype, for programs too large for this machine.
  Awaited variables have an initial value that is replaced before its first use if a checkpoint
  was restored before the variable existed.
- `offload`: variables that are stored in the memory of the host.
- `LayoutMap`: which variables are sharded over the logical devices of a replica, and how.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.base.errors import VariableError
from replicax._src.base.managers import contextmanager
from replicax._src.base.ops import canonical_dtype
from replicax._src.base.types import VariableAggregation, VariableSynchronization
from replicax._src.topology.mesh import REPLICA_AXIS, Topology, partition_spec
from replicax._src.values.placement import WHOLE


def check_declaration(v: Any, name: str, value: Any, shape: Any, *, distributed: bool) -> None:
    """Check that a declaration does not contradict itself.

    Args:
        v: The variable.
        name: Its name.
        value: Its initial value.
        shape: Its declared shape, or None.
        distributed: Whether it is created in the scope of a strategy.

    Raises:
        ValueError: If it does.
    """
    for what, kind in (
        ("synchronization", VariableSynchronization),
        ("aggregation", VariableAggregation),
    ):
        if not isinstance(getattr(v, what), kind):
            raise ValueError(
                f"{what}={getattr(v, what)!r} of variable {name!r} is not one of"
                f" {', '.join(f'rx.{kind.__name__}.{m}' for m in kind.__members__)}."
            )
    if distributed and v.synchronization is VariableSynchronization.NONE:
        raise VariableError(
            f"Variable {name!r} has synchronization NONE, which no strategy supports: use"
            " rx.VariableSynchronization.AUTO, ON_WRITE or ON_READ."
        )
    if (
        distributed
        and v.aggregation is VariableAggregation.MEAN
        and not jnp.issubdtype(value.dtype, jnp.inexact)
    ):
        raise VariableError(
            f"Variable {name!r} of dtype {value.dtype} cannot have aggregation MEAN: the mean"
            " of integers is not an integer. Use SUM, ONLY_FIRST_REPLICA, or a float dtype."
        )
    if shape is not None and tuple(shape) != tuple(value.shape):
        raise ValueError(
            f"Variable {name!r} was declared with shape {tuple(shape)}, but its initial value"
            f" has shape {tuple(value.shape)}."
        )


def check_dtype(v: Any, value: Any, verb: str, *, exact: bool) -> None:
    """Check that a value can be converted to the dtype of a variable.

    Args:
        v: The variable.
        value: An object with a dtype.
        verb: The method that assigns it, for the message.
        exact: Whether the caller chose the dtype; False for Python numbers.

    Raises:
        VariableError: If the conversion would lose information.
    """
    if jnp.issubdtype(v.dtype, jax.dtypes.extended):
        return
    have, want = np.dtype(value.dtype), np.dtype(v.dtype)
    fits = np.can_cast(have, want, "same_kind") if exact else _python_fits(have, want)
    if not fits:
        raise VariableError(
            f"{verb} of a value of dtype {have} to variable {v.name!r} of dtype {want} would lose"
            f" information. Cast it explicitly: `value.astype({str(want)!r})`."
        )


def _python_fits(have: np.dtype, want: np.dtype) -> bool:
    order = "biufcV"
    have_rank = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}.get(have.kind, 4)
    want_rank = {"b": 0, "i": 1, "u": 1, "f": 2, "V": 2, "c": 3}.get(want.kind, 4)
    return have_rank <= want_rank and have.kind in order


def is_key(x: Any) -> bool:
    """Whether `x` is an array of PRNG keys, whose dtype cannot be converted."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


_planning: ContextVar[bool] = ContextVar("replicax_planning", default=False)


@contextmanager
def planning() -> Iterator[None]:
    """Create variables without memory, to `rx.tpu.preflight` a model too large for this machine.

    A variable created in the block has a name, a shape and a dtype, but no value, unless it has a
    single element, such as a counter. An initial value that is a function is not computed either,
    so pass functions.

    Example:
        >>> with rx.tpu.planning():
        ...     v = rx.Variable(lambda: jnp.zeros((1 << 20, 1 << 20)), name="large")
        >>> v.shape
        (1048576, 1048576)
        >>> v.read_value()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        replicax.errors.VariableError: Variable 'large' has no value: it was made while planning...
    """
    token = _planning.set(True)
    try:
        yield
    finally:
        _planning.reset(token)


def is_planning() -> bool:
    """Whether variables are being created without values."""
    return _planning.get()


_offloading: ContextVar[bool] = ContextVar("replicax_offloading", default=False)


@contextmanager
def offload() -> Iterator[None]:
    """Store the variables that are created in the block in the memory of the host.

    Between steps they take no memory of the devices. A compiled step copies each to the devices
    where it is used, and its new value back. That suits the state of optimizers, which a step reads
    and writes once. Variables up to 16 KiB, those outside of the scope of a strategy, and those
    with a value for each replica stay on the devices. The strategy must be of one process.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope(), rx.offload():
        ...     moment = rx.Variable(jnp.zeros((128, 64)))
        >>> strategy.array(moment).sharding.memory_kind
        'pinned_host'
    """
    token = _offloading.set(True)
    try:
        yield
    finally:
        _offloading.reset(token)


def is_offloading() -> bool:
    """Whether variables are being created in the memory of the host."""
    return _offloading.get()


def plan(initial_value: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an initial value, which may itself be planned."""
    dtype = canonical_dtype(dtype)
    if is_planned(initial_value):
        return jax.ShapeDtypeStruct(initial_value.shape, dtype or initial_value.dtype)
    make = initial_value if callable(initial_value) else lambda: initial_value
    shape: jax.ShapeDtypeStruct = jax.eval_shape(lambda: jnp.asarray(make(), dtype))
    return shape


def is_planned(x: Any) -> bool:
    """Whether `x` is a planned value: a shape and a dtype without data."""
    return isinstance(x, jax.ShapeDtypeStruct)


class Awaited(jax.ShapeDtypeStruct):
    """The initial value of a new variable, whose first use calls `before_use`."""

    def __init__(self, value: Any, before_use: Callable[[], None]) -> None:
        head = value[0] if isinstance(value, tuple) else value
        super().__init__(head.shape, head.dtype)
        self.value = value
        self.before_use = before_use


# Callbacks of restored checkpoints that still wait for variables. Each runs before a new variable
# is first used, and after a library has created variables.
new_variable_callbacks: list[Callable[[], None]] = []


def notify_of_new_variables() -> None:
    """Run all callbacks in `new_variable_callbacks`: new variables may exist."""
    for notify in list(new_variable_callbacks):
        notify()


def refuse_planned(x: Any, name: str) -> None:
    """Refuse to use a planned variable's value, which does not exist.

    Raises:
        VariableError: If `x` is planned.
    """
    if is_planned(x[0] if isinstance(x, tuple) else x):
        raise VariableError(
            f"Variable {name!r} has no value: it was made while planning. Make it outside of"
            " `rx.tpu.planning()`, and of `replicax preflight --plan`, to compute with it."
        )


# Of one axis of a variable: a number of parts, or names of axes of the devices of a replica.
Partition = int | str | tuple[str, ...] | None


class LayoutMap(MutableMapping[str, Sequence[Partition]]):
    """Patterns of variable names, with the partition dimensions of the matching variables.

    Under a strategy whose replicas have several logical devices, a variable created inside
    `scope` whose name matches is sharded over them, so that each device holds only its shard.
    Create optimizer state for it with ``jnp.zeros_like(variable)``, or in
    ``strategy.extended.colocate_vars_with(variable)``: both follow the variable's layout.

    Args:
        layouts: From pattern to partition dimensions: for each axis of the variable a number,
            whose product must divide the number of logical devices; or a name of
            ``devices_per_replica``, several names, or None.

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

    def __init__(self, layouts: Mapping[str, Sequence[Partition]] | None = None) -> None:
        self._layouts: dict[str, tuple[Partition, ...]] = {}
        self.update(layouts or {})

    def __getitem__(self, pattern: str) -> Sequence[Partition]:
        return self._layouts[pattern]

    def __setitem__(self, pattern: str, partition_dimensions: Sequence[Partition]) -> None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise VariableError(
                f"{pattern!r} is not a valid pattern for names of variables: {error}. It is a"
                " regular expression, such as 'dense_[0-9]+/kernel'."
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
        """Apply the layouts to the variables that are created in the block.

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

    def find(self, name: str) -> Sequence[Partition] | None:
        """Return the partition dimensions of a variable; None if no pattern matches its name.

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
    """Shard variables that are created in the block with the shape of `cell` as `cell` is."""
    token = _example.set(cell)
    try:
        yield
    finally:
        _example.reset(token)


def _mesh_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes over which an entry of a partition spec shards one axis of an array."""
    return entry if isinstance(entry, tuple) else (entry,)


def layout_of(
    value: jax.Array, name: str, topology: Topology | None, *, per_replica: bool
) -> PartitionSpec:
    """Return the sharding of a new variable over logical devices.

    It is taken from the initial value, else from the variable given to `laid_out_like`, else from
    the layout map; otherwise the variable is replicated.
    """
    if topology is None or topology.cores == 1 or per_replica:
        return WHOLE
    where = getattr(value, "sharding", None)
    if (
        isinstance(where, NamedSharding)
        and where.mesh == topology.mesh
        and not where.is_fully_replicated
        and not any(REPLICA_AXIS in _mesh_axes(entry) for entry in where.spec)
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
