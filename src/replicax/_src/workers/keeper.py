"""A dedicated process for JAX's coordination service.

JAX aborts every process that loses its connection to the coordination service. The service
therefore runs in a process that does nothing else, and that exits only after the last worker has
disconnected: if the hub crashes, the workers can still report it, save a checkpoint and exit.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from replicax._src.base.lazy import LazyModule
from replicax._src.workers import sessions, sockets, wire

if TYPE_CHECKING:
    from replicax._src.compat import jaxlib
else:
    # Loaded only in the keeper process: importing it is slow, and the hub does not need it.
    jaxlib = LazyModule("replicax._src.compat.jaxlib")

_LINGER = 3.0  # seconds to wait for a connection after both the hub and all workers are gone
_LONGEST = 600.0  # seconds to wait for workers that are saving; one of them may be stopped forever
_LAST_ONES = 30.0  # seconds to wait for workers to exit after they have left the hub
_LOOK_EVERY = 0.2
_HEARTBEAT_EVERY = 1.0
_SILENCE = 4 * _HEARTBEAT_EVERY  # seconds without a heartbeat that are always tolerated
# Messages of the hub, which end with a line feed: that the run is over, the workers' process ids,
# and a process to stand in for.
_OVER, _PIDS, _STAND_IN = b".", b"p", b"s"
_HERE, _FAULT = b"h", b"!"


class Keeper:
    """The hub's handle on the keeper, its child process.

    Attributes:
        address: The address of the service; "" if it did not start.
        fault: Why the service could not start; "" if it did, or if this JAX has no such service.
    """

    def __init__(
        self,
        host: str,
        size: int,
        *inherited: socket.socket | int,
        bind: str | None = None,
        port: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Fork the keeper and start the service in it.

        Args:
            host: The host name under which workers reach the service.
            size: The number of workers.
            *inherited: The hub's sockets and descriptors, which the child must close.
            bind: The host to listen at; None for ``host``.
            port: The port to listen at; 0 for a free one.
            meanwhile: Called once a second until the service has started. The child imports JAX's
                library first, which may take longer than workers wait for a silent hub.
        """
        # Also a heartbeat in one direction, and orders in the other; see `_serve_hub`.
        self._pipe, far = socket.socketpair()
        self._duplicates: list[int] = []
        self.pid = os.fork()
        # The child closes the hub's connections: they would stay open when the hub ends, and the
        # workers would not notice that.
        if self.pid == 0:
            for one in (*inherited, self._pipe):
                os.close(one if isinstance(one, int) else one.fileno())
            _run_keeper(partial(_start_service, host, size, bind, port), size, far)
        far.close()
        message = self._first_message(meanwhile)  # empty where JAX has no such service
        self.fault = message.removeprefix(_FAULT).decode() if message.startswith(_FAULT) else ""
        self.address = "" if self.fault else message.decode()
        self._is_alive = bool(self.address)
        self._pipe.setblocking(False)  # from here on a stopped keeper must not block the hub
        self._silent, self._looked = 0.0, time.monotonic()

    def _first_message(self, meanwhile: Callable[[], None]) -> bytes:
        self._pipe.settimeout(_HEARTBEAT_EVERY)
        while True:
            try:
                return self._pipe.recv(1024)
            except TimeoutError:
                meanwhile()

    def why_lost(self, patience: float) -> str:
        """Return why the service has been lost, once, and "" otherwise; the hub polls this.

        The keeper sends the hub a duplicate of each of its connections. While the hub holds these
        open, the workers do not see their connections close when the keeper is killed, so JAX does
        not abort them before the hub has informed them.

        Args:
            patience: Seconds without a heartbeat after which the keeper is killed.
        """
        now = time.monotonic()
        # Count at most 1 s per poll: the hub itself may have been stopped since the last one.
        self._silent, self._looked = self._silent + min(now - self._looked, 1.0), now
        with contextlib.suppress(OSError):
            while True:
                data, duplicates, _, _ = socket.recv_fds(self._pipe, 64, 16)
                self._duplicates += duplicates
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
        os.kill(self.pid, signal.SIGKILL)  # the only signal that ends a stopped process
        return f"it was ended, as it had not answered for {patience:.0f} s: it was stopped"

    def watch(self, members: list[dict[str, Any]]) -> None:
        """Send the keeper the process ids of the workers, if all run on this machine.

        The keeper then need not wait for the connection of a worker that is dead: while the network
        is down, such a connection stays open for minutes.
        """
        pids = [m["pid"] for m in members if m.get("host") == socket.gethostname()]
        if len(pids) == len(members) and all(map(sessions.is_running, pids)):
            with contextlib.suppress(OSError):
                self._pipe.send(_PIDS + json.dumps(pids).encode() + b"\n")

    def stand_in(self, rank: int) -> None:
        """Register with the service in place of a process that will not.

        JAX connects the others only when all have registered; nothing else ends their wait. The
        service accepts a second registration of a process, also later.
        """
        with contextlib.suppress(OSError):
            self._pipe.send(_STAND_IN + str(rank).encode() + b"\n")

    def descriptors(self) -> list[int]:
        """Return the open descriptors of this object: its pipe, and duplicated connections."""
        return [self._pipe.fileno(), *self._duplicates]

    def retire(self) -> None:
        """Ask the keeper to exit once no process is connected to it, without waiting."""
        with contextlib.suppress(OSError):
            self._pipe.send(_OVER + b"\n")

    def is_reaped(self) -> bool:
        """Whether a retired keeper has exited; if so, close the descriptors that the hub holds."""
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                return False
        for descriptor in self._duplicates:
            os.close(descriptor)
        self._duplicates.clear()
        self._pipe.close()
        return True

    def end(self) -> None:
        """Ask the keeper to exit once no process is connected to it, and wait until it has.

        If the keeper was killed, keep the duplicated connections open instead, because JAX would
        abort the workers that are still exiting.
        """
        with contextlib.suppress(OSError):
            self._pipe.send(_OVER + b"\n")
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        until = time.monotonic() + _LAST_ONES
        while time.monotonic() < until and any(map(sockets.is_connected, self._duplicates)):
            time.sleep(_LOOK_EVERY)


