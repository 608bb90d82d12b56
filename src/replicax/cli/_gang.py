"""Gang: the worker processes that a launcher starts, watches and ends, and what they write.

Output: what workers write -> the terminal, with the name of each worker, and their log files.

Whatever happens to the terminal or the disk, the workers go on: what cannot be written is dropped,
with one warning. A line that is not complete, such as a row of dots, appears soon all the same.
"""

import contextlib
import ctypes
import itertools
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from replicax.workers import _leases, _sessions
from replicax.workers._sessions import Guard

_NOISE = re.compile(r"\[Gloo\] Rank \d+ is connected")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
# Colours, cursor movements, titles; and the beginning of one that is not complete.
_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\"
    rb"|[ -/]*[0-Z\\^-~])"
)
_OPEN_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[ -/]*|\][^\x07\x1b]{0,99})\Z")
_SOON = 0.2  # seconds after which an incomplete line is shown
_LONGEST = 65_536  # bytes of a line that are kept back until it is complete


class Console:
    """A stream that several workers write to, line by line."""

    def __init__(self, out: IO[str]) -> None:
        self._out: IO[str] | None = out
        self._lock = threading.Lock()
        self._unfinished = ""  # whose line has no end yet
        self.is_terminal = out.isatty()

    def write(self, prefix: str, text: str) -> None:
        """Write the next piece of a worker's text, no more than one line."""
        with self._lock:
            begin = "" if self._unfinished == prefix else prefix
            if self._unfinished and begin:
                begin = "\n" + begin
            self._unfinished = "" if text.endswith(("\n", "\r")) else prefix
            self._put(begin + text)

    def finish(self) -> None:
        """Write the end of a line that has none."""
        with self._lock:
            if self._unfinished:
                self._unfinished = ""
                self._put("\n")

    def _put(self, text: str) -> None:
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError) as error:
            # What Python holds back goes nowhere when it ends, in place of failing there.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())
            self._out = None
            _warn(f"the output of the workers cannot be shown any more: {error}. They go on.")


class Log:
    """A file that keeps what one worker writes, and when; nobody else may read it."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._is_at_start = True
        if path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
            os.fchmod(descriptor, 0o600)
            self._file = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Add to the file."""
        try:
            if self._file is not None:
                self._file.write(self._stamped(data))
        except OSError as error:
            self.close()
            _warn(f"{self._path} cannot be written any more: {error.strerror}. Its worker goes on.")

    def _stamped(self, data: bytes) -> bytes:
        """Return the data with the time before each new line; not before the rest of one."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z ").encode() if self._is_at_start else b""
        self._is_at_start = data.endswith((b"\n", b"\r"))
        return stamp + data

    def close(self) -> None:
        """Add no more."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class Speaker:
    """Bytes as they come from one worker -> pieces of lines, for the console and for its log."""

    def __init__(
        self, console: Console, prefix: str, log: Log, note: Callable[[str], None]
    ) -> None:
        self._console = console
        self._prefix = prefix
        self._log = log
        self._note = note
        self._held: list[bytes] = []  # what is not shown yet of a line without end
        self._size = 0
        self._since = 0.0
        self._line = ""  # the beginning of that line, as far as it is shown

    def take(self, data: bytes) -> None:
        """Show the lines that ``data`` completes."""
        if not self._size:
            self._since = time.monotonic()
        self._held.append(data)
        self._size += len(data)
        if b"\n" in data or b"\r" in data:
            text, self._held, self._size = b"".join(self._held), [], 0
            ends = [line.end() for line in _LINE.finditer(text)]
            for begin, end in itertools.pairwise([0, *ends]):
                self._show(text[begin:end])
            if rest := text[ends[-1] :]:
                self.take(rest)
        elif self._size > _LONGEST:
            self.show_rest()

    def show_rest(self, *, all_of_it: bool = False) -> None:
        """Show what has come of a line without end; not half of an escape sequence."""
        rest, self._held, self._size = b"".join(self._held), [], 0
        kept = None if all_of_it else _OPEN_ESCAPE.search(rest)
        if kept:
            rest = rest[: kept.start()]
            self.take(kept[0])
        if rest:
            self._show(rest)

    def patience(self) -> float | None:
        """Seconds until what has come must be shown; None if nothing waits."""
        return max(0.0, self._since + _SOON - time.monotonic()) if self._size else None

    def _show(self, piece: bytes) -> None:
        plain = _ESCAPES.sub(b"", piece) if b"\x1b" in piece else piece
        self._log.write(plain)
        text = plain.decode(errors="replace")
        line, self._line = (self._line + text)[:_LONGEST], ""
        if not text.endswith(("\n", "\r")):
            self._line = line
        elif line.strip():
            self._note(line.rstrip())
        if line.strip() and not _NOISE.search(line):
            shown = piece.decode(errors="replace") if self._console.is_terminal else text
            self._console.write(self._prefix, shown)


