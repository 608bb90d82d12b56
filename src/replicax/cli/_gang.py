"""Gang: the worker processes that a launcher starts, watches and ends."""

import ctypes
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replicax.cli._output import Console, Log, Speaker, pump
from replicax.workers import _sessions
from replicax.workers._sessions import Guard

_KEPT = 200
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_POLL = 0.05
_BLAMED = re.compile(r"WorkerLostError: Worker (\d+) \(")


@dataclass(frozen=True)
class GangPlan:
    """How one worker is started."""

    index: int
    address: str
    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass
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
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        how = self.made_to_end or how
        return f"worker {self.plan.index} ({self.plan.address}, pid {self.process.pid}) {how}"


class Gang:
    """Workers that live and end together.

    Args:
        plans: How they are started.
        logs: Where each one's output goes.
        guard: What ends them if the launcher cannot.
        tell: Told of each one that has ended, in words.
    """

    def __init__(
        self,
        plans: Sequence[GangPlan],
        logs: Sequence[Log],
        guard: Guard,
        tell: Callable[[str], None] = lambda story: None,
    ) -> None:
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
                if now > deadline:
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
            while self._running() and time.monotonic() < deadline:
                time.sleep(_POLL)
        self._kill(f"had not ended after {grace:g} s, and was killed by the launcher")

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
        worker.made_to_end = why
        _sessions.send(signal.SIGKILL, [worker.process.pid])
        worker.process.wait()
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
