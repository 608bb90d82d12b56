"""Prometheus metrics of a run, served over plain HTTP on a separate port of the hub.

The hub stores its status once a second, and a thread serves the latest one. Clients on other
machines authenticate with a digest of the run's token; the token itself, which would let them join
the run, is never sent.
"""

import hashlib
import hmac
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast

from replicax._src.workers.wire import Message

_EVERY = 1.0  # seconds between two updates
_PATIENCE = 5.0  # seconds that a client may take for its request
_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Per-worker metrics: name -> (type, key in the hub's status, help text).
_WORKER_METRICS = {
    "steps_total": ("counter", "steps", "Training steps that the worker has finished."),
    "steps_per_second": ("gauge", "rate", "Steps per second, over the last ten seconds."),
    "collectives_total": ("counter", "collectives", "Collectives that the worker has begun."),
    "input_wait_seconds_total": ("counter", "waited", "Seconds of waiting for input."),
    "input_wait_ratio": ("gauge", "waits", "Part of the last ten seconds spent so."),
    "blocked_seconds_total": ("counter", "blocked", "Seconds of waiting in collectives."),
    "mfu_ratio": ("gauge", "mfu", "Model flops utilization, over the last ten seconds."),
    "goodput_ratio": ("gauge", "goodput", "Part of its time in steps after the first."),
    "memory_bytes": ("gauge", "memory", "Resident memory of the worker's process."),
    "device_memory_bytes": ("gauge", "device_memory", "Memory in use on its accelerators."),
    "silent_seconds": ("gauge", "silent", "Seconds since the hub last heard from the worker."),
}
_STATES = ("here", "left", "lost")


class Metrics:
    """An HTTP server for one run's metrics.

    Args:
        listener: The listening socket.
        token: The token of the run.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._text = b""
        self._updated_at = -_EVERY
        self._server = _Server(listener, bearer(token), lambda: self._text)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def note(self, status: Callable[[], Message]) -> None:
        """Store the result of ``status()`` for later requests, at most once per second."""
        now = time.monotonic()
        if now - self._updated_at >= _EVERY:
            self._updated_at = now
            self._text = "".join(f"{line}\n" for line in lines(status())).encode()

    def close(self) -> None:
        """Stop serving requests."""
        self._server.shutdown()


def bearer(token: str) -> str:
    """Return the bearer token that clients on other machines must send, for a run's ``token``.

    Example:
        >>> from replicax._src.workers.prometheus import bearer
        >>> bearer("secret")[:12]  # printf 'replicax metrics %s' secret | sha256sum
        'cd10f8786f76'
    """
    return hashlib.sha256(f"replicax metrics {token}".encode()).hexdigest()


def lines(status: Message) -> Iterator[str]:
    """Yield the lines of Prometheus's text format for a hub's status.

    Example:
        >>> from replicax._src.workers.prometheus import lines
        >>> status = {"size": 2, "seconds": 1.5, "workers": []}
        >>> [line for line in lines(status) if line.startswith("replicax_workers_expected")]
        ['replicax_workers_expected 2']
    """
    workers = status["workers"]
    yield from _head("run_seconds", "gauge", "Seconds since the hub started.")
    yield f"replicax_run_seconds {status['seconds']:.3f}"
    yield from _head("workers_expected", "gauge", "Workers that the run has.")
    yield f"replicax_workers_expected {status['size']}"
    yield from _head("workers", "gauge", "Workers by state: here, left at their end, or lost.")
    for state in _STATES:
        count = sum(worker["state"] == state for worker in workers)
        yield f'replicax_workers{{state="{state}"}} {count}'
    for name, (kind, key, meaning) in _WORKER_METRICS.items():
        yield from _head(f"worker_{name}", kind, meaning)
        for worker in workers:
            labels = f'worker="{worker["index"]}",host="{_escaped(worker["host"])}"'
            yield f"replicax_worker_{name}{{{labels}}} {float(worker.get(key, 0.0)):.17g}"


def _head(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP replicax_{name} {meaning}"
    yield f"# TYPE replicax_{name} {kind}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Server(HTTPServer):
    """A server that handles one request at a time, with a short timeout, to limit its load."""

    def __init__(self, listener: socket.socket, bearer: str, text: Callable[[], bytes]) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.bearer, self.text = bearer, text

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a client that disconnects is not an error of the run."""


class _Handler(BaseHTTPRequestHandler):
    """A request handler for ``GET /metrics``."""

    timeout = _PATIENCE

    def do_GET(self) -> None:
        """Serve `/metrics` to local clients, and to others that send the right bearer token."""
        server = cast("_Server", self.server)
        if not self._is_authorized(server.bearer):
            self._answer(401, b"The digest of the run's token is missing or wrong.\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, b"There is only /metrics.\n")
        else:
            self._answer(200, server.text())

    def _is_authorized(self, bearer: str) -> bool:
        if ipaddress.ip_address(self.client_address[0].partition("%")[0]).is_loopback:
            return True
        authorization = self.headers.get("Authorization", "")
        return hmac.compare_digest(authorization.encode(), f"Bearer {bearer}".encode())

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        if code == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""
