"""Wire: JSON lines over a socket, between ends that prove to know the token of the run.

Nothing else is ever read: no pickle, no code. A line has a largest size, and a connection that
sends anything unexpected before it has proved itself is closed.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from typing import Any

LONGEST_LINE = 4 * 1024 * 1024
_SEND_PATIENCE = 5.0

Message = dict[str, Any]


class WireError(Exception):
    """The other end sent what no hub and no worker sends."""


class Lines:
    """Bytes as they come -> messages, one for each line."""

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self.longest = longest
        self._left: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes.

        Raises:
            WireError: If a line is too long, or is not a JSON object.
        """
        first, *more = data.split(b"\n")
        self._size += len(first)
        if self._size > self.longest or any(len(line) > self.longest for line in more):
            raise WireError("a line without end")
        self._left.append(first)
        if not more:
            return []
        *whole, last = b"".join(self._left), *more
        self._left, self._size = [last], len(last)
        return [_parsed(line) for line in whole]


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"no JSON: {line[:40]!r}") from error
    if not isinstance(message, dict):
        raise WireError(f"no JSON object: {line[:40]!r}")
    return message


class Wire:
    """One end of a connection; `send` may be called from several threads."""

    def __init__(self, sock: socket.socket, longest: int = LONGEST_LINE) -> None:
        self.socket = sock
        self.lines = Lines(longest)
        self._ready: list[Message] = []
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> bool:
        """Send a message; False if the other end is gone, or does not read."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                self.socket.settimeout(_SEND_PATIENCE)
                self.socket.sendall(data)
                return True
            except OSError:
                return False

    def receive(self) -> Message | None:
        """The next message, waited for; None when the other end is gone.

        Raises:
            WireError: If it is no message.
        """
        while not self._ready:
            data = self._read()
            if not data:
                return None
            self._ready += self.lines.feed(data)
        return self._ready.pop(0)

    def receive_within(self, seconds: float) -> Message | None:
        """The next message; None when the other end is gone, or says nothing for so long.

        Raises:
            WireError: If it is no message.
        """
        deadline = time.monotonic() + seconds
        # Not `select`, which knows 1,024 file descriptors only.
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            while not self._ready:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                if not (data := self._read()):
                    return None
                self._ready += self.lines.feed(data)
        return self._ready.pop(0)

    def arrived(self) -> list[Message] | None:
        """The messages that can be read now; None when the other end is gone.

        Raises:
            WireError: If one is no message.
        """
        data = self._read()
        return self.lines.feed(data) if data else None

    def _read(self) -> bytes:
        while True:
            try:
                return self.socket.recv(65536)
            except TimeoutError:  # the limit that `send` set
                continue
            except OSError:
                return b""

    def forget(self) -> None:
        """Close this process's end of it only: it is another process's connection."""
        self.socket.close()

    def close(self) -> None:
        """End the connection; a thread that waits in `receive` wakes up."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def nonce() -> str:
    """A number that nobody can guess, and that is used once."""
    return secrets.token_hex(16)


def proof(token: str, who: str, mine: str, theirs: str) -> str:
    """What only one who knows ``token`` can answer to a nonce."""
    text = f"replicax {who} {mine} {theirs}".encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def is_proof(given: Any, token: str, who: str, mine: str, theirs: str) -> bool:
    """Whether ``given`` is that answer; takes as long for a wrong one."""
    return isinstance(given, str) and hmac.compare_digest(
        given.encode(), proof(token, who, mine, theirs).encode()
    )


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` as a pair; an IPv6 host may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """A socket that listens at just this address.

    Raises:
        OSError: If it is taken, or not this machine's.
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
    """Ports of the loopback address on which nobody listens."""
    found: list[int] = []
    while len(found) < count:
        # Not one of those that the system hands out by itself to whoever connects somewhere.
        port = 12_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), listen(f"127.0.0.1:{port}"):
            if port not in found:
                found.append(port)
    return found