def _run_keeper(
    start_service: Callable[[], tuple[Any, str]], size: int, hub: socket.socket
) -> None:
    """Start the service in this process, report to the hub, and exit after the last worker."""
    os.setsid()  # signals to the hub's session must not reach the service
    sessions.ignore_notices()  # a scheduler signals the whole job; the workers must exit first
    sessions.name_process(f"replicax keeper of JAX's coordination service, for hub {os.getppid()}")
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
        port = wire.split_address(address)[1]
        stand_ins = _StandIns(address)
        orders = _Orders(hub, stand_ins)
        _serve_hub(hub, port, size, orders)
        linger = 0.0 if orders.is_over else _LINGER
        last_seen = time.monotonic()
        until = last_seen + _LONGEST
        # A worker that has left the hub may still be exiting, and JAX would abort it.
        while True:
            there = _is_used(port, orders.pids, stand_ins.count)
            if not there and time.monotonic() - last_seen >= linger:
                break
            if there:  # keepalive probes close the connections of peers that no longer answer
                last_seen = time.monotonic()
            if last_seen > until:
                break
            time.sleep(_LOOK_EVERY)
        del service
    finally:
        os._exit(0)  # skip the service's destructors: its threads may block


def _is_used(port: int, pids: list[int], own: int) -> bool:
    """Whether a worker is still connected to the service and, if ``pids`` are known, running.

    Args:
        port: The port of the service.
        pids: The process ids of the workers, or none.
        own: How many of the connections are this process's own.
    """
    is_connected = sockets.connections(port) > own
    return is_connected and (not pids or any(map(sessions.is_running, pids)))


class _StandIns:
    """Registrations in place of lost processes, each in a thread until the others come.

    Attributes:
        count: How many are connected to the service, or about to be.
    """

    def __init__(self, service: str) -> None:
        self.count = 0
        self._service = service
        self._lock = threading.Lock()

    def add(self, rank: int) -> None:
        """Register process ``rank``."""
        with self._lock:
            self.count += 1
        threading.Thread(target=self._register, args=(rank,), daemon=True).start()

    def _register(self, rank: int) -> None:
        with contextlib.suppress(Exception):
            # jaxlib ends the process if a registration takes too long.
            jaxlib.connected_client(self._service, rank, jaxlib.NEVER).shutdown()
        with self._lock:
            self.count -= 1


class _Orders:
    """The hub's messages to the keeper.

    Attributes:
        pids: The workers' process ids, if the hub has sent them.
        is_over: Whether the hub has announced the end of the run.
    """

    def __init__(self, hub: socket.socket, stand_ins: _StandIns) -> None:
        self.pids: list[int] = []
        self.is_over = False
        self._hub = hub
        self._stand_ins = stand_ins
        self._unread = b""

    def follow(self) -> bool:
        """Wait for messages, up to the timeout of the socket; return False if none will follow."""
        try:
            data = self._hub.recv(1 << 20)
        except TimeoutError:
            return True
        except OSError:
            return False
        *messages, self._unread = (self._unread + data).split(b"\n")
        for message in messages:
            if message.startswith(_PIDS):
                self.pids = json.loads(message.removeprefix(_PIDS))
            elif message.startswith(_STAND_IN):
                self._stand_ins.add(int(message.removeprefix(_STAND_IN)))
        self.is_over = _OVER in messages
        return bool(data) and not self.is_over


def _serve_hub(hub: socket.socket, port: int, size: int, orders: _Orders) -> None:
    """Follow the hub's messages until it ends; send it heartbeats and duplicates of connections."""
    sent: set[int] = set()
    # Look often until every worker has connected: the loss of a connection of which the hub has no
    # duplicate would abort its worker. A duplicate has the inode of its socket.
    while True:
        hub.settimeout(_LOOK_EVERY if len(sent) < size else _HEARTBEAT_EVERY)
        if not orders.follow():
            return
        with contextlib.suppress(OSError):  # the hub is stopped or gone, which `follow` notices
            hub.send(_HERE)
            for inode, duplicate in sockets.duplicates(port):
                with os.fdopen(duplicate, "rb", buffering=0):
                    if inode not in sent:
                        socket.send_fds(hub, [b"c"], [duplicate])
                        sent.add(inode)


def _start_service(host: str, size: int, bind: str | None, port: int) -> tuple[Any, str]:
    """Start the coordination service; return it and its address."""
    shown = f"[{host}]" if ":" in host else host
    # JAX's service takes an address and no socket, so find a free port first. If another process
    # takes it in between, the start fails with an error.
    with wire.listen(wire.bound_address(f"{shown}:{port}", bind)) as free:
        address = f"{shown}:{free.getsockname()[1]}"
    service = jaxlib.coordination_service(wire.bound_address(address, bind), size)
    return service, address if service is not None else ""
