"""Sessions: processes that end with whoever started them, and all that they started with them.

A worker leads a session of its own: its helpers, such as the processes that load its data, are in
it. Whoever starts workers keeps a *guard*, a small process that is told of the sessions. When its
standard input closes, because the starter has ended in whatever way, the guard ends what is left.
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

from replicax.workers import _leases

_POLL = 0.05
# What schedulers send to every process of a job when it is to end: Slurm, systemd, PBS.
NOTICES = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
_END = "end"
_PROC = Path("/proc")
# The package is entered without its ``__init__``, so that this starts without JAX's Python.
_BARE = """
import importlib, sys, types
package = types.ModuleType("replicax")
package.__path__ = [sys.argv[1]]
sys.modules["replicax"] = package
importlib.import_module(sys.argv[2]).main()
"""


def bare_python(module: str) -> list[str]:
    """The command that runs ``main()`` of a module of ours that needs the standard library only."""
    return [sys.executable, "-P", "-c", _BARE, str(Path(__file__).parents[1]), module]


@contextlib.contextmanager
def notices_held() -> Iterator[None]:
    """Start helper processes here: no notice reaches one before it calls `ignore_notices`.

    A child inherits the signal mask. Notices to this process are delivered when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_notices() -> None:
    """Outlive a signal to all processes of the job: the workers need their helpers to save."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOTICES)


class Guard:
    """The guard, seen from the process that it watches."""

    def __init__(self, grace: float) -> None:
        """Start it; it will give the sessions ``grace`` seconds to end by themselves."""
        with notices_held():
            self._process = subprocess.Popen(
                [*bare_python("replicax.workers._sessions"), str(grace)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._input = self._process.stdin

    def watch(self, session: int) -> None:
        """Know of a session."""
        self._tell(f"watch {session}")

    def forget(self, session: int) -> None:
        """Know that all of a session has ended: its number may soon be another's."""
        self._tell(f"forget {session}")

    def remove_later(self, folder: Path) -> None:
        """Know of a folder that must not stay."""
        self._tell(f"remove {folder}")

    def end(self) -> None:
        """End what is left, and the guard."""
        with contextlib.suppress(OSError):
            self._input.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # somebody has killed it
            self._input.write(os.fsencode(line) + b"\n")
            self._input.flush()


class Owner:
    """The starter of this process, which holds the other end of its standard input.

    Signals do not end this process: schedulers send them to all processes of a job, and the
    workers need it until they have saved. The owner sends a line in place of them.
    """

    def __init__(self, who: str) -> None:
        """Listen to it; ``who`` it is, in words."""
        self._who = who
        self._why = ""
        self._is_there = True
        self._unread = b""

    @staticmethod
    def order(story: str = "") -> bytes:
        """The line that tells of a worker that has ended, or by default to end now."""
        return (f"ended {story}" if story else _END).encode() + b"\n"

    def why_end(self, tell: Callable[[str], None] | None) -> str:
        """Return why this process must end now; nothing if it need not.

        Args:
            tell: Called with what became of a worker; None if the owner itself may end by now.
        """
        while self._is_there and select.select([0], [], [], 0)[0]:
            data = os.read(0, 1 << 16)
            self._is_there = bool(data)
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                order, _, story = line.decode(errors="replace").partition(" ")
                if order == _END:
                    self._why = f"{self._who}, which had started it, ends it"
                elif tell is not None:
                    tell(story.strip())
        if not self._is_there and tell is not None:
            return self._why or f"{self._who}, which had started it, has ended"
        return self._why


def send(number: int, sessions: Iterable[int]) -> None:
    """Send a signal to all processes of some sessions."""
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, number)
    # Those that have left the group of the session's first process.
    for pid in _strays(set(sessions)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, and can do nothing until somebody continues it."""
    return _facts(pid)[:1] == ["T"]


def is_running(pid: int) -> bool:
    """Whether there is a process of this number on this machine that has not ended."""
    if _PROC.is_dir():
        return _facts(pid)[:1] not in ([], ["Z"], ["X"])
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def birth(pid: int) -> str:
    """Return when a process started, as the system counts; nothing if it does not run.

    A process number is used again, the pair of both is not. Where the system does not say it, the
    number counts.
    """
    if not is_running(pid):
        return ""
    return _facts(pid)[19] if _PROC.is_dir() else "running"


def name_process(title: str) -> None:
    """Have `ps` show this process as ``title``; on Linux only.

    The title is written over the command line, whose memory the kernel shows; Python has a copy.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The fields 48 and 49 of proc(5); the first two come before what `_facts` returns.
        begin, end = (int(word) for word in _facts(os.getpid())[45:47])
        text = title.encode()[: end - begin - 1].ljust(end - begin, b"\0")
        if 0 < begin < end:
            ctypes.memmove(begin, text, end - begin)


def _strays(sessions: set[int]) -> list[int]:
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        facts = _facts(int(entry.name)) if entry.name.isdigit() else []
        if len(facts) > 3 and int(facts[3]) in sessions and int(facts[2]) != int(facts[3]):
            found.append(int(entry.name))
    return found


def _live(sessions: set[int]) -> bool:
    """Whether any process of the sessions is still there."""
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, 0)
            return True
    return bool(_strays(sessions))


def _leased(sessions: set[int], folders: list[Path]) -> float:
    """Return until when workers of these sessions have asked for time to save."""
    leases = [_leases.find(folder, s) for folder in folders for s in sessions if _live({s})]
    return max((lease.until for lease in leases if lease is not None), default=0.0)


def _facts(pid: int) -> list[str]:
    """The state, parent, group and session of a process, as the kernel writes them."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeError):
        return []


def main() -> None:
    """Be the guard: take orders until standard input closes, then end what is left."""
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
    while _live(sessions) and time.monotonic() < max(deadline, _leased(sessions, folders)):
        time.sleep(_POLL)
    send(signal.SIGKILL, sessions)
