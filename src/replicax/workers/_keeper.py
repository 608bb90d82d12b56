"""Keeper: the process that holds JAX's coordination service, and does nothing else.

JAX ends every process whose coordination service disappears. So the service lives in a process
that nothing else can bring down, and that ends when no worker is connected to it any more: if the
hub is lost, the workers can still say so, save what they have, and end in good order.
"""

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from replicax._lazy import LazyModule
from replicax.workers import _sessions, _sockets, _wire

if TYPE_CHECKING:
    from replicax import _jaxlib_private
else:
    # Loaded by the keeper's own process only: it takes a while, and the hub has no need of it.
    _jaxlib_private = LazyModule("replicax._jaxlib_private")

_LINGER = 3.0  # seconds without hub and without workers
_LONGEST = 600.0  # seconds that workers may take to save what they have and end; one may be stopped
_LAST_ONES = 30.0  # seconds that workers may take to end after they have said goodbye
_LOOK_EVERY = 0.2
_TELL_EVERY = 1.0
_SILENCE = 4 * _TELL_EVERY  # what is no silence
_OVER, _HERE, _PIDS, _FAULT = b".", b"h", b"p", b"!"


class Keeper:
    """The keeper, seen from the hub, which is its parent.

    Attributes:
        address: Where workers reach the service; "" if there is none.
        fault: Why the service could not start; "" if it did, or if this JAX has none.
    """

    def __init__(
        self,
        host: str,
        size: int,
        *inherited: socket.socket,
        bind: str | None = None,
        port: int = 0,
    ) -> None:
        """Start the service in a process of its own.

        Args:
            host: Where workers reach it.
            size: How many they are.
            *inherited: Sockets of the caller's that the new process must not keep.
            bind: The host at which it listens; None for ``host``.
            port: Its port; 0 for a free one.
        """
        self._pipe, far = socket.socketpair()
        self._copies: list[int] = []
        self.pid = os.fork()
        if self.pid == 0:
            for sock in (*inherited, self._pipe):
                sock.close()
            _keep(partial(_service, host, size, bind, port), size, far)
        far.close()
        told = self._pipe.recv(1024)  # nothing where JAX has no such service
        self.fault = told.removeprefix(_FAULT).decode() if told.startswith(_FAULT) else ""
        self.address = "" if self.fault else told.decode()
        self._is_alive = bool(self.address)
        self._pipe.setblocking(False)
        self._silent, self._looked = 0.0, time.monotonic()

    def why_lost(self, patience: float) -> str:
        """Why it cannot be used any more, said once; called often.

        The keeper hands over a copy of each of its connections. While the hub holds them, they do
        not close when the keeper is killed, and JAX does not abort the workers: they can be told.

        Args:
            patience: Seconds that it may be silent.
        """
        now = time.monotonic()
        # A time in which this process is stopped does not count.
        self._silent, self._looked = self._silent + min(now - self._looked, 1.0), now
        with contextlib.suppress(OSError):
            while True:
                data, copies, _, _ = socket.recv_fds(self._pipe, 64, 16)
                self._copies += copies
                if not data:
                    break
                self._silent = 0.0
        if not self._is_alive:
            return ""
        self._is_alive = os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        if not self._is_alive:
            return "it was killed, or crashed"
        if self._silent < max(patience, _SILENCE):
            return ""
        self._is_alive = False
        os.kill(self.pid, signal.SIGKILL)
        return f"it was ended, as it had not answered for {patience:.0f} s: it was stopped"

    def watch(self, members: list[dict[str, Any]]) -> None:
        """Have it know the workers, if all are processes of this machine.

        Then it need not wait for the connection of one that is dead: where the network is down,
        that stays open for minutes.
        """
        pids = [m["pid"] for m in members if m.get("host") == socket.gethostname()]
        if len(pids) == len(members) and all(map(_sessions.is_running, pids)):
            with contextlib.suppress(OSError):
                self._pipe.send(_PIDS + json.dumps(pids).encode())

    def end(self) -> None:
        """End it as soon as no process is connected to it, and wait for that.

        If it was killed, the copies are what keeps JAX from aborting those that are still ending.
        """
        with contextlib.suppress(OSError):
            self._pipe.send(_OVER)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        until = time.monotonic() + _LAST_ONES
        while time.monotonic() < until and any(map(_sockets.is_connected, self._copies)):
            time.sleep(_LOOK_EVERY)


def _keep(start_service: Callable[[], tuple[Any, str]], size: int, hub: socket.socket) -> None:
    os.setsid()
    _sessions.ignore_notices()  # the workers leave first
    _sessions.name_process(f"replicax keeper of JAX's coordination service, for hub {os.getppid()}")
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    try:
        try:
            service, address = start_service()
        except Exception as error:
            hub.send(_FAULT + str(error).encode()[:1000])
            raise
        hub.send(address.encode())
        port = _wire.split_address(address)[1]
        is_over, pids = _serve_hub(hub, port, size)
        linger = 0.0 if is_over else _LINGER
        last_seen = time.monotonic()
        until = last_seen + _LONGEST
        # One that has said goodbye to the hub may still be ending, and JAX would abort it.
        while (there := _is_used(port, pids)) or time.monotonic() - last_seen < linger:
            if there:  # one whose other end is silent is closed in time
                last_seen = time.monotonic()
            if last_seen > until:
                break
            time.sleep(_LOOK_EVERY)
        del service
    finally:
        os._exit(0)  # the service's threads need no farewell


def _is_used(port: int, pids: list[int]) -> bool:
    """Whether a worker may still need the service."""
    return bool(_sockets.connections(port)) and (not pids or any(map(_sessions.is_running, pids)))


def _serve_hub(hub: socket.socket, port: int, size: int) -> tuple[bool, list[int]]:
    """Hand copies of all connections to the hub until it ends.

    Returns:
        Whether it said that all is over, and the workers that it told of.
    """
    given: set[int] = set()
    pids: list[int] = []
    while True:
        hub.settimeout(_LOOK_EVERY if len(given) < size else _TELL_EVERY)
        try:
            told = hub.recv(1 << 20)
            if not told.startswith(_PIDS):
                return told == _OVER, pids
            pids = json.loads(told.removeprefix(_PIDS).removesuffix(_OVER))
            if told.endswith(_OVER):
                return True, pids
        except TimeoutError:
            pass
        except OSError:
            return False, pids
        with contextlib.suppress(OSError):  # it is stopped, or gone: seen above
            hub.send(_HERE)
            for inode, copy in _sockets.copies(port):
                with os.fdopen(copy, "rb", buffering=0):
                    if inode not in given:
                        socket.send_fds(hub, [b"c"], [copy])
                        given.add(inode)


def _service(host: str, size: int, bind: str | None, port: int) -> tuple[Any, str]:
    shown = f"[{host}]" if ":" in host else host
    with _wire.listen(_wire.bound_address(f"{shown}:{port}", bind)) as free:
        address = f"{shown}:{free.getsockname()[1]}"
    service = _jaxlib_private.coordination_service(_wire.bound_address(address, bind), size)
    return service, address if service is not None else ""
