"""The wire protocol: JSON lines over TCP, between peers that authenticate with the run's token.

Nothing else is ever parsed: no pickle, no code. Lines have a maximum length, and an unexpected
message before authentication closes the connection.

`Wire` is one end of a connection, `Acceptor` the server side of all of them. Anything that can
reach the port can connect, so an unauthenticated peer may send little data, must authenticate soon,
and only a few of them are kept: the oldest is dropped when there are too many. Nothing that they
send, nor a lack of file descriptors, ends the hub.
"""

import contextlib
import hashlib
import hmac
import json
import resource
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

LONGEST_LINE = 4 * 1024 * 1024
_SEND_PATIENCE = 5.0

Message = dict[str, Any]


class WireError(Exception):
    """The peer violated the protocol."""


class Lines:
    """A parser that turns received bytes into messages, one per line."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self.longest = longest
        self._partial: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes.

        Raises:
            WireError: If a line is too long, or not a JSON object.
        """
        first, *more = data.split(b"\n")
        self._size += len(first)
        if self._size > self.longest or any(len(line) > self.longest for line in more):
            raise WireError("a line without end")
        self._partial.append(first)
        if not more:
            return []
        *whole, last = b"".join(self._partial), *more
        self._partial, self._size = [last], len(last)
        return [_parse_line(line) for line in whole]


