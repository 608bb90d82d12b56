"""Which workers an attempt starts: all of them, or those that are left."""

from dataclasses import dataclass, field

from replicax._src.cluster.checks import ClusterError

_STRIKES = 2  # attempts in a row that one worker must break before the run goes on without it


@dataclass
class Membership:
    """The workers of the next attempt.

    Attributes:
        hosts: The indices of the hosts that take part, in the order of ``--hosts``.
        slots: The workers of each host: a slot keeps its GPUs while the workers are renumbered.
        least: The fewest workers with which to start.
    """

    hosts: list[int]
    slots: list[int]
    least: int
    _suspect: int | None = None
    _strikes: int = field(default=0)

    @classmethod
    def of(cls, workers: str, min_workers: int | None, hosts: int) -> "Membership":
        """Return the membership of ``--workers N`` or ``--workers MIN:MAX`` on so many hosts.

        Raises:
            ClusterError: If the numbers are invalid, or cannot be divided over the hosts.
        """
        first, colon, last = workers.partition(":")
        if not all(text.isdecimal() for text in (first, last or "1")) or (colon and not last):
            raise ClusterError(
                f"--workers {workers} is not a number of workers. Write `--workers 4`, or"
                " `--workers 2:4` for at least 2 and at most 4."
            )
        if colon and min_workers is not None:
            raise ClusterError(
                f"--workers {workers} gives the fewest workers already: omit --min-workers."
            )
        most = int(last or first)
        least = int(first) if colon else most if min_workers is None else min_workers
        faults = {
            "--workers must be at least 1": most < 1,
            f"the fewest workers must be 1 to {most}, and are {least}": not 1 <= least <= most,
            f"--workers {most} cannot be divided evenly over {hosts} hosts": most % hosts != 0,
        }
        for fault, is_there in faults.items():
            if is_there:
                raise ClusterError(f"{fault}.")
        return cls(list(range(hosts)), list(range(most // hosts)), least)

    @property
    def size(self) -> int:
        """The number of workers on all hosts."""
        return len(self.hosts) * len(self.slots)

    @property
    def may_shrink(self) -> bool:
        """Whether the run may go on with fewer workers."""
        return self.least < self.size

    @property
    def least_hosts(self) -> int:
        """The fewest hosts whose workers suffice."""
        return -(-self.least // len(self.slots))

    def keep_hosts(self, positions: list[int]) -> str:
        """Keep only the hosts at ``positions``; return a message if that removes one."""
        kept = [self.hosts[i] for i in positions]
        lost = [str(host) for host in self.hosts if host not in kept]
        self.hosts = kept
        if not lost:
            return ""
        word = "host" if len(lost) == 1 else "hosts"
        return f"going on without {word} {', '.join(lost)}, with {self.size} worker(s)"

    def blame(self, slot: int) -> str:
        """Note that the worker in ``slot`` broke an attempt; remove it if it did so repeatedly.

        Only on one host: the launchers of several hosts agree on whole hosts only.

        Returns:
            A message if the worker was removed.
        """
        self._strikes = self._strikes + 1 if slot == self._suspect else 1
        self._suspect = slot
        if self._strikes < _STRIKES or not self.may_shrink or len(self.hosts) > 1:
            return ""
        self.slots.remove(slot)
        self._suspect, self._strikes = None, 0
        return (
            f"the worker in slot {slot} failed first {_STRIKES} times in a row: going on without"
            f" it, with {self.size} worker(s)"
        )
