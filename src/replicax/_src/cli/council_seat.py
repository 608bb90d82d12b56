"""A launcher's side of the agreement among launchers; see `replicax._src.workers.council`."""

import contextlib
import socket
import threading

from replicax._src.cluster.checks import RollCallError
from replicax._src.workers import wire as _wire
from replicax._src.workers.council import PATIENCE
from replicax._src.workers.join import prove
from replicax._src.workers.wire import Message, Wire

_RETRY = 0.1
_LAST_WORD = 10.0  # seconds in which a failed launcher tries to report to the hub before it exits


class CouncilSeat:
    """A launcher's connection to the hub of the current attempt.

    Args:
        address: The address of the hub, which may start later.
        token: The token of the run.
        host: The index of this launcher's host.
    """

    def __init__(self, address: str, token: str, host: int) -> None:
        self._address = address
        self._token = token
        self._host = host
        self._wire: Wire | None = None
        self._unsent: list[Message] = []
        self._is_over, self._is_connected = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._connect, name="replicax-seat", daemon=True)
        self._thread.start()

    def report_exit(self, story: str) -> None:
        """Report the exit of a worker of this host, so that others do not wait for it to join."""
        self._send({"ended": story})

    def decide(self, code: int, *, again: bool) -> tuple[str, list[int] | None]:
        """Agree with the other launchers on whether to restart.

        Args:
            code: The exit code of this host's workers.
            again: Whether this launcher would restart them.

        Returns:
            Why the workers are not restarted, "" if they are; and the hosts that take part in the
            restart, None for all of them.
        """
        is_sent = self._send({"again": again, "code": code})
        if code:
            self._is_connected.wait(_LAST_WORD)
        if not again:
            return "this launcher has ended", None
        if self._wire is None:
            return f"no hub was at {self._address}: the launcher of host 0 did not come", None
        with contextlib.suppress(_wire.WireError):
            while is_sent and (message := self._wire.receive_within(PATIENCE)) is not None:
                if "all" in message:
                    why = "" if message["all"] else str(message.get("why"))
                    return why, message.get("hosts")
        return "", None  # the hub is lost; restart, as its host may come back

    def end(self) -> None:
        """Close the connection."""
        self._is_over.set()
        self._thread.join()
        if self._wire is not None:
            self._wire.close()

    def _send(self, message: Message) -> bool:
        with self._lock:
            if self._wire is None:
                self._unsent.append(message)
                return True
        return self._wire.send(message)

    def _connect(self) -> None:
        """Connect to the hub, retrying until it is there."""
        while not self._is_over.is_set():
            with contextlib.suppress(OSError, RollCallError):
                wire = Wire(socket.create_connection(_wire.split_address(self._address), timeout=2))
                prove(wire, self._token, self._address, role="launcher")
                with self._lock:
                    for message in ({"launcher": self._host}, *self._unsent):
                        wire.send(message)
                    self._wire = wire
                self._is_connected.set()
                return
            self._is_over.wait(_RETRY)
