"""Door: connections of strangers -> connections of those that know the token of the run.

Anybody who reaches the port can connect. So a stranger may send little, must prove itself soon, and
there are few at a time: the oldest goes when one too many comes. Nothing that strangers do, and no
lack of file descriptors, ends the hub.
"""

import resource
import selectors
import socket
import time
from dataclasses import dataclass, field

from replicax.workers import _wire
from replicax.workers._wire import Message, Wire, WireError

MOST_STRANGERS = 64
PROVE_WITHIN = 10.0  # seconds
LONGEST_PROOF = 4096  # bytes


@dataclass
class Visitor:
    """A connection: a stranger first, then one that knows the token, then a worker."""

    wire: Wire
    challenge: str
    peer: str = ""
    trusted: bool = False
    index: int | None = None
    since: float = field(default_factory=time.monotonic)


class Door:
    """The listening socket, and all who came in through it."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.visitors: dict[socket.socket, Visitor] = {}
        self.turned_away: list[str] = []  # where wrong proofs came from
        self._token = token
        self._listener = listener
        self._is_open = True
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def arrivals(self, patience: float) -> list[Visitor]:
        """Wait for news, let newcomers in, and give those who have said something."""
        found = []
        for key, _ in self.selector.select(patience):
            if key.fileobj is self._listener:
                self._accept()
            elif visitor := self.visitors.get(key.fileobj):  # type: ignore[call-overload]
                found.append(visitor)
        return found

    def prove(self, visitor: Visitor, message: Message) -> None:
        """Take a stranger's proof, and give ours.

        Raises:
            WireError: If it is wrong.
        """
        theirs, mine = str(message.get("nonce")), visitor.challenge
        if not _wire.is_proof(message.get("proof"), self._token, "worker", mine, theirs):
            visitor.wire.send({"refused": "token"})
            self.turned_away = [*self.turned_away[-9:], visitor.peer]
            raise WireError("a wrong proof")
        visitor.trusted = True
        visitor.wire.lines.longest = _wire.LONGEST_LINE
        visitor.wire.send({"proof": _wire.proof(self._token, "hub", theirs, mine)})

    def tidy(self) -> None:
        """Show those out who have not become workers in time."""
        late = time.monotonic() - PROVE_WITHIN
        for visitor in self._waiting():
            if visitor.since < late:
                self.show_out(visitor)

    def show_out(self, visitor: Visitor) -> None:
        """Close a connection."""
        sock = visitor.wire.socket
        if self.visitors.pop(sock, None) is not None:
            self.selector.unregister(sock)
        visitor.wire.close()

    def close(self) -> None:
        """Let nobody in any more: the address is free for the next run."""
        if self._is_open:
            self._is_open = False
            self.selector.unregister(self._listener)
            self._listener.close()

    def tell_workers(self, message: Message) -> None:
        """Send a message to all that have joined."""
        for visitor in list(self.visitors.values()):
            if visitor.index is not None:
                visitor.wire.send(message)

    def _accept(self) -> None:
        if not self._is_open:
            return
        try:
            sock, peer = self._listener.accept()
        except BlockingIOError:  # it has left again
            return
        except OSError:  # no more file descriptors, for example
            self._make_room()
            return
        sock.setblocking(True)
        try:
            visitor = Visitor(Wire(sock, LONGEST_PROOF), _wire.nonce(), str(peer[0]))
            self.visitors[sock] = visitor
            self.selector.register(sock, selectors.EVENT_READ)
        except OSError:
            self.visitors.pop(sock, None)
            sock.close()
            return
        visitor.wire.send({"challenge": visitor.challenge})
        if len(self._waiting()) > MOST_STRANGERS:
            self._make_room()

    def _make_room(self) -> None:
        waiting = self._waiting()
        if waiting:
            self.show_out(min(waiting, key=lambda v: v.since))
        else:
            time.sleep(0.05)  # somebody else has taken all that this machine has

    def _waiting(self) -> list[Visitor]:
        return [v for v in self.visitors.values() if v.index is None]


def allow_visitors(workers: int) -> None:
    """Have the system allow this process as many open files as it needs, or may have."""
    wanted = 2 * workers + 2 * MOST_STRANGERS + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
