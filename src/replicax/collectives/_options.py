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
class RunOptions:
    """Options of `Strategy.run`; they matter to `TPUStrategy` only.

    Example:
        >>> rx.distribute.RunOptions().experimental_enable_dynamic_batch_size
        True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


def _implementation(value: Any) -> CommunicationImplementation:
    if isinstance(value, CommunicationImplementation):
        return value
    if isinstance(value, str) and value.upper() in CommunicationImplementation.__members__:
        return CommunicationImplementation[value.upper()]
    raise ValueError(
        f"There is no communication implementation {value!r}; use one of"
        f" {', '.join(CommunicationImplementation.__members__)}."
    )
