"""A record of the workers that took part in each step of an elastic run."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from replicax._src.workers.wire import Message

_MOST_ENTRIES = 1000


@dataclass
class MembershipLog:
    """The changes of the membership, in the order of the steps.

    Attributes:
        entries: The start and each change: the number of ``steps`` before it, the ``seconds`` since
            the start of the hub, the ``workers`` from then on, and its ``cause``. Of a long run,
            the first and the last ones.
    """

    entries: list[Message] = field(default_factory=list)
    # The steps of the run before the first one of each worker, which counts only its own.
    _before: dict[int, int] = field(default_factory=dict)

    def total(self, counts: Mapping[int, int]) -> int:
        """Return the number of steps of the run, given that of each worker."""
        return max((self._before.get(i, 0) + n for i, n in counts.items()), default=0)

    def add(
        self,
        steps: int,
        seconds: float,
        workers: Collection[int],
        joined: Collection[int] = (),
        cause: str = "",
    ) -> None:
        """Record that ``workers`` take part from now on, after ``steps`` steps of the run.

        Args:
            steps: The number of steps that are complete.
            seconds: The time since the start of the hub.
            workers: All workers.
            joined: The workers that have just joined.
            cause: Why the membership has changed.
        """
        self._before |= dict.fromkeys(joined, steps)
        self.entries.append(
            {
                "steps": steps,
                "seconds": round(seconds, 3),
                "workers": sorted(workers),
                "cause": cause,
            }
        )
        if len(self.entries) > _MOST_ENTRIES:
            del self.entries[1]


def describe(entries: Collection[Message], most: int = 4) -> str:
    """Return the last changes as one line of text."""
    shown = [f"{' '.join(map(str, e['workers']))} from step {e['steps'] + 1}" for e in entries]
    return ("... " if len(shown) > most else "") + ", ".join(shown[-most:])
