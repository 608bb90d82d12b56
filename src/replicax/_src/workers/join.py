"""Joining a run: start or find the hub, authenticate, and wait until all workers have joined."""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from replicax._src.base import cores
from replicax._src.base.fault_points import fault_point
from replicax._src.cluster.checks import RollCallError
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.workers import reports
from replicax._src.workers import wire as _wire
from replicax._src.workers.sessions import Owner, bare_python, block_notices
from replicax._src.workers.settings import (
    METRICS_VARIABLE,
    NAME_VARIABLE,
    NOT_NEEDED,
    HubOptions,
    Settings,
)
from replicax._src.workers.wire import Message, Wire

_log = logging.getLogger("replicax")

_RETRY = 0.05
_REPORT_EVERY = 5.0
_ANSWER_PATIENCE = 10.0
_SILENCE = 60.0  # seconds in which a worker tries again to get an answer from a silent hub
_LATE = 10.0  # seconds in which a worker that joins a running run must reach it
_FEWEST_SECONDS = 15.0  # minimum timeout for a silent hub, which sends something every 5 s


def join(facts: ClusterFacts, settings: Settings, gpus: Sequence[str] = ()) -> tuple[Wire, Message]:
    """Join the run, and wait for all other workers.

    Args:
        facts: The cluster.
        settings: The timeouts and the token.
        gpus: The UUIDs of the GPUs that this worker sees.

    Returns:
        The connection to the hub, and the hub's start message.

    Raises:
        RollCallError: If not all workers join in time, or this one is refused.
    """
    fault_point("join")
    address = settings.hub or facts.coordinator
    assert address is not None
    fault = ""
    patience = min(settings.join_timeout, _LATE) if settings.joins else settings.join_timeout
    deadline = time.monotonic() + patience
    if facts.index == 0 and settings.hub is None:
        _wait_for_name(address, settings.name_timeout)
        options = hub_options(facts, settings, address, "worker 0")
        fault = _start_hub(replace(options, program=Path(sys.argv[0]).name or "python"))
    try:
        wire = _connect_and_prove(facts, settings, address, fault, deadline)
    except RollCallError as error:
        if not settings.joins or isinstance(error, _WrongHubError):
            raise
        reports.say(f"this worker is not needed: nothing answers at {address}, the run is over.")
        sys.exit(NOT_NEEDED)
    try:
        wire.send({"join": {**_local_facts(facts, gpus), "joins": settings.joins}})
        return wire, _wait(wire, address, max(settings.ping_timeout, _FEWEST_SECONDS))
    except BaseException:
        wire.close()
        raise


def _wait_for_name(address: str, seconds: float) -> None:
    """Wait until the host of this worker's address resolves: DNS entries of pods follow the pods.

    Raises:
        RollCallError: If it does not resolve in time.
    """
    host, port = _wire.split_address(address)
    warned_at = began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except socket.gaierror as error:
            now = time.monotonic()
            if now - began > seconds:
                raise RollCallError(_unresolved(address, seconds, error)) from None
            if now - warned_at > _REPORT_EVERY:
                warned_at = now
                _log.warning(
                    "waiting for the name of this worker, %s, to resolve (%s), %.0f s",
                    host,
                    error.strerror,
                    now - began,
                )
            time.sleep(_RETRY)


def _unresolved(address: str, seconds: float, error: socket.gaierror) -> str:
    """Return the message for a host name of worker 0 that did not resolve within ``seconds``."""
    return (
        f"The host name {_wire.split_address(address)[0]!r} of worker 0 ({address}) did not resolve"
        f" within {seconds:g} s: {error.strerror}. Correct the name in the cluster, or add it to"
        f" DNS or /etc/hosts. Where names appear later, {NAME_VARIABLE} sets the seconds to wait,"
        " at most REPLICAX_JOIN_TIMEOUT."
    )


def _start_hub(options: HubOptions) -> str:
    """Start a hub that outlives this process; return "", or why it could not start."""
    try:
        hub = HubProcess(options)
    except OSError as error:
        return error.strerror or str(error)
    fault = hub.fault()
    hub.disown()
    _local_hub.append(hub)
    os.register_at_fork(after_in_child=hub.detach)
    return fault


def hub_options(facts: ClusterFacts, settings: Settings, address: str, owner: str) -> HubOptions:
    """Return the configuration of a hub for this cluster."""
    return HubOptions(
        address=address,
        size=facts.num_workers,
        token=settings.token,
        addresses=facts.addresses or (None,) * facts.num_workers,
        owner=owner,
        join_timeout=settings.join_timeout,
        ping_timeout=settings.ping_timeout,
        step_timeout=settings.step_timeout,
        disk_timeout=settings.disk_timeout,
        bind=settings.bind,
        service_port=settings.service_port,
        metrics_port=settings.metrics_port,
    )


