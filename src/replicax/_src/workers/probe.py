"""A check that the workers' machines can reach each other at the ports that JAX will use.

Only the port of the hub is known in advance. JAX's coordination service listens on the hub's
machine, and XLA's CPU collectives (Gloo) and NCCL listen on every machine, at ephemeral ports.
Behind a firewall, JAX waits two minutes for them and then aborts the process. So each worker first
listens at such a port itself, and the others try to connect.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from replicax._src.cluster.checks import RollCallError
from replicax._src.workers import wire
from replicax._src.workers.group import Group

PROBE_VARIABLE = "REPLICAX_PROBE"
_PATIENCE = 5.0
_MOST_THREADS = 32
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def listen_host(group: Group) -> str:
    """Return the address of this machine at which this worker's collectives listen.

    This is the worker's address in the cluster. If it does not belong to this machine, because of
    address translation or a scheduler that places the workers in another order, it is the local end
    of the connection to the hub.
    """
    named = group.facts.addresses[group.facts.index] if group.facts.addresses else None
    if named is None:
        return group.local_host
    host = wire.split_address(named)[0]
    try:
        wire.listen(_address(host, 0)).close()
    except OSError:
        return group.local_host
    return host


def require_reachable(group: Group, service: str, host: str) -> None:
    """Connect every worker to one worker of each other machine, and to JAX's service.

    All workers call this together. Workers of the same machine are not probed, as no firewall lies
    between them.

    Args:
        group: The workers.
        service: The address of JAX's coordination service; "" if it is not known yet.
        host: The address of this worker's machine, where its collectives will listen.

    Raises:
        RollCallError: If a connection fails. Every worker raises the same error, which lists all
            failures.
    """
    if os.environ.get(PROBE_VARIABLE) == "0":
        # The other workers may have no such setting, and wait for these exchanges.
        group.exchange("probe", None, lambda: False)
        group.exchange("probed", [], lambda: False)
        return
    with wire.listen(_address(host, 0)) as listener:
        mine = _address(host, listener.getsockname()[1])
        addresses = group.exchange("probe", mine, lambda: False)
        targets = [(f"worker {i}", address) for i, address in _one_of_each_host(addresses, host)]
        if service and wire.split_address(service)[0] != host:
            targets.append(("JAX's coordination service", service))
        faults = _failures(group.describe(group.facts.index), targets)
        # Also a barrier: the listener stays open until all have tried to connect.
        found = group.exchange("probed", faults, lambda: False)
    faults = [fault for one in found for fault in one]
    if faults:
        raise RollCallError(_explain(faults))


def _one_of_each_host(addresses: Sequence[str | None], own: str) -> Iterator[tuple[int, str]]:
    """Yield the index and address of the first listening worker on each other machine."""
    seen = {own}
    for index, address in enumerate(addresses):
        if address is not None and (host := wire.split_address(address)[0]) not in seen:
            seen.add(host)
            yield index, address


def _failures(who: str, targets: Sequence[tuple[str, str]]) -> list[str]:
    """Connect to all targets concurrently; return a description of each failure."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), _MOST_THREADS)) as pool:
        results = pool.map(_connection_error, [address for _, address in targets])
        return [
            f"{who} cannot connect to {name} at {address}: {fault}"
            for (name, address), fault in zip(targets, results, strict=True)
            if fault
        ]


def _connection_error(address: str) -> str:
    try:
        socket.create_connection(wire.split_address(address), _PATIENCE).close()
    except TimeoutError:
        return f"no answer within {_PATIENCE:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _explain(faults: Sequence[str]) -> str:
    shown = faults[:4]
    more = f", and {len(faults) - len(shown)} more" if len(faults) > len(shown) else ""
    try:
        first, last = _RANGE_FILE.read_text().split()
        ports = f"{first} to {last} on this machine (net.ipv4.ip_local_port_range)"
    except (OSError, ValueError):
        ports = "any free port"
    return (
        f"The workers cannot reach each other: {'; '.join(shown)}{more}. JAX's CPU collectives and"
        f" NCCL listen at ports that the system chooses, {ports}, and the coordination service too,"
        " unless REPLICAX_SERVICE_PORT names its port. Open these ports between the machines, or"
        f" correct the addresses of the cluster. {PROBE_VARIABLE}=0 skips this test, for machines"
        " whose collectives do not use TCP."
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
