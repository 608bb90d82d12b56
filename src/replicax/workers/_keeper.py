"""Keeper: the process that holds JAX's coordination service, and does nothing else.

JAX ends every process whose coordination service disappears. So the service lives in a process
that nothing else can bring down, and that ends when no worker is connected to it any more: if the
hub is lost, the workers can still say so, save what they have, and end in good order.
"""

import importlib
import os
import signal
import time
from typing import Any

from replicax.workers import _sockets, _wire

_LINGER = 3.0  # seconds without hub and without workers


def start_keeper(host: str, size: int, *inherited: Any) -> str:
    """Start the service on a free port of ``host``, in a process of its own; its address.

    Args:
        host: Where workers reach it.
        size: How many they are.
        *inherited: Sockets of the caller's that the new process must not keep.
    """
    heard, says = os.pipe()
    watched, held = os.pipe()  # the keeper sees the end of it when the hub ends
    if os.fork() == 0:
        for sock in inherited:
            sock.close()
        os.close(heard)
        os.close(held)
        _keep(host, size, says, watched)
    os.close(says)
    os.close(watched)
    with os.fdopen(heard) as reader:
        return reader.read()


def _keep(host: str, size: int, says: int, watched: int) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    try:
        service, address = _service(host, size)
        os.write(says, address.encode())
        os.close(says)
        os.read(watched, 1)  # until the hub ends
        last_seen = time.monotonic()
        port = _wire.split_address(address)[1]
        while time.monotonic() - last_seen < _LINGER:
            if _sockets.connections(port):  # one whose other end is silent is closed in time
                last_seen = time.monotonic()
            time.sleep(0.2)
        del service
    finally:
        os._exit(0)  # the service's threads need no farewell


def _service(host: str, size: int) -> tuple[Any, str]:
    # For this process only: it takes a while.
    _jax: Any = importlib.import_module("jaxlib._jax")

    with _wire.listen(f"{host}:0") as free:
        port = free.getsockname()[1]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    service = _jax.get_distributed_runtime_service(
        address,
        size,
        heartbeat_timeout=1_000_000,
        shutdown_timeout=5,
        cluster_register_timeout=300,
        recoverable=True,
    )
    return service, address
