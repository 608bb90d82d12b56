"""The worker processes of a launcher, and their output.

`Gang` starts, watches and ends the workers. The other classes copy their output to the terminal,
prefixed with the worker's name, and to log files. A failing terminal or disk must not stop the
workers: output that cannot be written is dropped, with one warning. An incomplete line, such as a
progress bar, is shown after a short delay.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from replicax._src.workers import leases as _leases
from replicax._src.workers import sessions, settings
from replicax._src.workers.sessions import Guard
from replicax._src.workers.settings import JOIN_VARIABLE, NOT_NEEDED, TOO_FEW

_NOISE = re.compile(r"\[Gloo\] Rank \d+ is connected")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
# ANSI escape sequences (colours, cursor movements, titles), and the start of an incomplete one.
_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\"
    rb"|[ -/]*[0-Z\\^-~])"
)
_OPEN_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|[ -/]*|\][^\x07\x1b]{0,99})\Z")
_SOON = 0.2  # seconds after which an incomplete line is shown
_LONGEST = 65_536  # bytes of an incomplete line that are buffered


class Console:
    """An output stream that several workers share, line by line."""

    def __init__(self, out: IO[str]) -> None:
        self._out: IO[str] | None = out
        self._lock = threading.Lock()
        self._unfinished = ""  # the prefix of the worker whose line is not finished
        self.is_terminal = out.isatty()

    def write(self, prefix: str, text: str) -> None:
        """Write a piece of a worker's output that is at most one line."""
        with self._lock:
            begin = "" if self._unfinished == prefix else prefix
            if self._unfinished and begin:
                begin = "\n" + begin
            self._unfinished = "" if text.endswith(("\n", "\r")) else prefix
            self._put(begin + text)

    def finish(self) -> None:
        """End an unfinished line."""
        with self._lock:
            if self._unfinished:
                self._unfinished = ""
                self._put("\n")

    def _put(self, text: str) -> None:
        """Write and flush; on failure drop this and all later output."""
        if self._out is None:
            return
        try:
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError) as error:
            # Redirect the stream, so that flushing its buffer at exit does not fail again.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())
            self._out = None
            _warn(f"the output of the workers can no longer be shown: {error}. They continue.")


class Log:
    """A log file of one worker's output with timestamps, readable by this user only."""

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
        """Append to the file."""
        try:
            if self._file is not None:
                self._file.write(self._stamped(data))
        except OSError as error:
            self.close()
            _warn(f"{self._path} can no longer be written: {error.strerror}. Its worker continues.")

    def _stamped(self, data: bytes) -> bytes:
        """Prepend the time to ``data``, unless it continues a line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z ").encode() if self._is_at_start else b""
        self._is_at_start = data.endswith((b"\n", b"\r"))
        return stamp + data

    def close(self) -> None:
        """Close the file; later output is dropped."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class OutputSplitter:
    """Splits the output of one worker into pieces of lines, for the console and its log."""

    def __init__(
        self, console: Console, prefix: str, log: Log, note: Callable[[str], None]
    ) -> None:
        self._console = console
        self._prefix = prefix
        self._log = log
        self._note = note
        self._buffer: list[bytes] = []  # the part of an incomplete line that is not shown yet
        self._size = 0
        self._since = 0.0
        self._line = ""  # the part of that line that is shown

    def feed(self, data: bytes) -> None:
        """Add output, and show the lines that ``data`` completes."""
        if not self._size:
            self._since = time.monotonic()
        self._buffer.append(data)
        self._size += len(data)
        if b"\n" in data or b"\r" in data:
            text, self._buffer, self._size = b"".join(self._buffer), [], 0
            ends = [line.end() for line in _LINE.finditer(text)]
            for begin, end in itertools.pairwise([0, *ends]):
                self._show(text[begin:end])
            if rest := text[ends[-1] :]:
                self.feed(rest)
        elif self._size > _LONGEST:
            self.flush()

    def flush(self, *, final: bool = False) -> None:
        """Show the buffered part of an incomplete line, but not a part of an escape sequence."""
        rest, self._buffer, self._size = b"".join(self._buffer), [], 0
        incomplete = None if final else _OPEN_ESCAPE.search(rest)
        if incomplete:
            rest = rest[: incomplete.start()]
            self.feed(incomplete[0])
        if rest:
            self._show(rest)

    def patience(self) -> float | None:
        """Return the seconds until the buffered output must be shown; None if there is none."""
        return max(0.0, self._since + _SOON - time.monotonic()) if self._size else None

    def _show(self, piece: bytes) -> None:
        """Write a piece of a line to the log, and to the console unless it matches `_NOISE`."""
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


