"""ClusterFacts: what a strategy must know about the cluster, whoever found it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ClusterFacts:
    """The workers that train together, and which of them this process is.

    Attributes:
        num_workers: How many workers train together; 1 without a cluster.
        index: This process among them: the chief is 0 and the workers follow.
        addresses: The address of each worker, None where it is not known; empty without a cluster.
        task_type: The job of this process, or None without a cluster.
        task_id: The index of this process in its job, or None without a cluster.
        is_chief: Whether this process is the one that writes for all.
        coordinator: The address where the workers meet, that of worker 0; None where nobody else
            is to be met.
        source: Where this was read, for messages.

    Example:
        >>> from replicax.cluster._facts import ClusterFacts
        >>> facts = ClusterFacts.alone("no cluster")
        >>> facts.num_workers, facts.index, facts.is_chief
        (1, 0, True)
    """

    num_workers: int
    index: int
    addresses: tuple[str | None, ...]
    task_type: str | None
    task_id: int | None
    is_chief: bool
    coordinator: str | None
    source: str

    @classmethod
    def alone(cls, source: str) -> "ClusterFacts":
        """One process that meets nobody.

        Example:
            >>> from replicax.cluster._facts import ClusterFacts
            >>> ClusterFacts.alone("no cluster").coordinator is None
            True
        """
        return cls(
            num_workers=1,
            index=0,
            addresses=(),
            task_type=None,
            task_id=None,
            is_chief=True,
            coordinator=None,
            source=source,
        )

    @classmethod
    def of_processes(
        cls, index: int, addresses: tuple[str | None, ...], *, coordinator: str, source: str
    ) -> "ClusterFacts":
        """Equal processes without a chief, as schedulers start them.

        Example:
            >>> from replicax.cluster._facts import ClusterFacts
            >>> facts = ClusterFacts.of_processes(
            ...     1, ("a:1", "b:1"), coordinator="a:1", source="Slurm"
            ... )
            >>> facts.task_type, facts.task_id, facts.is_chief
            ('worker', 1, False)
        """
        return cls(
            num_workers=len(addresses),
            index=index,
            addresses=addresses,
            task_type="worker",
            task_id=index,
            is_chief=index == 0,
            coordinator=coordinator,
            source=source,
        )

    @property
    def neighbours(self) -> int:
        """How many of the workers, this one too, run on this one's machine, by their addresses.

        Example:
            >>> from replicax.cluster._facts import ClusterFacts
            >>> facts = ClusterFacts.of_processes(
            ...     0, ("a:1", "a:2", "b:1", None), coordinator="a:1", source="Slurm"
            ... )
            >>> facts.neighbours
            2
        """
        hosts = [a.rpartition(":")[0] if a else None for a in self.addresses]
        return hosts.count(hosts[self.index]) if hosts and hosts[self.index] else 1

    def describe(self, index: int) -> str:
        """Name a worker for a message.

        Example:
            >>> from replicax.cluster._facts import ClusterFacts
            >>> facts = ClusterFacts.of_processes(
            ...     0, ("a:1", None), coordinator="a:1", source="Kubeflow"
            ... )
            >>> facts.describe(0), facts.describe(1)
            ('worker 0 (a:1)', 'worker 1')
        """
        address = self.addresses[index] if index < len(self.addresses) else None
        return f"worker {index} ({address})" if address else f"worker {index}"
