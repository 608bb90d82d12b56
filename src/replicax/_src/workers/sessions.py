"""Process sessions that end together with the process that started them.

Every worker leads its own session, which also contains its helpers, such as data loading processes.
The process that starts workers also starts a *guard*, a small process that knows their sessions.
The guard's standard input closes when its parent ends, however that happens; the guard then
terminates the sessions.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from replicax._src.workers import leases as _leases

_POLL = 0.05
# Signals with which schedulers (Slurm, systemd, PBS) announce the end of a job.
NOTICES = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_END = "end"
_PROC = Path("/proc")
# Skips the package's ``__init__``, and with it the import of JAX.
_BARE = """
import importlib, sys, types
package = types.ModuleType("replicax")
package.__path__ = [sys.argv[1]]
sys.modules["replicax"] = package
importlib.import_module(sys.argv[2]).main()
"""


def bare_python(module: str) -> list[str]:
    """Return the command that runs ``main()`` of a module that needs the standard library only."""
    return [sys.executable, "-P", "-c", _BARE, str(Path(__file__).parents[2]), module]


@contextlib.contextmanager
def block_notices() -> Iterator[None]:
    """Block the end-of-job signals while helper processes start.

    A child inherits the signal mask, so no signal ends it before it calls `ignore_notices`.
    Signals to this process are delivered when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_notices() -> None:
    """Ignore the end-of-job signals, because the workers need their helpers while they save."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


class Guard:
    """A handle on the guard, held by the process that it watches."""

    def __init__(self, grace: float) -> None:
        """Start the guard, which gives sessions ``grace`` seconds to exit before SIGKILL."""
        with block_notices():
            self._process = subprocess.Popen(
                [*bare_python("replicax._src.workers.sessions"), str(grace)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._input = self._process.stdin

    def watch(self, session: int) -> None:
        """Make the guard terminate ``session`` at the end."""
        self._send(f"watch {session}")

    def forget(self, session: int) -> None:
        """Remove a session whose processes have all exited: its number may be reused."""
        self._send(f"forget {session}")

    def remove_later(self, folder: Path) -> None:
        """Make the guard delete ``folder`` at the end."""
        self._send(f"remove {folder}")

    def end(self) -> None:
        """Terminate the remaining sessions and the guard, and wait for it."""
        with contextlib.suppress(OSError):
            self._input.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the guard was killed
            self._input.write(os.fsencode(line) + b"\n")
            self._input.flush()


class Owner:
    """The parent of this process, connected to its standard input.

    This process ignores signals: schedulers send them to every process of a job, and the workers
    need it until they have saved. The parent sends lines instead.
    """

    def __init__(self, who: str) -> None:
        """Read orders from the parent, which messages call ``who``."""
        self._who = who
        self._why = ""
        self._is_there = True
        self._unread = b""

    @staticmethod
    def order(story: str = "") -> bytes:
        """Return the line that reports the exit of a worker, or by default the order to end."""
        return (f"ended {story}" if story else _END).encode() + b"\n"

    def why_end(self, on_exit: Callable[[str], None] | None) -> str:
        """Return why this process must end now; "" if it need not. Call this repeatedly.

        Args:
            on_exit: Called with each report of a worker that exited; None to ignore the reports
                and the end of the parent itself.
        """
        while self._is_there and select.select([0], [], [], 0)[0]:
            data = os.read(0, 1 << 16)
            self._is_there = bool(data)
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                order, _, story = line.decode(errors="replace").partition(" ")
                if order == _END:
                    self._why = f"{self._who}, which had started it, ends it"
                elif on_exit is not None:
                    on_exit(story.strip())
        if not self._is_there and on_exit is not None:
            return self._why or f"{self._who}, which had started it, has ended"
        return self._why


def send(number: int, sessions: Iterable[int]) -> None:
    """Send a signal to all processes of ``sessions``."""
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, number)
    # Processes of the sessions that have moved to another process group.
    for pid in _outside_group(set(sessions)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP), and does nothing until it is continued."""
    return _stat_fields(pid)[:1] == ["T"]


def is_running(pid: int) -> bool:
    """Whether a process with this id exists on this machine and has not exited."""
    if _PROC.is_dir():
        return _stat_fields(pid)[:1] not in ([], ["Z"], ["X"])
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def start_time(pid: int) -> str:
    """Return the start time of a process, as the kernel counts it; "" if it does not run.

    Process ids are reused, pairs of id and start time are not. Where the system does not report
    start times, return a constant.
    """
    if not is_running(pid):
        return ""
    return _stat_fields(pid)[19] if _PROC.is_dir() else "running"


def name_process(title: str) -> None:
    """Make `ps` show this process as ``title``; on Linux only.

    The title overwrites the argument vector, whose memory the kernel reads; Python has a copy.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Fields 48 and 49 of proc(5), arg_start and arg_end; `_stat_fields` omits the first two.
        begin, end = (int(word) for word in _stat_fields(os.getpid())[45:47])
        text = title.encode()[: end - begin - 1].ljust(end - begin, b"\0")
        if 0 < begin < end:
            ctypes.memmove(begin, text, end - begin)


def _outside_group(sessions: set[int]) -> list[int]:
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        fields = _stat_fields(int(entry.name)) if entry.name.isdigit() else []
        if len(fields) > 3 and int(fields[3]) in sessions and int(fields[2]) != int(fields[3]):
            found.append(int(entry.name))
    return found


def _any_alive(sessions: set[int]) -> bool:
    """Whether any process of ``sessions`` is alive."""
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, 0)
            return True
    return bool(_outside_group(sessions))


def _leased_until(sessions: set[int], folders: list[Path]) -> float:
    """Return when the last lease of the live ``sessions`` expires; 0.0 without one."""
    leases = [_leases.find(folder, s) for folder in folders for s in sessions if _any_alive({s})]
    return max((lease.until for lease in leases if lease is not None), default=0.0)


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of proc(5)'s ``stat`` after the command name: state, parent, group, ..."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeError):
        return []


def main() -> None:
    """Run the guard: read orders until standard input closes, then end the sessions."""
    ignore_notices()
    grace = float(sys.argv[-1])
    name_process(f"replicax guard of {os.getppid()}")
    sessions: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin.buffer:
        order, _, what = os.fsdecode(line).rstrip("\n").partition(" ")
        match order:
            case "watch":
                sessions.add(int(what))
            case "forget":
                sessions.discard(int(what))
            case "remove":
                folders.append(what)
    _end(sessions, grace, [Path(folder) for folder in folders])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(sessions: set[int], grace: float, folders: list[Path]) -> None:
    deadline = time.monotonic() + grace
    send(signal.SIGTERM, sessions)
    while _any_alive(sessions) and time.monotonic() < max(
        deadline, _leased_until(sessions, folders)
    ):
        time.sleep(_POLL)
    send(signal.SIGKILL, sessions)
