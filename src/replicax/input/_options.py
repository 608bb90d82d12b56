"""What a dataset function may know, and how elements travel."""

import enum
from dataclasses import dataclass


class InputReplicationMode(enum.Enum):
    """For whom a dataset function is called.

    Example:
        >>> [mode.name for mode in rx.distribute.InputReplicationMode]
        ['PER_WORKER', 'PER_REPLICA']
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """How the elements of a distributed dataset travel.

    Args:
        experimental_fetch_to_device: Whether elements are put on the replicas' devices; they are
            by default.
        experimental_replication_mode: Whether a dataset function is called once for each worker,
            or once for each replica.
        experimental_place_dataset_on_device: TensorFlow runs the dataset on the device then; here
            datasets always run on the host.
        experimental_per_replica_buffer_size: How many elements each replica is ahead.

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
    """Which part of the input a dataset function should make.

    Args:
        num_input_pipelines: How many dataset functions run in all.
        input_pipeline_id: Which of them this is.
        num_replicas_in_sync: How many replicas there are in all.

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
        """How many examples of a global batch one replica gets.

        Raises:
            ValueError: If they cannot be divided evenly.

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
