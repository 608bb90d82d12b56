"""``replicax launch --ssh``: run the launcher on every host by ssh, and end it everywhere.

The starter keeps the standard input of every ssh open. Over it go the token of the run, which so is
on no command line, and the signals that the starter gets. When it closes, because the starter or
the connection is gone, the launcher at the other end ends its workers.
"""

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from replicax.cluster._checks import ClusterError

_VARIABLE = "REPLICAX_SSH"
_USUAL = "ssh -T -o BatchMode=yes -o ServerAliveInterval=10"
_ENTER = "from replicax_command import entry; entry()"  # as `replicax`, which PATH may not have
_NO_CONNECTION = 255  # ssh's own exit code
_OTHER_HOSTS = 10.0  # seconds beyond the grace period for other hosts, once one has failed
_ENDING = 30.0  # seconds beyond the grace period after which a host is given up
_POLL = 0.05


def launch(options: argparse.Namespace, token: str | None) -> int:
    """Start the same command on all hosts, and wait for all of them.

    Args:
        options: Those of ``replicax launch``.
        token: The secret of the run; None to make one.

    Returns:
        The exit code of the host that failed first, or 0.

    Raises:
        ClusterError: There is no ssh.
    """
    commands = remote_commands(options)
    if shutil.which(program := commands[0][0]) is None:
        raise ClusterError(
            f"--ssh needs {program!r}, which is not installed here. Install it, set {_VARIABLE}"
            " to another command, or run `replicax launch` on each host yourself."
        )
    fleet = Fleet(commands, options.hosts.split(","), token or secrets.token_hex(32))
    try:
        return fleet.wait(options.grace)
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        with contextlib.suppress(KeyboardInterrupt):  # the second one: do not wait
            fleet.end(number, options.grace)
        raise
    finally:
        fleet.kill()


def remote_commands(options: argparse.Namespace) -> list[list[str]]:
    """Return the command that starts each host."""
    ssh = shlex.split(os.environ.get(_VARIABLE) or _USUAL)
    hosts = enumerate(options.hosts.split(","))
    return [[*ssh, host, _remote(options, index)] for index, host in hosts]


def _remote(options: argparse.Namespace, index: int) -> str:
    """Return the command for one host, as its shell takes it."""
    rest = ["--", *options.rest] if options.rest else []
    own = ["--remote", "--host-index", str(index), *options.own]
    words = [sys.executable, "-c", _ENTER, "launch", *own, *rest]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


class Fleet:
    """The ssh processes of all hosts.

    Args:
        commands: How each is started.
        hosts: Their names, for messages.
        token: The secret of the run, sent to each host first.
    """

    def __init__(self, commands: Sequence[Sequence[str]], hosts: list[str], token: str) -> None:
        self._hosts = hosts
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pumps: list[threading.Thread] = []
        try:
            for command in commands:
                self._start(command)
        except BaseException:
            self.kill()
            raise
        self._tell(token)

    def wait(self, grace: float) -> int:
        """Wait until all have ended, and end those that go on for too long after one has failed."""
        failed: int | None = None
        deadline: float | None = None
        while None in (codes := [process.poll() for process in self._processes]):
            now = time.monotonic()
            if (
                failed is None
                and (bad := next((i for i, c in enumerate(codes) if c), None)) is not None
            ):
                failed = bad
                unreachable = codes[bad] == _NO_CONNECTION
                deadline = now + (0.0 if unreachable else grace + _OTHER_HOSTS)
                if unreachable:
                    _say(f"ssh to {self._hosts[bad]} failed (exit code 255); ending the others")
            if deadline is not None and now > deadline:
                self.end(signal.SIGTERM, grace)
                break
            time.sleep(_POLL)
        self._finish()
        codes = [process.wait() for process in self._processes]
        code = codes[failed] if failed is not None else next((c for c in codes if c), 0)
        return 128 - code if code and code < 0 else int(code or 0)

    def end(self, number: int, grace: float) -> None:
        """Hand a signal to the launchers of all hosts, and wait until they have ended."""
        self._tell(str(int(number)))
        deadline = time.monotonic() + grace + _ENDING
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(_POLL)

    def kill(self) -> None:
        """Close all connections: the launchers at their other ends see it, and end."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                _input(process).close()
        for process in self._processes:
            if process.poll() is None:
                # Time for ssh to hand on the end of the input, before it is ended itself.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
                process.kill()
                process.wait()
        self._finish()

    def _start(self, command: Sequence[str]) -> None:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C reaches the hosts through us, once
        )
        self._processes.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            pump = threading.Thread(target=self._show, args=(source, target), daemon=True)
            self._pumps.append(pump)
            pump.start()

    def _show(self, source: IO[bytes], target: IO[str]) -> None:
        """Write whole lines, as those of several hosts go to one place."""
        with source:
            for line in source:
                with self._lock, contextlib.suppress(OSError, ValueError):  # nobody reads it
                    target.write(line.decode(errors="replace"))
                    target.flush()

    def _tell(self, line: str) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                _input(process).write(f"{line}\n".encode())
                _input(process).flush()

    def _finish(self) -> None:
        for pump in self._pumps:
            pump.join(2.0)


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def token_of_starter() -> str:
    """On a remote host: read the token, then obey the messages of the starting process.

    A line is the number of a signal for this process. The end of the input is SIGTERM.
    """
    told = bytearray()
    while not told.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            raise ClusterError("The launcher that started this one by ssh ended at once.")
        told += byte
    threading.Thread(target=_obey, daemon=True).start()
    return told.decode().strip()


def _obey() -> None:
    # Not `sys.stdin`: its lock, held by a thread that waits, would abort the end of the program.
    while data := os.read(0, 64):
        for number in data.split():
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
    sys.stderr.write(f"replicax launch: {text}\n")
    sys.stderr.flush()
