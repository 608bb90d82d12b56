"""Sessions: processes that end with whoever started them, and all that they started with them.

A worker leads a session of its own: its helpers, such as the processes that load its data, are in
it. Whoever starts workers keeps a *guard*, a small process that is told of the sessions. When its
standard input closes, because the starter has ended in whatever way, the guard ends what is left.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_POLL = 0.05
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


class Guard:
    """The guard, seen from the process that it watches."""

    def __init__(self, grace: float) -> None:
        """Start it; it will give the sessions ``grace`` seconds to end by themselves."""
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
    """Whoever started this process, and holds the other end of its standard input."""

    def __init__(self, who: str) -> None:
        """Listen to it, and to signals; ``who`` it is, in words."""
        self._who = who
        self._why = ""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def why_end(self, tell: Callable[[str], None] | None) -> str:
        """Why this process must end now; nothing if it need not.

        Args:
            tell: Told what the owner says; None if it may say and do what it likes by now.
        """
        if not self._why and tell is not None and select.select([0], [], [], 0)[0]:
            if not (story := sys.stdin.readline().strip()):
                return f"{self._who}, which had started it, has ended"
            tell(story)
        return self._why

    def _note(self, number: int, _: Any) -> None:
        self._why = f"it was sent {signal.Signals(number).name}"


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


def _facts(pid: int) -> list[str]:
    """The state, parent, group and session of a process, as the kernel writes them."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeError):
        return []


def main() -> None:
    """Be the guard: take orders until standard input closes, then end what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
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
    _end(sessions, float(sys.argv[-1]))
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _end(sessions: set[int], grace: float) -> None:
    deadline = time.monotonic() + grace
    send(signal.SIGTERM, sessions)
    while _live(sessions) and time.monotonic() < deadline:
        time.sleep(_POLL)
    send(signal.SIGKILL, sessions)
