"""What replicax asks of jaxlib's inside; each use is guarded and tested.

It is apart from `_jax_private` because it must not import JAX: the keeper, a process that holds the
coordination service and does nothing else, needs this and no more.
"""

import contextlib
from typing import Any

_jaxlib: Any = None
with contextlib.suppress(ImportError):
    from jaxlib import _jax as _jaxlib  # type: ignore[no-redef]

_NEVER = 1_000_000  # seconds without a sign of life: replicax watches its workers itself


def coordination_service(address: str, size: int) -> Any:
    """The service at ``address``, through which ``size`` processes find each other.

    Returns:
        What keeps it alive; None if this jaxlib offers no way.
    """
    new: Any = getattr(_jaxlib, "get_distributed_runtime_service", None)
    if new is None:  # pragma: no cover - a jaxlib that moved it
        return None
    return new(
        address,
        size,
        heartbeat_timeout=_NEVER,
        shutdown_timeout=5,
        cluster_register_timeout=300,
        recoverable=True,
    )


def can_connect() -> bool:
    """Whether this jaxlib has what `connected_client` and `tcp_collectives` need."""
    names = ("get_distributed_runtime_client", "make_gloo_tcp_collectives")
    return all(hasattr(_jaxlib, name) for name in names)


def connected_client(service: str, index: int, patience: int) -> Any:
    """Process number ``index`` at the service of that address, connected in ``patience`` s."""
    client = _jaxlib.get_distributed_runtime_client(
        service,
        index,
        init_timeout=patience,
        heartbeat_timeout=_NEVER,
        shutdown_timeout=5,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    return client


def tcp_collectives(client: Any, hostname: str) -> Any:
    """The collectives of CPUs, with sockets that are bound to ``hostname`` only."""
    return _jaxlib.make_gloo_tcp_collectives(distributed_client=client, hostname=hostname)