def pump(stream: IO[bytes], speaker: Speaker, log: Log) -> None:
    """Carry all that a worker writes to the console and to its log, until it ends."""
    with stream, contextlib.closing(log), selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(speaker.patience()):
                speaker.show_rest()
            elif data := os.read(stream.fileno(), _LONGEST):
                speaker.take(data)
            else:
                break
        speaker.show_rest(all_of_it=True)


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"replicax launch: {text}\n")
        sys.stderr.flush()


_KEPT = 200
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_POLL = 0.05
_DYING = 10.0  # seconds that a killed process may take; one whose disk hangs takes for ever
_BLAMED = re.compile(r"WorkerLostError: Worker (\d+) \(")


@dataclass(frozen=True)
class GangPlan:
    """How one worker is started."""

    index: int
    address: str
    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(eq=False)
class Worker:
    """A worker that was started.

    Attributes:
        plan: How.
        process: Its process, which leads a session.
        lines: The last that it wrote.
        ended: When it was seen to have ended.
        made_to_end: Why the launcher itself killed it, if it did.
    """

    plan: GangPlan
    process: subprocess.Popen[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    ended: float | None = None
    made_to_end: str = ""

    @property
    def code(self) -> int:
        """The exit code as a shell gives it: 128 and the signal for one that was killed."""
        code = self.process.returncode
        code = -signal.SIGKILL if code is None else code  # it was, and hangs in the system
        return 128 - code if code < 0 else code

    @property
    def blames(self) -> str:
        """What it says of the worker because of which it failed, if it did not fail by itself."""
        last = list(self.lines)[-5:]
        return next((line for line in last if "WorkerLostError" in line), "")

    @property
    def blamed(self) -> int | None:
        """Which worker that is, if it is one."""
        found = _BLAMED.search(self.blames)
        return int(found[1]) if found else None

    def story(self) -> str:
        """What became of it, in one line."""
        code = self.process.returncode
        how = self.made_to_end or (
            f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        )
        return f"worker {self.plan.index} ({self.plan.address}, pid {self.process.pid}) {how}"


class Gang:
    """Workers that live and end together.

    Args:
        plans: How they are started.
        logs: Where each one's output goes.
        guard: What ends them if the launcher cannot.
        tell: Told of each one that has ended, in words.
        leases: Where workers ask for time to save; see `replicax.workers._leases`.
    """

    def __init__(
        self,
        plans: Sequence[GangPlan],
        logs: Sequence[Log],
        guard: Guard,
        tell: Callable[[str], None] = lambda story: None,
        leases: Path | None = None,
    ) -> None:
        self._leases = leases
        self._waited_for: set[int] = set()
        self._guard = guard
        self._tell = tell
        self._console = Console(sys.stdout)
        self._pumps: list[threading.Thread] = []
        self.workers: list[Worker] = []
        try:
            for plan, log in zip(plans, logs, strict=True):
                self._start(plan, log)
        except BaseException:
            self.end(0.0)
            raise

    def wait(self, grace: float) -> Worker | None:
        """Wait until all have ended; the one that failed first, and took the others along."""
        deadline: float | None = None
        while self._running():
            now = time.monotonic()
            if deadline is None and any(w.process.poll() for w in self.workers):
                deadline = now + grace
            if deadline is not None:
                self._end_stopped()
                if now > deadline and not self._is_saving(grace):
                    break
            time.sleep(_POLL)
        self._kill(f"had not ended {grace:g} s after another, and was killed by the launcher")
        failed = [w for w in self.workers if w.process.returncode != 0]
        return min(failed, key=lambda w: (bool(w.made_to_end or w.blames), w.ended), default=None)

    def end(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Ask all that still run to end, and after ``grace`` seconds make them."""
        if grace:
            _sessions.send(number, [w.process.pid for w in self._running()])
            deadline = time.monotonic() + grace
            while self._running() and (time.monotonic() < deadline or self._is_saving(grace)):
                time.sleep(_POLL)
        self._kill(f"had not ended after {grace:g} s, and was killed by the launcher")

    def notify(self, number: int) -> None:
        """Send a signal to the workers, not to their helpers, which may die of it."""
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.process.send_signal(number)

    def _start(self, plan: GangPlan, log: Log) -> None:
        process = subprocess.Popen(
            plan.command,
            env=plan.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C reaches it through us, once
            preexec_fn=_end_with_launcher,
        )
        self._guard.watch(process.pid)
        worker = Worker(plan, process)
        self.workers.append(worker)
        assert process.stdout is not None
        says = Speaker(self._console, f"[worker {plan.index}] ", log, worker.lines.append)
        thread = threading.Thread(target=pump, args=(process.stdout, says, log), daemon=True)
        self._pumps.append(thread)
        thread.start()

    def _running(self) -> list[Worker]:
        """Those that still run; the helpers of the others are ended."""
        for worker in self.workers:
            if worker.ended is None and worker.process.poll() is not None:
                worker.ended = time.monotonic()
                self._finish(worker)
                self._tell(worker.story())
        return [w for w in self.workers if w.ended is None]

    def _is_saving(self, grace: float) -> bool:
        """Whether a worker has asked for more time than the launcher's; say so once for each."""
        leases = {w: _leases.find(self._leases, w.process.pid) for w in self._running()}
        held = {w: lease for w, lease in leases.items() if lease is not None and lease.left > 0}
        for worker, lease in held.items():
            if worker.plan.index not in self._waited_for:
                self._waited_for.add(worker.plan.index)
                _warn(
                    f"--grace {grace:g} is over, but worker {worker.plan.index} is {lease.what}:"
                    f" waiting for it, {lease.left:.0f} s at most (the grace period of its"
                    " Resumable)."
                )
        return bool(held)

    def _end_stopped(self) -> None:
        for worker in self._running():
            if _sessions.is_stopped(worker.process.pid):
                self._kill_one(worker, "was stopped, and killed by the launcher")

    def _kill(self, why: str) -> None:
        for worker in self._running():
            self._kill_one(worker, why)
        for thread in self._pumps:
            thread.join(timeout=2.0)
        self._console.finish()

    def _kill_one(self, worker: Worker, why: str) -> None:
        if lease := _leases.find(self._leases, worker.process.pid):
            why += f" while it was {lease.what}; `Resumable(grace=...)` gives it more seconds"
        worker.made_to_end = why
        _sessions.send(signal.SIGKILL, [worker.process.pid])
        try:
            worker.process.wait(_DYING)
        except subprocess.TimeoutExpired:
            worker.made_to_end += (
                f"; {_DYING:g} s later it is still there, as it hangs in a call of the system: look"
                " at its disks"
            )
        worker.ended = time.monotonic()
        self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        _sessions.send(signal.SIGKILL, [worker.process.pid])
        self._guard.forget(worker.process.pid)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_with_launcher() -> None:
    """Have the system end this worker if the launcher and its guard are killed; on Linux only."""
    if _libc is not None:
        _libc.prctl(_DIE_WITH_PARENT, signal.SIGTERM)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
