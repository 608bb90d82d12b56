"""All uses of jaxlib internals, each guarded and tested.

This is separate from `compat.jax` because it must not import JAX: the keeper, a process that only
runs the coordination service, needs nothing else.
"""

import contextlib
from typing import Any

_jaxlib: Any = None
with contextlib.suppress(ImportError):
    from jaxlib import _jax as _jaxlib  # type: ignore[no-redef]

NEVER = 1_000_000  # seconds: disables jaxlib's heartbeats, because replicax watches its workers


def coordination_service(address: str, size: int) -> Any:
    """Start a coordination service at ``address`` for ``size`` processes.

    Returns:
        An object that keeps the service alive; None if this jaxlib does not support it.
    """
    new: Any = getattr(_jaxlib, "get_distributed_runtime_service", None)
    if new is None:  # pragma: no cover - a jaxlib that moved it
        return None
    return new(
        address,
        size,
        heartbeat_timeout=NEVER,
        shutdown_timeout=5,
        cluster_register_timeout=300,
        recoverable=True,
    )


def can_connect() -> bool:
    """Whether this jaxlib supports `connected_client` and `tcp_collectives`."""
    names = ("get_distributed_runtime_client", "make_gloo_tcp_collectives")
    return all(hasattr(_jaxlib, name) for name in names)


def connected_client(service: str, index: int, patience: int) -> Any:
    """Connect process ``index`` to the service within ``patience`` seconds; return the client."""
    client = _jaxlib.get_distributed_runtime_client(
        service,
        index,
        init_timeout=patience,
        heartbeat_timeout=NEVER,
        shutdown_timeout=5,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    return client


def tcp_collectives(client: Any, hostname: str) -> Any:
    """Return CPU collectives over TCP, whose sockets are bound to ``hostname`` only."""
    return _jaxlib.make_gloo_tcp_collectives(distributed_client=client, hostname=hostname)
