"""Options of a collective, and of a run."""

import enum
from dataclasses import dataclass
from typing import Any


class CommunicationImplementation(enum.Enum):
    """Which library moves the data of a collective.

    XLA chooses by platform (NCCL on GPU, ICI on TPU, shared memory or Gloo on CPU), so that all
    three names are accepted and mean the same here.

    Example:
        >>> rx.distribute.experimental.CommunicationImplementation.RING.name
        'RING'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How values are packed and moved when they are combined.

    Args:
        bytes_per_pack: Join values into packs of at most so many bytes; 0 joins the small ones and
            leaves the large ones alone.
        timeout_seconds: How long eager replicas wait for each other; None for as long as all of
            them are alive.
        implementation: A `CommunicationImplementation` or its name.

    Raises:
        ValueError: If one of them has no meaning.

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
    """The older name of `CommunicationOptions`, with the fields of its time.

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
        use_spmd_for_xla_partitioning: Accepted for TensorFlow's sake: XLA's SPMD partitioner is the
            only one here.
        enable_xla_dynamic_padder: Whether replicas may hold batches of different sizes. Nothing is
            padded for it: each replica is then compiled by itself.
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
    """Options of `Strategy.run`; they matter to `TPUStrategy` only.

    Attributes:
        experimental_enable_dynamic_batch_size: Whether replicas may hold batches of different
            sizes, as after a short last batch. With False such a batch is an error.
        experimental_bucketizing_dynamic_shape: Accepted for TensorFlow's sake. It would pad shapes
            to save compilations; here every shape has a program of its own, and exact results.
        experimental_xla_options: An `rx.tpu.XLAOptions`.

    Raises:
        TypeError: If the XLA options are something else.

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
