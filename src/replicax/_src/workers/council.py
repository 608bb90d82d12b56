"""Agreement among the launchers of several hosts: all restart their workers, or none does.

Every launcher keeps a connection to the hub of the current attempt. When its workers have failed,
it reports whether it would restart them, and receives the common decision: a launcher that
restarted alone would wait for the other hosts in vain.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from replicax._src.workers import wire
from replicax._src.workers.wire import Connection, Message

PATIENCE = 60.0  # seconds for the workers of other hosts to exit after a failure


@dataclass
class Council:
    """The hub's view of the launchers of a run.

    Attributes:
        hosts: The host of each launcher.
        give_up: Called with a message if the workers of a host will not join.
        least: The fewest hosts with which to restart; 0 if all are needed.
    """

    hosts: tuple[str, ...]
    give_up: Callable[[str], None]
    least: int = 0
    _connections: dict[int, Connection] = field(default_factory=dict)
    # "here": connected; "again": would restart; "decided": has received the decision;
    # "over": will not restart; "lost": disconnected, may come back if started again;
    # missing: never connected.
    _states: dict[int, str] = field(default_factory=dict)
    _over: str = ""  # why no launcher restarts
    _empty_since: float | None = None

    def handle(self, connection: Connection, message: Message) -> None:
        """Handle a launcher's message.

        Raises:
            WireError: If launchers send no such message.
        """
        match message:
            case {"launcher": int(host)} if 0 <= host < len(self.hosts):
                connection.host = host
                self._connections[host], self._states[host] = connection, "here"
            case {"ended": str(story)} if connection.host is not None:
                self.give_up(story)
            case {"again": bool(again), "code": int(code)} if connection.host is not None:
                self._states[connection.host] = "again" if again else "over"
                if not again:
                    how = f"{self._name(connection.host)} has ended for good, with code {code}"
                    self._over = self._over or how
                    self.give_up(how)
                self._decide()
            case _:
                raise wire.WireError("unknown message")

    def leave(self, connection: Connection) -> None:
        """Handle the closed connection of ``connection``, if it is a launcher's."""
        host = connection.host
        if host is not None and self._connections.get(host) is connection:
            del self._connections[host]
            if self._states[host] != "over":
                self._states[host] = "lost"
            self._decide()

    def is_waiting(self) -> bool:
        """Whether a launcher may still ask for a restart; call when no worker is left.

        The workers of its host may still be exiting, so wait up to `PATIENCE` seconds.
        """
        now = time.monotonic()
        self._empty_since = self._empty_since or now
        return "here" in self._states.values() and now - self._empty_since < PATIENCE

    def _decide(self) -> None:
        """Send the common decision to the launchers that would restart, once all have reported."""
        is_waiting = "here" in self._states.values()
        if is_waiting and (self.least or not self._over):
            return
        everyone = range(len(self.hosts))
        absent = [host for host in everyone if host not in self._states]
        names = " and ".join(map(self._name, absent))
        why = self._over or (f"{names} did not come" if absent else "")
        some: Message = {}  # the hosts that restart, if it need not be all
        if self.least:
            hosts = [host for host in everyone if self._states.get(host) in ("again", "decided")]
            # The hub runs on the first host: without it, the others have no common address.
            is_enough = len(hosts) >= self.least and 0 in hosts
            why = "" if is_enough else why or f"{len(hosts)} of {len(self.hosts)} hosts are left"
            some = {"hosts": hosts}
        for host, connection in self._connections.items():
            if self._states[host] == "again":
                connection.wire.send({"all": not why, "why": why, **some})
                self._states[host] = "decided"

    def _name(self, host: int) -> str:
        return f"the launcher of host {host} ({self.hosts[host]})"
