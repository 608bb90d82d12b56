"""Gang: the worker processes that a launcher starts, watches and ends."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected")
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")
_KEPT = 200
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_POLL = 0.05


@dataclass(frozen=True)
class Plan:
    """How one worker is started."""

    index: int
    address: str
    command: tuple[str, ...]
    environment: dict[str, str]


@dataclass
class Worker:
    """A worker that was started."""

    plan: Plan
    process: subprocess.Popen[bytes]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    ended: float | None = None

    @property
    def code(self) -> int:
        """The exit code as a shell gives it: 128 and the signal for one that was killed."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    @property
    def is_bystander(self) -> bool:
        """Whether it failed only because another worker did."""
        return bool(self.blames)

    @property
    def blames(self) -> str:
        """What it says of the worker because of which it failed, if it did not fail by itself."""
        last = list(self.lines)[-5:]
        return next((line for line in last if "WorkerLostError" in line), "")

    def story(self) -> str:
        """What became of it, in one line."""
        code = self.process.returncode
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return f"worker {self.plan.index} ({self.plan.address}, pid {self.process.pid}) {how}"


class Gang:
    """Workers that live and end together."""

    def __init__(self, plans: Sequence[Plan], log_dir: Path | None, out: IO[str]) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._pumps: list[threading.Thread] = []
        self.workers: list[Worker] = []
        try:
            for plan in plans:
                self._start(plan, log_dir)
        except BaseException:
            self.end(0.0)
            raise

    def wait(self, grace: float) -> Worker | None:
        """Wait until all have ended; the one that failed first, and took the others along."""
        deadline: float | None = None
        while any(w.process.poll() is None for w in self.workers):
            now = time.monotonic()
            self._note(now)
            if deadline is None and any(w.process.poll() for w in self.workers):
                deadline = now + grace
            if deadline is not None and now > deadline:
                break
            time.sleep(_POLL)
        self.end(0.0)
        failed = [w for w in self.workers if w.process.returncode != 0]
        return min(failed, key=lambda w: (w.is_bystander, w.ended or 0.0), default=None)

    def end(self, grace: float, number: int = signal.SIGTERM) -> None:
        """Ask all that still run to end, and after ``grace`` seconds make them."""
        if grace:
            self._send(number)
            deadline = time.monotonic() + grace
            while any(w.process.poll() is None for w in self.workers):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL)
        self._send(signal.SIGKILL)
        for worker in self.workers:
            worker.process.wait()
        self._note(time.monotonic())
        for pump in self._pumps:
            pump.join(timeout=2.0)

    def _start(self, plan: Plan, log_dir: Path | None) -> None:
        process = subprocess.Popen(
            plan.command,
            env=plan.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C reaches it through us, once
            preexec_fn=_end_with_launcher,
        )
        worker = Worker(plan, process)
        self.workers.append(worker)
        log = (log_dir / f"worker-{plan.index}.log").open("wb") if log_dir else None
        pump = threading.Thread(target=self._pump, args=(worker, log), daemon=True)
        self._pumps.append(pump)
        pump.start()

    def _pump(self, worker: Worker, log: IO[bytes] | None) -> None:
        stream = worker.process.stdout
        assert stream is not None
        prefix = f"[worker {worker.plan.index}] "
        with stream, contextlib.closing(log) if log else contextlib.nullcontext():
            while data := os.read(stream.fileno(), 65536):
                while data[-1:] not in (b"\n", b"\r") and (more := os.read(stream.fileno(), 65536)):
                    data += more
                if log:
                    log.write(data)
                    log.flush()
                self._show(worker, prefix, data)

    def _show(self, worker: Worker, prefix: str, data: bytes) -> None:
        for line in _LINE.findall(data):
            if _NOISE.search(line) or not line.strip():
                continue
            text = line.decode(errors="replace")
            worker.lines.append(text.rstrip())
            with self._lock:
                self._out.write(prefix + text)
                self._out.flush()

    def _send(self, number: int) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, number)

    def _note(self, now: float) -> None:
        for worker in self.workers:
            if worker.ended is None and worker.process.poll() is not None:
                worker.ended = now


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _end_with_launcher() -> None:
    """Have the system end this worker if the launcher is killed; on Linux only."""
    if _libc is not None:
        _libc.prctl(_DIE_WITH_PARENT, signal.SIGTERM)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
