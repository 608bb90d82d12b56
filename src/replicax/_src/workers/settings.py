"""Settings of a run: timeouts, ports and the token, from environment variables."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from replicax._src.cluster.checks import ClusterError, parse_address
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.files.paths import local_file

HUB_VARIABLE = "REPLICAX_HUB"
BIND_VARIABLE = "REPLICAX_BIND_ADDRESS"
SERVICE_PORT_VARIABLE = "REPLICAX_SERVICE_PORT"
TOKEN_VARIABLE = "REPLICAX_TOKEN"
TOKEN_FILE_VARIABLE = "REPLICAX_TOKEN_FILE"
METRICS_VARIABLE = "REPLICAX_METRICS_PORT"
# Set by the launcher for a worker that joins a running elastic run.
JOIN_VARIABLE = "REPLICAX_JOIN"
TOO_FEW = 75  # the exit code of an elastic run that has waited in vain for more workers
NOT_NEEDED = 76  # the exit code of a worker that came to join when the run was over

NAME_VARIABLE = "REPLICAX_NAME_TIMEOUT"
_KUBERNETES = "KUBERNETES_SERVICE_HOST"  # in every pod

_DEADLINES = {
    "REPLICAX_JOIN_TIMEOUT": 300.0,
    "REPLICAX_PING_TIMEOUT": 20.0,
    "REPLICAX_STEP_TIMEOUT": 60.0,
    "REPLICAX_DISK_TIMEOUT": 600.0,
    NAME_VARIABLE: 60.0,
}


@dataclass(frozen=True)
class Settings:
    """The settings of a worker, from its environment.

    Attributes:
        hub: The address of a hub that another process, such as the launcher, runs; None if worker 0
            must start one.
        token: The shared secret of the run.
        is_secret: Whether the user chose the token; otherwise it is derived from the cluster.
        join_timeout: Seconds for all workers to join.
        name_timeout: Seconds that the host name of worker 0 may stay unresolved.
        ping_timeout: Seconds without a heartbeat after which a worker is lost.
        step_timeout: Seconds after which a worker that others wait for is lost.
        disk_timeout: Seconds without progress of a checkpoint after which a worker is lost.
        bind: The address at which the hub and JAX's service listen; None for worker 0's.
        service_port: The port of JAX's coordination service; 0 for any free one.
        metrics_port: The port at which the hub serves metrics; None for no metrics.
        joins: Whether this worker joins a run that has begun.
    """

    hub: str | None
    token: str
    is_secret: bool
    join_timeout: float
    name_timeout: float
    ping_timeout: float
    step_timeout: float
    disk_timeout: float
    bind: str | None = None
    service_port: int = 0
    metrics_port: int | None = None
    joins: bool = False

    @classmethod
    def read(cls, facts: ClusterFacts, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Return the settings of this process, or of one with another ``environment``.

        Raises:
            ClusterError: If a variable is invalid.
        """
        hub = environment.get(HUB_VARIABLE) or None
        if hub is not None:
            parse_address(hub, f"The coordinator of {HUB_VARIABLE}")
        token = read_token(environment)
        join, ping, step, disk, name = (deadline(x, environment) for x in _DEADLINES)
        if environment.get(_KUBERNETES) and not environment.get(NAME_VARIABLE, "").strip():
            name = join  # the name of a pod appears when the pod has been scheduled and started
        return cls(
            hub,
            token or _derived(facts),
            token is not None,
            join_timeout=join,
            name_timeout=min(name, join),
            ping_timeout=ping,
            step_timeout=step,
            disk_timeout=disk,
            bind=environment.get(BIND_VARIABLE, "").strip("[] ") or None,
            service_port=_port(SERVICE_PORT_VARIABLE, environment) or 0,
            metrics_port=_port(METRICS_VARIABLE, environment),
            joins=environment.get(JOIN_VARIABLE) == "1",
        )


def _port(name: str, environment: Mapping[str, str]) -> int | None:
    """Return the port that variable ``name`` holds; None if it is not set."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ClusterError(
            f"{name}={text!r} is not a port. Write a number from 1 to 65535, or unset it."
        )
    return int(text)


@dataclass(frozen=True)
class HubOptions:
    """The configuration of a hub.

    Attributes:
        address: The address at which workers reach it.
        size: The number of workers.
        token: The shared secret of the run.
        addresses: The workers' addresses, None where unknown.
        owner: The process that starts it, for messages.
        join_timeout: Seconds for all workers to join.
        ping_timeout: Seconds without a heartbeat after which a worker is lost.
        step_timeout: Seconds after which a worker that others wait for is lost.
        disk_timeout: Seconds without progress of a checkpoint after which a worker is lost.
        bind: The host at which it and JAX's service listen; None for that of ``address``.
        service_port: The port of JAX's coordination service; 0 for any free one.
        metrics_port: The port for metrics, at the same host; None for no metrics.
        hosts: The hosts whose launchers agree on restarts, if there are several.
        least_workers: The fewest workers with which the survivors of a lost worker go on; 0 if they
            do not.
        wait: Seconds that fewer of them wait for workers that join; 0 if they end at once.
        least_hosts: The fewest hosts with which to restart; 0 if all are needed.
        program: The program's name if the hub must register the run; "" if a launcher does.
    """

    address: str
    size: int
    token: str
    addresses: tuple[str | None, ...]
    owner: str
    join_timeout: float
    ping_timeout: float
    step_timeout: float
    disk_timeout: float
    bind: str | None = None
    service_port: int = 0
    metrics_port: int | None = None
    hosts: tuple[str, ...] = ()
    least_workers: int = 0
    wait: float = 0.0
    least_hosts: int = 0
    program: str = ""


def deadline(name: str, environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds of a timeout: the variable ``name``, or its default.

    Raises:
        ClusterError: If the variable is not a positive number.
    """
    text, usual = environment.get(name, "").strip(), _DEADLINES[name]
    if not text:
        return usual
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ClusterError(
            f"{name}={text!r} is not a number of seconds. Write for example {name}={usual:g}, or"
            " unset it."
        )
    return seconds


def read_token(environment: Mapping[str, str]) -> str | None:
    """Return the token from the environment or from the file that it names; None if neither is set.

    Raises:
        ClusterError: If the file cannot be read, or is empty.
    """
    if token := environment.get(TOKEN_VARIABLE):
        return token
    path = environment.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        token = local_file(path).read_text().strip()
        fault = "" if token else "it is empty"
    except (OSError, UnicodeError) as error:
        token, fault = "", getattr(error, "strerror", None) or str(error)
    if fault:
        raise ClusterError(
            f"{TOKEN_FILE_VARIABLE}={path!r} cannot be read: {fault}. It is a file with the token"
            " that all workers of this run share."
        )
    return token


def _derived(facts: ClusterFacts) -> str:
    """Return a token that is no secret, but keeps workers of other runs from joining by mistake."""
    run = (facts.source, facts.job) if facts.job else (facts.addresses, facts.coordinator)
    return hashlib.sha256(repr(run).encode()).hexdigest()