def _parse_line(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {line[:40]!r}") from error
    if not isinstance(message, dict):
        raise WireError(f"not a JSON object: {line[:40]!r}")
    return message


class Wire:
    """One end of a connection; `send` is thread-safe."""

    def __init__(self, sock: socket.socket, longest: int = LONGEST_LINE) -> None:
        self.socket = sock
        self.lines = Lines(longest)
        self._ready: list[Message] = []
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> bool:
        """Send a message; return False if the peer is gone, or does not read."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                self.socket.settimeout(_SEND_PATIENCE)
                self.socket.sendall(data)
                return True
            except OSError:
                return False

    def receive(self) -> Message | None:
        """Wait for the next message; return None when the connection is closed.

        Raises:
            WireError: If the peer violates the protocol.
        """
        while not self._ready:
            data = self._read()
            if not data:
                return None
            self._ready += self.lines.feed(data)
        return self._ready.pop(0)

    def receive_within(self, seconds: float) -> Message | None:
        """Wait up to ``seconds`` for the next message; None on timeout or a closed connection.

        Raises:
            WireError: If the peer violates the protocol.
        """
        deadline = time.monotonic() + seconds
        # Not `select.select`, which supports descriptors below 1,024 only.
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            while not self._ready:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                if not (data := self._read()):
                    return None
                self._ready += self.lines.feed(data)
        return self._ready.pop(0)

    def read_available(self) -> list[Message] | None:
        """Read once; return the completed messages, or None when the connection is closed.

        Raises:
            WireError: If the peer violates the protocol.
        """
        data = self._read()
        return self.lines.feed(data) if data else None

    def _read(self) -> bytes:
        while True:
            try:
                return self.socket.recv(65536)
            except TimeoutError:  # `send` sets a timeout on the shared socket
                continue
            except OSError:
                return b""

    def forget(self) -> None:
        """Close this process's descriptor only, as the connection belongs to another process."""
        self.socket.close()

    def close(self) -> None:
        """Shut the connection down; this wakes a thread that is blocked in `receive`."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def nonce() -> str:
    """Return a random challenge, to be used once."""
    return secrets.token_hex(16)


def proof(token: str, who: str, mine: str, theirs: str) -> str:
    """Return the prover's answer to a challenge.

    Args:
        token: The shared secret.
        who: The prover's role; part of the proof, which cannot be reflected to its sender.
        mine: The verifier's nonce.
        theirs: The prover's nonce.
    """
    text = f"replicax {who} {mine} {theirs}".encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def is_proof(candidate: Any, token: str, who: str, mine: str, theirs: str) -> bool:
    """Compare a proof in constant time."""
    return isinstance(candidate, str) and hmac.compare_digest(
        candidate.encode(), proof(token, who, mine, theirs).encode()
    )


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def bound_address(address: str, bind: str | None) -> str:
    """Return the address to listen at, for one that is announced as ``address``."""
    if bind is None:
        return address
    return f"{f'[{bind}]' if ':' in bind else bind}:{split_address(address)[1]}"


def listen(address: str) -> socket.socket:
    """Return a socket that listens at ``address``.

    Raises:
        OSError: If the address is in use, or does not belong to this machine.
    """
    host, port = split_address(address)
    family, kind, protocol, _, place = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(256)
    except OSError:
        listener.close()
        raise
    return listener


def free_ports(count: int) -> list[int]:
    """Return ``count`` ports of the loopback address that are not in use."""
    found: list[int] = []
    while len(found) < count:
        # Outside the ephemeral range, from which the system assigns ports to outgoing connections.
        port = 12_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), listen(f"127.0.0.1:{port}"):
            if port not in found:
                found.append(port)
    return found


ROLES = ("worker", "reader", "launcher")
MOST_STRANGERS = 64
MOST_READERS = 8
PROVE_WITHIN = 10.0  # seconds
LONGEST_PROOF = 4096  # bytes


@dataclass
class Connection:
    """A connection to the hub: first unauthenticated, then a worker's, reader's or launcher's."""

    wire: Wire
    challenge: str
    peer: str = ""
    trusted: bool = False
    reads: bool = False  # a reader's
    launches: bool = False  # a launcher's; ``host`` is its host index once announced
    host: int | None = None
    unsent: bytes = b""  # the rest of a reader's last message
    index: int | None = None
    candidate: int | None = None  # the index of a worker that joins, before it takes part
    since: float = field(default_factory=time.monotonic)


class Acceptor:
    """The listening socket, and the connections that it accepted."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.connections: dict[socket.socket, Connection] = {}
        self.rejected_peers: list[str] = []  # hosts that sent a wrong proof
        self._token = token
        self._listener = listener
        self._is_open = True
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)

    def poll(self, patience: float) -> list[Connection]:
        """Wait up to ``patience`` seconds; accept connections, return those with data to read."""
        found = []
        for key, _ in self.selector.select(patience):
            if key.fileobj is self._listener:
                self._accept()
            elif connection := self.connections.get(key.fileobj):  # type: ignore[call-overload]
                found.append(connection)
        return found

    def prove(self, connection: Connection, message: Message) -> None:
        """Verify a peer's proof, and send ours.

        Raises:
            WireError: If the proof is wrong.
        """
        theirs, mine = str(message.get("nonce")), connection.challenge
        role = str(message.get("role")) if message.get("role") in ROLES else "worker"
        if not is_proof(message.get("proof"), self._token, role, mine, theirs):
            connection.wire.send({"refused": "token"})
            self.rejected_peers = [*self.rejected_peers[-9:], connection.peer]
            raise WireError("a wrong proof")
        connection.trusted, connection.reads = True, role == "reader"
        connection.launches = role == "launcher"
        connection.wire.send({"proof": proof(self._token, "hub", theirs, mine)})
        if not connection.reads:
            connection.wire.lines.longest = LONGEST_LINE
        elif len(self.readers()) > MOST_READERS:
            self.disconnect(self.readers()[0])

    def drop_stale(self) -> None:
        """Close connections that have not joined in time."""
        late = time.monotonic() - PROVE_WITHIN
        for connection in self._waiting():
            if connection.since < late:
                self.disconnect(connection)

    def disconnect(self, connection: Connection) -> None:
        """Close a connection."""
        sock = connection.wire.socket
        if self.connections.pop(sock, None) is not None:
            self.selector.unregister(sock)
        connection.wire.close()

    def close(self) -> None:
        """Stop listening, which frees the address for the next run."""
        if self._is_open:
            self._is_open = False
            self.selector.unregister(self._listener)
            self._listener.close()

    def broadcast(self, message: Message) -> None:
        """Send a message to all workers that have joined."""
        for connection in list(self.connections.values()):
            if connection.index is not None:
                connection.wire.send(message)

    def greet(self) -> None:
        """Let workers know that the hub lives, also those that are joining."""
        for connection in list(self.connections.values()):
            if connection.index is not None or connection.candidate is not None:
                connection.wire.send({"pong": 0})

    def readers(self) -> list[Connection]:
        """Return the connections of readers, oldest first."""
        return [v for v in self.connections.values() if v.reads]

    def _accept(self) -> None:
        """Accept a connection and send its challenge; drop the oldest if there are too many."""
        if not self._is_open:
            return
        try:
            sock, peer = self._listener.accept()
        except BlockingIOError:  # the peer has disconnected already
            return
        except OSError:  # for example, out of file descriptors
            self._make_room()
            return
        sock.setblocking(True)
        try:
            connection = Connection(Wire(sock, LONGEST_PROOF), nonce(), str(peer[0]))
            self.connections[sock] = connection
            self.selector.register(sock, selectors.EVENT_READ)
        except OSError:
            self.connections.pop(sock, None)
            sock.close()
            return
        connection.wire.send({"challenge": connection.challenge})
        if len(self._waiting()) > MOST_STRANGERS:
            self._make_room()

    def _make_room(self) -> None:
        """Close the oldest connection that has not joined."""
        waiting = self._waiting()
        if waiting:
            self.disconnect(min(waiting, key=lambda v: v.since))
        else:
            time.sleep(0.05)  # other processes use up the descriptors; do not spin

    def _waiting(self) -> list[Connection]:
        """Return the connections that have not joined yet."""
        unassigned = (v for v in self.connections.values() if v.index is None and v.host is None)
        return [v for v in unassigned if not v.reads and v.candidate is None]


def raise_file_limit(workers: int) -> None:
    """Raise this process's limit of open files to the number it needs, or the maximum allowed."""
    wanted = 2 * workers + 2 * MOST_STRANGERS + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