def pump(stream: IO[bytes], splitter: OutputSplitter, log: Log) -> None:
    """Copy a worker's output to the console and its log until the stream ends."""
    with stream, contextlib.closing(log), selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(splitter.patience()):
                splitter.flush()
            elif data := os.read(stream.fileno(), _LONGEST):
                splitter.feed(data)
            else:
                break
        splitter.flush(final=True)


def _warn(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"replicax launch: {text}\n")
        sys.stderr.flush()


_MAX_LINES = 200
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_POLL = 0.05
_LOOK_EVERY = 1.0  # seconds between two looks for stopped workers
_DOUBT = 2.0  # seconds for the coordinator to give up a silent worker before the launcher ends it
_PREEMPTED = 128 + signal.SIGTERM  # the exit code of a worker that saved, or left an elastic run
_QUICK = 10.0  # seconds; a worker that ends sooner is started again after a pause
_LONGEST_PAUSE = 30.0
_DYING = 10.0  # seconds to wait for a killed process; one in uninterruptible I/O never ends
_BLAMED = re.compile(r"WorkerLostError: Worker (\d+) \(")


@dataclass(frozen=True)
class GangPlan:
    """The command and environment of one worker."""

    index: int
    address: str
    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass(eq=False)
class Worker:
    """A worker that was started.

    Attributes:
        plan: Its command and environment.
        process: Its process, a session leader.
        lines: Its last lines of output.
        began: When it was started.
        ended: When the launcher noticed its end.
        kill_reason: Why the launcher killed it; "" if it did not.
        before: The lost worker in whose place it was started; None if it is the first.
    """

    plan: GangPlan
    process: subprocess.Popen[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_MAX_LINES))
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    kill_reason: str = ""
    before: "Worker | None" = None

    @property
    def code(self) -> int:
        """The exit code as a shell reports it: 128 plus the signal for a killed process."""
        code = self.process.returncode
        code = -signal.SIGKILL if code is None else code  # killed, but still in uninterruptible I/O
        return 128 - code if code < 0 else code

    @property
    def blames(self) -> str:
        """The error line that blames another worker for this one's failure; "" if there is none."""
        last = list(self.lines)[-5:]
        return next((line for line in last if "WorkerLostError" in line), "")

    @property
    def blamed(self) -> int | None:
        """The index of the worker that it blames, or None."""
        found = _BLAMED.search(self.blames)
        return int(found[1]) if found else None

    def in_the_run(self) -> "Worker":
        """Return this worker, or the one it replaced if this one came too late to take part."""
        came_too_late = self.before is not None and self.process.returncode == NOT_NEEDED
        return self.before.in_the_run() if came_too_late and self.before else self

    def story(self) -> str:
        """Return one line that names the worker and tells how it ended."""
        code = self.process.returncode
        how = self.kill_reason or (
            f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        )
        return f"worker {self.plan.index} ({self.plan.address}, pid {self.process.pid}) {how}"


