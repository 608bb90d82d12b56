"""Options of distributed datasets, and the context that a dataset function receives."""

import enum
from dataclasses import dataclass
from typing import Literal

# Whether the batches of a dataset are those of all replicas, or of one.
Batch = Literal["global", "per_replica"]


class InputReplicationMode(enum.Enum):
    """Whether a dataset function is called once per worker or once per replica.

    Example:
        >>> [mode.name for mode in rx.distribute.InputReplicationMode]
        ['PER_WORKER', 'PER_REPLICA']
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """Options for transferring a distributed dataset to the devices.

    Args:
        experimental_fetch_to_device: Whether to put elements on the replicas' devices; None means
            True.
        experimental_replication_mode: Whether to call a dataset function once per worker or once
            per replica.
        experimental_place_dataset_on_device: In TensorFlow, runs the dataset on the device;
            accepted here, but datasets always run on the host.
        experimental_per_replica_buffer_size: The number of elements to prefetch for each replica.

    Example:
        >>> rx.distribute.InputOptions().experimental_fetch_to_device
        True
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)
        if self.experimental_per_replica_buffer_size < 1:
            raise ValueError(
                "experimental_per_replica_buffer_size must be at least 1, got"
                f" {self.experimental_per_replica_buffer_size}."
            )


@dataclass(frozen=True)
class InputContext:
    """The position of an input pipeline among all, passed to a dataset function.

    Args:
        num_input_pipelines: The total number of input pipelines.
        input_pipeline_id: The index of this one.
        num_replicas_in_sync: The total number of replicas.

    Example:
        >>> context = rx.distribute.InputContext(num_replicas_in_sync=4)
        >>> context.get_per_replica_batch_size(64)
        16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        number, total = self.input_pipeline_id, self.num_input_pipelines
        return f"rx.distribute.InputContext(input pipeline id {number}, total: {total})"

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples of a global batch for one replica.

        Raises:
            ValueError: If the batch size is not a multiple of the number of replicas.

        Example:
            >>> rx.distribute.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(8)
            4
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"The global batch size {global_batch_size} cannot be divided evenly by"
                f" {self.num_replicas_in_sync} replicas; {size * self.num_replicas_in_sync} or"
                f" {(size + 1) * self.num_replicas_in_sync} could."
            )
        return size
