"""Sockets of collectives: how to end a collective that waits for a worker that is gone.

XLA's CPU collectives run over TCP connections that Gloo opens inside this process, and wait on them
without a deadline. Closing them from another thread ends the wait with an error.
"""

import os
import socket
from collections.abc import Collection, Iterator

_LISTINGS = ("/proc/self/fd", "/dev/fd")
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 25_000}


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    return {s.getsockname()[1] for s in _own_sockets() if _listens(s)}


def connections(port: int) -> int:
    """How many connections this process has at its own port ``port``, if their ends still answer.

    The system is asked to see whether they do: one that does not is closed within half a minute.
    """
    count = 0
    for s in _own_sockets():
        if not _listens(s) and s.getsockname()[1] == port:
            _keep_alive(s)
            count += 1
    return count


def copies(port: int) -> Iterator[tuple[int, int]]:
    """The connections of `connections`: a number of each, and a new descriptor of it."""
    for s in _own_sockets():
        if not _listens(s) and s.getsockname()[1] == port:
            yield os.fstat(s.fileno()).st_ino, os.dup(s.fileno())


def _keep_alive(s: socket.socket) -> None:
    """Have the system close the connection if the other end does not answer any more."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):
            s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def cut(ports: Collection[int]) -> int:
    """End this process's connections from or to ``ports``; how many there were."""
    count = 0
    for s in _own_sockets():
        try:
            if _listens(s) or not {s.getsockname()[1], s.getpeername()[1]} & set(ports):
                continue
            s.shutdown(socket.SHUT_RDWR)
            count += 1
        except OSError:  # not connected, or gone by now
            continue
    return count


def _own_sockets() -> Iterator[socket.socket]:
    listing = next((d for d in _LISTINGS if os.path.isdir(d)), None)
    for name in os.listdir(listing) if listing else ():
        try:
            descriptor = os.dup(int(name))
        except OSError:  # the listing itself, closed by now
            continue
        try:
            copy = socket.socket(fileno=descriptor)
        except OSError:  # no socket
            os.close(descriptor)
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                yield copy


def _listens(s: socket.socket) -> bool:
    return bool(s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
