"""Council: the launchers of several hosts, which restart all workers together or not at all.

Every launcher keeps a connection to the hub of its attempt. When its workers have failed, it says
whether it would start them again, and hears what all of them do: a launcher that restarted alone
would wait for the others in vain.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from replicax.workers import _wire
from replicax.workers._wire import Message, Visitor

PATIENCE = 60.0  # seconds that the workers of other hosts may take to end after a failure


@dataclass
class Council:
    """The launchers of a run, seen from the hub.

    Attributes:
        hosts: Where they run.
        give_up: Called with a text if the workers of one of them will not come.
    """

    hosts: tuple[str, ...]
    give_up: Callable[[str], None]
    _seats: dict[int, Visitor] = field(default_factory=dict)
    # "here", "again" once it would restart, "told" what all do, "over", "lost"; nothing if it never
    # came. One that is lost may be started again by whatever started it.
    _states: dict[int, str] = field(default_factory=dict)
    _over: str = ""  # why nobody starts again
    _empty_since: float | None = None

    def take(self, visitor: Visitor, message: Message) -> None:
        """Hear a launcher.

        Raises:
            WireError: If the message is not one of a launcher.
        """
        match message:
            case {"launcher": int(host)} if 0 <= host < len(self.hosts):
                visitor.host = host
                self._seats[host], self._states[host] = visitor, "here"
            case {"ended": str(story)} if visitor.host is not None:
                self.give_up(story)
            case {"again": bool(again), "code": int(code)} if visitor.host is not None:
                self._states[visitor.host] = "again" if again else "over"
                if not again:
                    how = f"{self._name(visitor.host)} has ended for good, with code {code}"
                    self._over = self._over or how
                    self.give_up(how)
                self._settle()
            case _:
                raise _wire.WireError("a message of no known kind")

    def leave(self, visitor: Visitor) -> None:
        """Know that a launcher's connection is closed."""
        host = visitor.host
        if host is not None and self._seats.get(host) is visitor:
            del self._seats[host]
            if self._states[host] != "over":
                self._states[host] = "lost"
            self._settle()

    def is_waiting(self) -> bool:
        """Whether launchers have not decided yet; called when no worker is left.

        The workers of their hosts may still be ending, for so long.
        """
        now = time.monotonic()
        self._empty_since = self._empty_since or now
        return "here" in self._states.values() and now - self._empty_since < PATIENCE

    def _settle(self) -> None:
        """Answer those that would start again, once it is known what all do."""
        if "here" in self._states.values() and not self._over:
            return
        absent = [host for host in range(len(self.hosts)) if host not in self._states]
        names = " and ".join(map(self._name, absent))
        why = self._over or (f"{names} did not come" if absent else "")
        for host, visitor in self._seats.items():
            if self._states[host] == "again":
                visitor.wire.send({"all": not why, "why": why})
                self._states[host] = "told"

    def _name(self, host: int) -> str:
        return f"the launcher of host {host} ({self.hosts[host]})"
