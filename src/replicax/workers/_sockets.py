"""What collectives do below Python: the sockets that they wait on, and what they print.

XLA's CPU collectives run over TCP connections that Gloo opens inside this process, and wait on them
without a deadline. Closing them from another thread ends the wait with an error.
"""

import os
import re
import select
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

_LISTINGS = ("/proc/self/fd", "/dev/fd")
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 25_000}

# What Gloo tells each worker when it has reached the others.
GLOO_GREETING = re.compile(rb"\[Gloo\] Rank \d+ is connected")


@contextmanager
def unheard(stream: int, noise: re.Pattern[bytes]) -> Iterator[None]:
    """Leave out the lines that a library writes by itself to a stream while the block runs.

    Args:
        stream: 1 for the standard output, 2 for errors. All else that goes there in the meantime is
            written when the block ends.
        noise: What a line has in it that is left out.
    """
    with suppress(AttributeError, ValueError, OSError):  # a stream that is closed, or replaced
        (sys.stdout if stream == 1 else sys.stderr).flush()
    try:
        usual = os.dup(stream)
    except OSError:  # a program without that stream
        yield
        return
    with open(usual, "wb") as true_one, tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), stream)
        try:
            yield
        finally:
            os.dup2(usual, stream)
            kept.seek(0)
            with suppress(OSError):  # nobody reads it
                true_one.writelines(line for line in kept if not noise.search(line))
                true_one.flush()


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


def is_connected(descriptor: int) -> bool:
    """Whether the other end of a connection has not been closed."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    return not poll.poll(0)


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
