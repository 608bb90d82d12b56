"""The sockets of native code in this process.

XLA's CPU collectives run over TCP connections that Gloo opens inside this process, and block on
them without a timeout. Shutting the sockets down from another thread makes the blocked call fail.
"""

import os
import select
import socket
from collections.abc import Collection, Iterator

_LISTINGS = ("/proc/self/fd", "/dev/fd")
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 25_000}


def listening_ports() -> set[int]:
    """Return the TCP ports on which this process listens."""
    return {s.getsockname()[1] for s in _own_sockets() if _listens(s)}


def connections(port: int) -> int:
    """Return how many connections this process has on its port ``port``.

    Also enables TCP keepalive on them, so that the system closes a connection within half a minute
    if its peer no longer answers.
    """
    count = 0
    for s in _own_sockets():
        if not _listens(s) and s.getsockname()[1] == port:
            _keep_alive(s)
            count += 1
    return count


def duplicates(port: int) -> Iterator[tuple[int, int]]:
    """Yield the inode and a duplicate descriptor of each connection on this process's ``port``."""
    for s in _own_sockets():
        if not _listens(s) and s.getsockname()[1] == port:
            yield os.fstat(s.fileno()).st_ino, os.dup(s.fileno())


def is_connected(descriptor: int) -> bool:
    """Whether the peer of a connection has not closed it."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    return not poll.poll(0)


def _keep_alive(s: socket.socket) -> None:
    """Let the system close the connection if its peer no longer answers."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def cut(ports: Collection[int]) -> int:
    """Shut down this process's connections from or to ``ports``; return how many."""
    count = 0
    for s in _own_sockets():
        try:
            if _listens(s) or not {s.getsockname()[1], s.getpeername()[1]} & set(ports):
                continue
            s.shutdown(socket.SHUT_RDWR)
            count += 1
        except OSError:  # not connected, or closed in the meantime
            continue
    return count


def _own_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every TCP socket of this process."""
    listing = next((d for d in _LISTINGS if os.path.isdir(d)), None)
    for name in os.listdir(listing) if listing else ():
        try:
            descriptor = os.dup(int(name))
        except OSError:  # the listing's own descriptor, which is closed by now
            continue
        try:
            duplicate = socket.socket(fileno=descriptor)
        except OSError:  # no socket
            os.close(descriptor)
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                yield duplicate


def _listens(s: socket.socket) -> bool:
    return bool(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
