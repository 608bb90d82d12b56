"""Settings of a run, from the environment: deadlines, the token, and whose hub it is."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from replicax.cluster._checks import ClusterError, parse_address
from replicax.cluster._spec import ClusterFacts

HUB_VARIABLE = "REPLICAX_HUB"
BIND_VARIABLE = "REPLICAX_BIND_ADDRESS"
SERVICE_PORT_VARIABLE = "REPLICAX_SERVICE_PORT"
TOKEN_VARIABLE = "REPLICAX_TOKEN"
TOKEN_FILE_VARIABLE = "REPLICAX_TOKEN_FILE"
METRICS_VARIABLE = "REPLICAX_METRICS_PORT"

_DEADLINES = {
    "REPLICAX_JOIN_TIMEOUT": 300.0,
    "REPLICAX_PING_TIMEOUT": 20.0,
    "REPLICAX_STEP_TIMEOUT": 60.0,
    "REPLICAX_DISK_TIMEOUT": 600.0,
}


@dataclass(frozen=True)
class Settings:
    """What a worker is told by its surroundings.

    Attributes:
        hub: Where somebody else, such as the launcher, runs the hub; None if worker 0 must.
        token: What the workers of this run know, and nobody else should.
        is_secret: Whether somebody chose the token, so that it is one.
        join_timeout: Seconds that all workers together may take to come.
        ping_timeout: Seconds of silence after which a worker is given up.
        step_timeout: Seconds after which a worker that others wait for is given up.
        disk_timeout: Seconds after which one whose checkpoint does not get on is given up.
        bind: The address at which the hub and JAX's service listen; None for that of worker 0.
        service_port: The port of JAX's coordination service; 0 for any free one.
        metrics_port: Where the hub serves metrics; None if it does not.
    """

    hub: str | None
    token: str
    is_secret: bool
    join_timeout: float
    ping_timeout: float
    step_timeout: float
    disk_timeout: float
    bind: str | None = None
    service_port: int = 0
    metrics_port: int | None = None

    @classmethod
    def read(cls, facts: ClusterFacts, environment: Mapping[str, str] = os.environ) -> "Settings":
        """The settings of this process, or of one with another environment.

        Raises:
            ClusterError: If one of them makes no sense.
        """
        hub = environment.get(HUB_VARIABLE) or None
        if hub is not None:
            parse_address(hub, f"The coordinator of {HUB_VARIABLE}")
        token = given_token(environment)
        join, ping, step, disk = (deadline(name, environment) for name in _DEADLINES)
        return cls(
            hub,
            token or _derived(facts),
            token is not None,
            join_timeout=join,
            ping_timeout=ping,
            step_timeout=step,
            disk_timeout=disk,
            bind=environment.get(BIND_VARIABLE, "").strip("[] ") or None,
            service_port=_port(SERVICE_PORT_VARIABLE, environment) or 0,
            metrics_port=_port(METRICS_VARIABLE, environment),
        )


def _port(name: str, environment: Mapping[str, str]) -> int | None:
    """Return the port that a variable names; None if it is not set."""
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
    """What the hub is told when it starts.

    Attributes:
        address: Where the workers reach it.
        size: How many workers are to come.
        token: What they must know.
        addresses: Where they live, None where that is not known.
        owner: Who starts it, in words.
        join_timeout: Seconds that they may take to come.
        ping_timeout: Seconds of silence after which a worker is given up.
        step_timeout: Seconds after which one that others wait for is given up.
        disk_timeout: Seconds after which one whose checkpoint does not get on is given up.
        bind: The host at which it and JAX's service listen; None for that of ``address``.
        service_port: The port of JAX's coordination service; 0 for any free one.
        metrics_port: Where to serve metrics, at the same host; None for nowhere.
        hosts: The hosts whose launchers agree on restarts, if there are several.
        program: What is run, if no launcher tells `replicax top` of it.
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
    program: str = ""


def deadline(name: str, environment: Mapping[str, str] = os.environ) -> float:
    """The seconds that one of the deadlines has.

    Raises:
        ClusterError: If the environment has something else in its place.
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


def given_token(environment: Mapping[str, str]) -> str | None:
    """The token that the environment holds, or names a file of; None if it does neither.

    Raises:
        ClusterError: If that file cannot be read, or is empty.
    """
    if token := environment.get(TOKEN_VARIABLE):
        return token
    path = environment.get(TOKEN_FILE_VARIABLE)
    if not path:
        return None
    try:
        token = Path(path).read_text().strip()
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
