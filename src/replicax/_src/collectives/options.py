"""Options of collectives and runs, and destinations: where the result of a reduction goes."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from replicax._src.base.types import ReduceOp
from replicax._src.topology.devices import resolve
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import Distributed, InBody, Mirrored, mirrored
from replicax._src.values.placement import is_array, is_traced, on_device, replicate
from replicax._src.values.reduce import IndexedSlices, is_slices, reduce_slices


class CommunicationImplementation(enum.Enum):
    """The library that transfers the data of a collective.

    XLA chooses by platform (NCCL on GPU, ICI on TPU, shared memory or Gloo on CPU), so all three
    names are accepted and mean the same here.

    Example:
        >>> rx.distribute.experimental.CommunicationImplementation.RING.name
        'RING'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How values are packed and transferred when they are combined.

    Args:
        bytes_per_pack: Pack values up to this many bytes per pack; 0 packs only small values and
            transfers large ones individually.
        timeout_seconds: How long eager replicas wait for each other; None waits as long as all of
            them are alive.
        implementation: A `CommunicationImplementation` or its name.

    Raises:
        ValueError: If an argument is invalid.

    Example:
        >>> options = rx.distribute.experimental.CommunicationOptions(implementation="ring")
        >>> options.implementation.name
        'RING'
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: Any = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"bytes_per_pack must be 0 (automatic) or more, got {self.bytes_per_pack}."
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(
                f"timeout_seconds must be more than 0, or None, got {self.timeout_seconds}."
            )
        object.__setattr__(self, "implementation", _implementation(self.implementation))


class CollectiveHints:
    """The deprecated name of `CommunicationOptions`, with its original fields.

    Example:
        >>> rx.distribute.experimental.CollectiveHints(bytes_per_pack=1024).bytes_per_pack
        1024
    """

    def __new__(cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> Any:
        return CommunicationOptions(bytes_per_pack, timeout_seconds)


@dataclass(frozen=True)
class XLAOptions:
    """Options for XLA in `RunOptions`.

    Attributes:
        use_spmd_for_xla_partitioning: Accepted for compatibility with TensorFlow: XLA's SPMD
            partitioner is the only one here.
        enable_xla_dynamic_padder: Whether replicas may hold batches of different sizes. Nothing is
            padded: each replica is then compiled separately.
        use_shardy_partitioner: Accepted: JAX chooses the partitioner, Shardy by default.

    Example:
        >>> rx.tpu.XLAOptions().enable_xla_dynamic_padder
        True
    """

    use_spmd_for_xla_partitioning: bool = True
    enable_xla_dynamic_padder: bool = True
    use_shardy_partitioner: bool = False


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`; only `TPUStrategy` uses them.

    Attributes:
        experimental_enable_dynamic_batch_size: Whether replicas may hold batches of different
            sizes, as after a short last batch. With False such a batch is an error.
        experimental_bucketizing_dynamic_shape: Accepted for compatibility with TensorFlow, where it
            pads shapes to save compilations; here every shape has its own program, and results
            are exact.
        experimental_xla_options: An `rx.tpu.XLAOptions`.

    Raises:
        TypeError: If ``experimental_xla_options`` is another type.

    Example:
        >>> rx.distribute.RunOptions().experimental_enable_dynamic_batch_size
        True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        xla = self.experimental_xla_options
        if xla is not None and not isinstance(xla, XLAOptions):
            raise TypeError(
                f"experimental_xla_options must be a rx.tpu.XLAOptions, got {xla!r}. Flags of XLA"
                " itself go into the environment variables XLA_FLAGS and LIBTPU_INIT_ARGS."
            )

    @property
    def allows_dynamic_batch(self) -> bool:
        """Whether replicas may hold batches of different sizes."""
        xla = self.experimental_xla_options or XLAOptions()
        return self.experimental_enable_dynamic_batch_size and xla.enable_xla_dynamic_padder


def _implementation(value: Any) -> CommunicationImplementation:
    if isinstance(value, CommunicationImplementation):
        return value
    if isinstance(value, str) and value.upper() in CommunicationImplementation.__members__:
        return CommunicationImplementation[value.upper()]
    raise ValueError(
        f"There is no communication implementation {value!r}; use one of"
        f" {', '.join(CommunicationImplementation.__members__)}."
    )


Pairs = Sequence[tuple[Any, Any]]


def plain_reduction(op: ReduceOp, value: Any, size: int) -> Any:
    """Return the reduction of a value without per-replica components.

    Raises:
        ValueError: For the sum over several replicas, which would be ambiguous.
    """
    if op is ReduceOp.MEAN or size == 1 or (isinstance(value, int | float) and value == 0):
        return value
    raise ValueError(
        f"{value!r} is one value, not one for each of the {size} replicas, so its SUM could mean"
        " the value or the value times the replicas. Reduce a result of `strategy.run`, or"
        ' use "MEAN".'
    )


def place(value: Any, destinations: Any) -> Any:
    """Copy `value` to all of `destinations`."""
    topology = topology_of(destinations)
    if topology is None:
        return _on_device(value, resolve(destinations))
    if topology.num_replicas == 1 and is_traced(value):
        return value
    return mirrored(replicate(value, topology), topology)


def _on_device(value: Any, device: jax.Device) -> Any:
    # A compiled program has its values on all of its devices.
    return value if is_traced(value) else on_device(value, device)


def common_topology(pairs: Pairs) -> Topology:
    """Return the topology of the values of several pairs.

    Raises:
        ValueError: If neither a value nor its destination has devices.
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
    """Return the topology of a variable, value or list of devices; None for a single device."""
    if isinstance(x, Distributed):
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
    topology: Topology | None = getattr(x, "topology", None)
    return topology


def replicas_of(destinations: Any) -> int:
    """Return the number of replicas of a destination."""
    topology = topology_of(destinations)
    return topology.num_replicas if topology else 1


def deliver(result: Mirrored, destinations: Any) -> Any:
    """Return the result at its destination: on one device, or on all replicas unchanged."""
    if isinstance(destinations, str | jax.Device) and not isinstance(result.form, InBody):
        return _on_device(result.values[0], resolve(destinations))
    return result


def joined_slices(op: ReduceOp, slices: IndexedSlices, destinations: Any) -> IndexedSlices:
    """Return the concatenated rows of all replicas at their destination."""
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
    """Return `pairs` if it is a list of pairs of a value and its destinations.

    Raises:
        ValueError: If it is not.
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
