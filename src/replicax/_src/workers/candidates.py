"""The hub's side of joins: workers that prepare themselves to take part in an elastic run.

A candidate runs its program alone, up to the place at which it would restore a checkpoint. There it
waits. The others hand over their state between two steps, the candidate restores it, and becomes
a member in the next generation. Until then the run does not depend on it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from replicax._src.workers.settings import HubOptions
from replicax._src.workers.watchdog import Progress
from replicax._src.workers.wire import Acceptor, Connection, Message


@dataclass
class Newcomer:
    """A worker that does not take part yet.

    Attributes:
        connection: Its connection.
        facts: The facts that it sent.
        stage: "prepares", "waits" for the state, "restores" it, or has "restored" it.
        progress: Its heartbeats.
    """

    connection: Connection
    facts: Message
    stage: str = "prepares"
    progress: Progress = field(default_factory=Progress)


class Candidates:
    """All workers that want to join."""

    def __init__(self, acceptor: Acceptor) -> None:
        self._acceptor = acceptor
        self._found: dict[int, Newcomer] = {}

    def add(self, connection: Connection, facts: Message) -> None:
        """Add a worker."""
        connection.candidate = facts["index"]
        self._found[facts["index"]] = Newcomer(connection, facts)

    def rows(self) -> Iterator[tuple[int, Message, Progress]]:
        """Yield the index, facts and progress of each."""
        for index, one in self._found.items():
            yield index, one.facts, one.progress

    def note_ping(self, index: int, ping: dict[str, Any]) -> None:
        """Note a heartbeat, and answer it."""
        one = self._found[index]
        one.progress.note(ping)
        one.connection.wire.send({"pong": one.progress.count})

    def note_waiting(self, index: int) -> None:
        """Note that a candidate is ready to receive the state."""
        self._found[index].stage = "waits"

    def note_restored(self, index: int) -> None:
        """Note that a candidate has restored the state."""
        if self._found[index].stage == "restores":
            self._found[index].stage = "restored"

    def is_waiting(self) -> bool:
        """Whether a candidate waits for the state."""
        return any(one.stage == "waits" for one in self._found.values())

    def are_restoring(self) -> bool:
        """Whether any candidate is still restoring the state that it was given."""
        return any(one.stage == "restores" for one in self._found.values())

    def hand_over(self, path: str) -> None:
        """Send the waiting candidates the path of the state."""
        for one in self._found.values():
            if one.stage == "waits":
                one.stage = "restores"
                one.progress.moved = time.monotonic()
                one.connection.wire.send({"state": path})

    def promoted(self) -> dict[int, Newcomer]:
        """Remove and return the candidates that have the state, by index."""
        ready = {i: one for i, one in self._found.items() if one.stage == "restored"}
        for index, one in ready.items():
            del self._found[index]
            one.connection.candidate, one.connection.index = None, index
        return ready

    def lost(self, options: HubOptions) -> list[tuple[int, str]]:
        """Return the candidates that are silent, or make no progress in restoring, and why."""
        now, found = time.monotonic(), []
        for index, one in self._found.items():
            if (silent := now - one.progress.heard) > options.ping_timeout:
                found.append((index, f"it has not answered for {silent:.0f} s"))
            elif one.stage == "restores" and one.progress.is_stalled(
                options.step_timeout, options.disk_timeout
            ):
                found.append((index, "it does not get on with restoring the state"))
        return found

    def drop(self, index: int) -> Message | None:
        """Remove a candidate and close its connection; return its facts."""
        one = self._found.pop(index, None)
        if one is None:
            return None
        one.connection.candidate = None
        self._acceptor.disconnect(one.connection)
        return one.facts

    def dismiss(self, why: str, *, is_error: bool = False) -> None:
        """Notify all candidates that they cannot take part.

        Args:
            why: The reason.
            is_error: Whether they should fail; otherwise the run needs them no more.
        """
        for index, one in list(self._found.items()):
            one.connection.wire.send({"dismissed": why, "is_error": is_error})
            self.drop(index)
