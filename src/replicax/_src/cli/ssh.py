"""``replicax launch --ssh``: run the launcher on every host over ssh.

The starting process keeps the standard input of every ssh open. It sends the run's token over it,
which therefore is on no command line, and forwards the signals that it receives. When the input
closes, because the starting process or the connection is gone, the remote launcher ends its
workers.
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

from replicax._src.cluster.checks import ClusterError

_VARIABLE = "REPLICAX_SSH"
_DEFAULT = "ssh -T -o BatchMode=yes -o ServerAliveInterval=10"
_ENTER = "from replicax_command import entry; entry()"  # `replicax`, which may not be on PATH
_NO_CONNECTION = 255  # ssh's exit code for its own errors
_OTHER_HOSTS = 10.0  # seconds beyond the grace period for other hosts to end after a failure
_ENDING = 30.0  # seconds beyond the grace period after which ssh is killed
_POLL = 0.05


def launch(options: argparse.Namespace, token: str | None) -> int:
    """Run the same command on all hosts, and wait for all of them.

    Args:
        options: The options of ``replicax launch``.
        token: The token of the run; None to make one.

    Returns:
        The exit code of the host that failed first, or 0.

    Raises:
        ClusterError: If ssh is not installed.
    """
    commands = remote_commands(options)
    if shutil.which(program := commands[0][0]) is None:
        raise ClusterError(
            f"--ssh needs {program!r}, which is not installed here. Install it, set {_VARIABLE}"
            " to another command, or run `replicax launch` on each host yourself."
        )
    fleet = Fleet(commands, options.hosts.split(","), token or secrets.token_hex(32))
    try:
        return fleet.wait(options.grace, options.members.least_hosts)
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        with contextlib.suppress(KeyboardInterrupt):  # a second signal: do not wait
            fleet.end(number, options.grace)
        raise
    finally:
        fleet.kill()


def remote_commands(options: argparse.Namespace) -> list[list[str]]:
    """Return the ssh command for each host."""
    ssh = shlex.split(os.environ.get(_VARIABLE) or _DEFAULT)
    hosts = enumerate(options.hosts.split(","))
    return [[*ssh, host, _remote(options, index)] for index, host in hosts]


def _remote(options: argparse.Namespace, index: int) -> str:
    """Return the shell command for one host."""
    rest = ["--", *options.rest] if options.rest else []
    own = ["--remote", "--host-index", str(index), *options.own]
    words = [sys.executable, "-c", _ENTER, "launch", *own, *rest]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"


class Fleet:
    """The ssh processes of all hosts.

    Args:
        commands: The command that starts each.
        hosts: The names of the hosts, for messages.
        token: The token of the run, sent to each host first.
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
        self._send_line(token)

    def wait(self, grace: float, least: int) -> int:
        """Wait for all; after a failure, end the others when their grace period is over.

        Args:
            grace: The grace period in seconds.
            least: The fewest hosts that can go on, the first among them.

        Returns:
            The exit code of the host whose failure ended the run, or 0.
        """
        failed: int | None = None
        deadline: float | None = None
        while None in (codes := [process.poll() for process in self._processes]):
            now = time.monotonic()
            if failed is None and (bad := _fatal(codes, least)) is not None:
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
        failed = _fatal(codes, least) if failed is None else failed
        code = 0 if failed is None else codes[failed]
        return 128 - code if code and code < 0 else int(code or 0)

    def end(self, number: int, grace: float) -> None:
        """Forward a signal to the launchers of all hosts, and wait until they have exited."""
        self._send_line(str(int(number)))
        deadline = time.monotonic() + grace + _ENDING
        while any(process.poll() is None for process in self._processes):
            if time.monotonic() > deadline:
                self.kill()
            time.sleep(_POLL)

    def kill(self) -> None:
        """Close all connections, upon which the remote launchers exit."""
        for process in self._processes:
            with contextlib.suppress(OSError):
                _input(process).close()
        for process in self._processes:
            if process.poll() is None:
                # Let ssh forward the end of the input before it is killed.
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
            start_new_session=True,  # Ctrl-C reaches the hosts through `end` only, once
        )
        self._processes.append(process)
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert source is not None
            pump = threading.Thread(target=self._show, args=(source, target), daemon=True)
            self._pumps.append(pump)
            pump.start()

    def _show(self, source: IO[bytes], target: IO[str]) -> None:
        """Copy line by line, as the output of all hosts goes to the same stream."""
        with source:
            for line in source:
                with self._lock, contextlib.suppress(OSError, ValueError):  # a closed stream
                    target.write(line.decode(errors="replace"))
                    target.flush()

    def _send_line(self, line: str) -> None:
        for process in self._processes:
            with contextlib.suppress(OSError, ValueError):  # this ssh has exited
                _input(process).write(f"{line}\n".encode())
                _input(process).flush()

    def _finish(self) -> None:
        for pump in self._pumps:
            pump.join(2.0)


def _fatal(codes: Sequence[int | None], least: int) -> int | None:
    """Return a host that failed and without which the others cannot go on, or None."""
    bad = [i for i, code in enumerate(codes) if code]
    is_enough = len(codes) - len(bad) >= least and 0 not in bad
    return None if is_enough or not bad else bad[0]


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin


def read_starter_token() -> str:
    """Read the token on a remote host, then start a thread that handles the starter's messages.

    Each message is the number of a signal for this process. The end of the input means SIGTERM.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            raise ClusterError("The launcher that started this one by ssh ended at once.")
        line += byte
    threading.Thread(target=_forward_signals, daemon=True).start()
    return line.decode().strip()


def _forward_signals() -> None:
    # Not `sys.stdin`: a daemon thread that holds its lock would abort the interpreter's shutdown.
    while data := os.read(0, 64):
        for number in data.split():
            os.kill(os.getpid(), int(number))
    os.kill(os.getpid(), signal.SIGTERM)


def _say(text: str) -> None:
    sys.stderr.write(f"replicax launch: {text}\n")
    sys.stderr.flush()