class Gang:
    """Workers that start and end together.

    Args:
        plans: The command and environment of each.
        logs: The log of each.
        guard: The guard that ends them if the launcher is killed.
        on_exit: Called with a description of each worker that exits.
        leases: The folder in which workers request time to save; see `workers.leases`.
        least: The fewest workers that go on when others fail; 0 if all must end then.
        waits: Whether fewer than these wait for others to join.
        is_whole: Whether the run ends with these; otherwise those of other launchers go on.
        others: Returns whether workers of other launchers take part in the run.
        rejoins: How often each of these is started again, to join the others.
        new_log: Returns the log of a worker that is started again for the n-th time.
    """

    def __init__(  # noqa: PLR0913 - the parts of a gang
        self,
        plans: Sequence[GangPlan],
        logs: Sequence[Log],
        guard: Guard,
        on_exit: Callable[[str], None] = lambda story: None,
        leases: Path | None = None,
        least: int = 0,
        *,
        waits: bool = False,
        is_whole: bool = True,
        others: Callable[[list["Worker"]], bool] = lambda mine: False,
        rejoins: int = 0,
        new_log: Callable[[GangPlan, int], Log] = lambda plan, count: Log(None),
    ) -> None:
        self._leases = leases
        self._least = least
        self._waits = waits
        self._is_whole = is_whole
        self._others = others
        self._rejoins = rejoins
        self._new_log = new_log
        self._counts: dict[int, int] = {}  # how often each worker was started again
        self._due: dict[int, float] = {}  # when to start them again
        self._mourned: set[int] = set()  # the process ids of workers that were lost
        self._looked = 0.0
        self._stopped: dict[int, float] = {}  # since when workers are stopped, by process id
        self._waited_for: set[int] = set()
        self._guard = guard
        self._on_exit = on_exit
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
        """Wait for all workers; after a failure, kill the others when the grace period is over.

        Returns:
            The worker that failed first and caused the other failures, or None.
        """
        end_at: float | None = None
        while self._running() or self._comes_back():
            now = time.monotonic()
            if self._least:
                self._end_given_up(now)
            if end_at is None and any(w.process.poll() for w in self.workers):
                end_at = None if self._goes_on() else now + grace
            if end_at is not None:
                self._end_stopped()
                if now > end_at and not self._is_saving(grace):
                    break
            time.sleep(_POLL)
        self._kill(f"had not ended {grace:g} s after another, and was killed by the launcher")
        self.workers = [w.in_the_run() for w in self.workers]
        if waited := [w for w in self.workers if w.process.returncode == TOO_FEW]:
            return waited[0]
        failed = [w for w in self.workers if w.process.returncode != 0]
        if self._least and len(self.workers) - len(failed) >= self._least:
            return None
        return min(failed, key=lambda w: (bool(w.kill_reason or w.blames), w.ended), default=None)

    def _comes_back(self) -> bool:
        """Whether a worker is to be started again, when none of these runs any more."""
        return self._goes_on() and bool(self._due or self._running())

    def _goes_on(self) -> bool:
        """Whether enough workers of an elastic run are left; log each that has failed."""
        failed = [w for w in self.workers if w.process.poll()]
        least = 1 if self._waits else self._least
        is_enough = len(self.workers) - len(failed) >= least
        if not self._least or not (is_enough or self._others(self.workers)):
            return False
        is_ending = any(w.process.returncode == 0 for w in self.workers)
        for worker in failed:
            if worker.process.pid not in self._mourned:
                self._mourned.add(worker.process.pid)
                _warn(f"{worker.story()}; the others go on.{self._plan_rejoin(worker)}")
        if is_ending:
            self._end_stopped()  # a stopped worker was given up long ago, and would never end
            self._due.clear()
        for index in [i for i, when in self._due.items() if time.monotonic() > when]:
            del self._due[index]
            self._start_again(next(w for w in self.workers if w.plan.index == index))
        return True

    def _plan_rejoin(self, worker: Worker) -> str:
        """Plan to start a lost worker again, if it may be; return a message to add."""
        index, count = worker.plan.index, self._counts.get(worker.plan.index, 0)
        if count >= self._rejoins or worker.process.returncode in (NOT_NEEDED, _PREEMPTED):
            return ""  # a preempted worker has no machine to come back to
        # A worker that ends as soon as it is started needs more and more time between two starts.
        is_quick = time.monotonic() - worker.began < _QUICK
        pause = min(_LONGEST_PAUSE, 2.0**count - 1) if is_quick else 0.0
        self._counts[index] = count + 1
        self._due[index] = time.monotonic() + pause
        after = f" in {pause:g} s" if pause else ""
        return f" It is started again{after}, to join them ({count + 1} of {self._rejoins})."

    def _start_again(self, old: Worker) -> None:
        """Start a worker in the place of a lost one, which joins the running ones."""
        self._running()  # ends the helpers of the old one
        plan = replace(old.plan, environment={**old.plan.environment, JOIN_VARIABLE: "1"})
        place = self.workers.index(old)
        self._start(plan, self._new_log(plan, self._counts[plan.index]))
        self.workers[place] = self.workers.pop()
        self.workers[place].before = old

    def end(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Send a signal to all running workers, and kill them after ``grace`` seconds."""
        if grace:
            if self._is_whole:
                _leases.announce_end(self._leases)
            sessions.send(number, [w.process.pid for w in self._running()])
            deadline = time.monotonic() + grace
            while self._running() and (time.monotonic() < deadline or self._is_saving(grace)):
                time.sleep(_POLL)
        self._kill(f"had not ended after {grace:g} s, and was killed by the launcher")

    def notify(self, number: int) -> None:
        """Send a signal to the workers, but not to their helpers, which it would end."""
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.process.send_signal(number)

    def _start(self, plan: GangPlan, log: Log) -> None:
        """Start a worker in its own session, and a thread that copies its output."""
        process = subprocess.Popen(
            plan.command,
            env=plan.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the worker through the launcher only, once
            preexec_fn=_end_with_launcher,
        )
        self._guard.watch(process.pid)
        worker = Worker(plan, process)
        self.workers.append(worker)
        assert process.stdout is not None
        splitter = OutputSplitter(
            self._console, f"[worker {plan.index}] ", log, worker.lines.append
        )
        thread = threading.Thread(target=pump, args=(process.stdout, splitter, log), daemon=True)
        self._pumps.append(thread)
        thread.start()

    def _running(self) -> list[Worker]:
        """Return the running workers; end the helpers of those that have exited."""
        for worker in self.workers:
            if worker.ended is None and worker.process.poll() is not None:
                worker.ended = time.monotonic()
                self._finish(worker)
                self._on_exit(worker.story())
        return [w for w in self.workers if w.ended is None]

    def _is_saving(self, grace: float) -> bool:
        """Whether a worker has a lease beyond the grace period; log that once for each."""
        leases = {w: _leases.find(self._leases, w.process.pid) for w in self._running()}
        active = {w: lease for w, lease in leases.items() if lease is not None and lease.left > 0}
        for worker, lease in active.items():
            if worker.plan.index not in self._waited_for:
                self._waited_for.add(worker.plan.index)
                _warn(
                    f"--grace {grace:g} is over, but worker {worker.plan.index} is {lease.what}:"
                    f" waiting for it, {lease.left:.0f} s at most (the grace period of its"
                    " Resumable)."
                )
        return bool(active)

    def _end_stopped(self) -> None:
        """Kill workers that are stopped (SIGSTOP), which would never end."""
        for worker in self._running():
            if sessions.is_stopped(worker.process.pid):
                self._kill_one(worker, "was stopped, and killed by the launcher")

    def _end_given_up(self, now: float) -> None:
        """Kill workers that were stopped (SIGSTOP) until an elastic run went on without them.

        A stopped process never exits, and only a worker that has exited is started again.
        """
        if now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        stopped = {w.process.pid: w for w in self._running() if sessions.is_stopped(w.process.pid)}
        self._stopped = {pid: self._stopped.get(pid, now) for pid in stopped}
        for pid, since in self._stopped.items():
            environment = stopped[pid].plan.environment
            limit = settings.deadline("REPLICAX_PING_TIMEOUT", environment) + _DOUBT
            if now - since > limit:
                why = f"was stopped for {now - since:.0f} s, and killed by the launcher"
                self._kill_one(stopped[pid], why)

    def _kill(self, why: str) -> None:
        for worker in self._running():
            self._kill_one(worker, why)
        for thread in self._pumps:
            thread.join(timeout=2.0)
        self._console.finish()

    def _kill_one(self, worker: Worker, why: str) -> None:
        """Kill a worker's session, and note why."""
        if lease := _leases.find(self._leases, worker.process.pid):
            why += f" while it was {lease.what}; `Resumable(grace=...)` gives it more seconds"
        worker.kill_reason = why
        sessions.send(signal.SIGKILL, [worker.process.pid])
        try:
            worker.process.wait(_DYING)
        except subprocess.TimeoutExpired:
            worker.kill_reason += (
                f"; {_DYING:g} s later it is still there, as it hangs in a call of the system: look"
                " at its disks"
            )
        worker.ended = time.monotonic()
        self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        """Kill the helpers that a worker left behind."""
        sessions.send(signal.SIGKILL, [worker.process.pid])
        self._guard.forget(worker.process.pid)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_with_launcher() -> None:
    """Make Linux send SIGTERM to this worker if the launcher dies, even if the guard does too."""
    if _libc is not None:
        _libc.prctl(_DIE_WITH_PARENT, signal.SIGTERM)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
