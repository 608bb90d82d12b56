"""ValueContext: what a function that makes per-replica values may know."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ValueContext:
    """For which replica `experimental_distribute_values_from_function` asks for a value.

    Example:
        >>> rx.distribute.experimental.ValueContext(1, 4).replica_id_in_sync_group
        1
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