def _metrics_listener(options: HubOptions, stack: contextlib.ExitStack) -> Iterator[socket.socket]:
    """Open the listening socket for metrics, if they are configured."""
    if (port := options.metrics_port) is None:
        return
    host = options.bind or _wire.split_address(options.address)[0]
    shown = f"[{host}]" if ":" in host else host
    try:
        yield stack.enter_context(_wire.listen(f"{shown}:{port}"))
    except OSError as error:
        text = f"{METRICS_VARIABLE}={port} is not a free port of this machine ({error.strerror})"
        raise OSError(error.errno, text) from error


class HubProcess:
    """A handle on the hub's process, for the process that starts it.

    The hub's standard input stays open while its parent lives. If the parent ends before all
    workers have joined, the hub ends too; after that, it stays until the last worker has left. The
    parent opens the listening socket itself and need not wait for the hub: early connections queue.

    Raises:
        OSError: If the address is in use, or does not belong to this machine.
    """

    def __init__(self, options: HubOptions) -> None:
        with contextlib.ExitStack() as stack:
            place = _wire.bound_address(options.address, options.bind)
            listener = stack.enter_context(_wire.listen(place))
            sockets = [listener, *_metrics_listener(options, stack)]
            numbers = ",".join(str(s.fileno()) for s in sockets)
            stack.enter_context(block_notices())
            self._process = subprocess.Popen(
                [*bare_python("replicax._src.workers.hub"), numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the hub may outlive its parent
                env={**os.environ, "NO_PROXY": "*", "no_proxy": "*"},
                pass_fds=[s.fileno() for s in sockets],
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._input.write(json.dumps(asdict(options)).encode() + b"\n")
            self._input.flush()

    def fault(self) -> str:
        """Wait until the hub is ready; return "", or why it did not start."""
        with self._output:
            if self._output.readline():
                return ""
        self.end()
        return "its process ended at once"

    def report_exit(self, story: str) -> None:
        """Report the exit of a worker, so that the others need not wait for it to join."""
        self._order(Owner.order(story))

    def end(self) -> None:
        """Shut the hub down, and wait until its process has exited."""
        self._order(Owner.order())
        self.wait(_ANSWER_PATIENCE)

    def _order(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has exited, or the pipe was closed
            self._input.write(line)
            self._input.flush()

    def wait(self, seconds: float | None) -> None:
        """Wait until the hub exits; kill it after ``seconds``, unless that is None."""
        self.detach()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def detach(self) -> None:
        """Close the pipes: the hub then ends at once if workers are missing, or after the last."""
        self._process.poll()
        with contextlib.suppress(OSError):
            self._output.close()
            self._input.close()

    def disown(self) -> None:
        """Let the interpreter exit without waiting for the hub or warning about it."""
        self._process.returncode = 0  # prevents Popen's ResourceWarning and wait


_local_hub: list[HubProcess] = []  # keeps the pipe to the hub's standard input open


def _connect_and_prove(
    facts: ClusterFacts, settings: Settings, address: str, fault: str, deadline: float
) -> Wire:
    """Connect to the hub and authenticate; try again if a busy hub does not answer in time."""
    last = None  # the silence begins with the first connection, however late worker 0 starts
    while True:
        wire = _connect(facts, settings, address, fault, deadline)
        last = last or min(deadline, time.monotonic() + _SILENCE)
        try:
            prove(wire, settings.token, address, fault)
            return wire
        except BaseException as error:
            wire.close()
            if fault or not isinstance(error, _SilentHubError) or time.monotonic() > last:
                raise
            _log.warning("worker 0 (%s) does not answer; trying again", address)


def _connect(
    facts: ClusterFacts, settings: Settings, address: str, fault: str, deadline: float
) -> Wire:
    """Connect to the hub, retrying until the deadline."""
    warned_at = began = resolved = time.monotonic()
    while True:
        try:
            return Wire(socket.create_connection(_wire.split_address(address), timeout=2))
        except OSError as error:
            now = time.monotonic()
            if fault:
                raise RollCallError(_cannot_listen(address, fault)) from None
            if not isinstance(error, socket.gaierror):
                resolved = now
            elif now - resolved > settings.name_timeout:
                raise RollCallError(_unresolved(address, settings.name_timeout, error)) from None
            if now > deadline:
                raise RollCallError(
                    f"{facts.describe(facts.index).capitalize()} could not reach worker 0 at"
                    f" {address} within {settings.join_timeout:g} s: {error.strerror or error}."
                    " Start worker 0, and check that its address can be reached from here;"
                    " REPLICAX_JOIN_TIMEOUT sets the seconds to wait."
                ) from None
            if now - warned_at > _REPORT_EVERY:
                warned_at = now
                why = f": {error.strerror}" if isinstance(error, socket.gaierror) else ""
                _log.warning("waiting for worker 0 (%s%s), %.0f s", address, why, now - began)
            time.sleep(_RETRY)


def prove(wire: Wire, token: str, address: str, fault: str = "", role: str = "worker") -> None:
    """Authenticate to the hub, and verify that it knows the token too.

    Raises:
        RollCallError: If the peer is not a hub with this token.
    """
    wire.socket.settimeout(_ANSWER_PATIENCE)
    stranger = _cannot_listen(address, fault) if fault else _wrong_hub(address)
    challenge = _receive_or_raise(wire, stranger).get("challenge")
    if not isinstance(challenge, str):
        raise _WrongHubError(stranger)
    mine = _wire.nonce()
    wire.send({"role": role, "nonce": mine, "proof": _wire.proof(token, role, challenge, mine)})
    reply = _receive_or_raise(wire, stranger)
    if not _wire.is_proof(reply.get("proof"), token, "hub", mine, challenge):
        raise _WrongHubError(stranger)


def statuses(address: str, token: str) -> Iterator[Message]:
    """Yield the status messages of the hub at ``address``, once a second, until it ends.

    Raises:
        RollCallError: If the peer is not a hub of a run with this token.
        OSError: If nothing listens there.
    """
    sock = socket.create_connection(_wire.split_address(address), timeout=5)
    with sock:
        wire = Wire(sock)
        prove(wire, token, address, role="reader")
        while (message := wire.receive_within(_FEWEST_SECONDS)) is not None:
            if isinstance(status := message.get("status"), dict):
                yield status


class _WrongHubError(RollCallError):
    """The process that listens at the address of worker 0 is not the hub of this run."""


class _SilentHubError(_WrongHubError):
    """The listening process accepts connections but does not answer: perhaps a busy hub."""


def _receive_or_raise(wire: Wire, otherwise: str) -> Message:
    """Return the next message; if none arrives in time, raise an error with text ``otherwise``."""
    began = time.monotonic()
    try:
        data = wire.receive_within(_ANSWER_PATIENCE)
    except _wire.WireError:
        raise _WrongHubError(otherwise) from None
    if data is None:  # also if the connection was closed
        is_silent = time.monotonic() - began >= _ANSWER_PATIENCE
        raise (_SilentHubError if is_silent else _WrongHubError)(otherwise)
    return data


def _wait(wire: Wire, address: str, patience: float) -> Message:
    """Wait until all workers have joined; the hub enforces the timeout, and reports regularly."""
    while True:
        message = wire.receive_within(patience)
        match message:
            case None:
                raise RollCallError(
                    f"The connection to worker 0 at {address} closed before all workers had joined,"
                    f" or was silent for {patience:.0f} s: worker 0, or its hub, has ended, or the"
                    " network is down. Look at the output of worker 0."
                )
            case {"refused": why}:
                raise RollCallError(str(why))
            case {"waiting": text}:
                _log.warning("%s", text)
            case {"go": go}:
                found: Message = go
                return found


def _local_facts(facts: ClusterFacts, gpus: Sequence[str]) -> dict[str, Any]:
    """Return the facts that this worker sends when joining."""
    known = facts.addresses[facts.index] if facts.index < len(facts.addresses) else None
    return {
        "index": facts.index,
        "size": facts.num_workers,
        "address": known,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "program": _program(),
        "gpus": list(gpus),
        **cores.local_facts(),
        "cpu_devices": os.environ.get("REPLICAX_CPU_DEVICES") or "1",
        "versions": {
            "Python": ".".join(platform.python_version_tuple()[:2]),
            **{name: _version(name) for name in ("replicax", "jax", "jaxlib")},
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _program() -> str | None:
    """Return a digest of the program's text, to detect workers that run another program."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else None
    except OSError:
        return None


def _cannot_listen(address: str, fault: str) -> str:
    return (
        f"Worker 0 cannot listen at its address {address}: {fault}. If another program holds the"
        " port, stop it or give the cluster another port; if the address is not this machine's,"
        " correct the cluster."
    )


def _wrong_hub(address: str) -> str:
    return (
        f"The process that listens at {address} is not worker 0 of this run: it is another program,"
        " or belongs to a run with another cluster or another REPLICAX_TOKEN. Choose another port,"
        " or give all workers the same cluster and token."
    )
