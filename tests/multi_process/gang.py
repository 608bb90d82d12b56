"""A gang of workers whose processes the test holds in its hands."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from replicax._src.workers.wire import free_ports
from tests.multi_process.hosts import LOOPBACK

ROOT = Path(__file__).parents[2]
QUICK = {"REPLICAX_JOIN_TIMEOUT": "60", "REPLICAX_PING_TIMEOUT": "4", "REPLICAX_STEP_TIMEOUT": "4"}


def left_behind(mark, seconds=10):
    """The commands of processes with ``mark`` in their environment that stay for so long."""
    deadline = time.monotonic() + seconds
    while (found := _with_mark(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _with_mark(mark):
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                is_ours = mark.encode() in (path / "environ").read_bytes()
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if is_ours and command:  # a zombie has none
                found.append((int(path.name), command))
    return found


@dataclass
class Worker:
    """One worker: its process, and where its output goes."""

    process: subprocess.Popen
    output: Path
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def text(self):
        return self.output.read_text(errors="replace")

    @property
    def code(self):
        return self.process.returncode

    @property
    def error(self):
        """The last line of the traceback: the error's type and what it says."""
        found = re.findall(
            r"^(?:[\w.]+\.)?(\w+(?:Error|Interrupt)): (.*)$", self.text, re.MULTILINE
        )
        return f"{found[-1][0]}: {found[-1][1]}" if found else ""

    def moment(self, word):
        """When the worker wrote ``word``, by the clock of all processes."""
        found = re.search(rf"^{word} ([\d.]+)$", self.text, re.MULTILINE)
        return float(found[1]) if found else None


class Gang:
    """Workers of one cluster; ended, with all that they started, when the block ends."""

    def __init__(self, folder, size, hosts=None, **environment):
        self.folder = Path(folder)
        self.hosts = hosts or [LOOPBACK] * size
        pairs = zip(self.hosts, free_ports(size), strict=True)
        self.addresses = [f"{host.address}:{port}" for host, port in pairs]
        self.environment = QUICK | environment
        self.options = ()  # of the launcher, if there is one
        self.workers = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()

    def start(self, index, *arguments, size=None, program="victim", **environment):
        """Start a worker that runs ``program`` with ``arguments``."""
        cluster = {"worker": self.addresses[:size] if size else self.addresses}
        task = {"type": "worker", "index": index}
        command = [*self.hosts[index].enter, sys.executable, "-m"]
        return self._start(
            f"worker{len(self.workers)}.txt",
            [*command, f"tests.multi_process.{program}", *arguments],
            TF_CONFIG=json.dumps({"cluster": cluster, "task": task}),
            PYTHONUNBUFFERED="1",
            **environment,
        )

    def start_all(self, how, *arguments, program):
        """Start all workers: each "alone", or "launched" by one `replicax launch`."""
        if how == "alone":
            for index in range(len(self.addresses)):
                self.start(index, *arguments, program=program)
            return
        command = [sys.executable, "-m", "replicax", "launch", "--workers", len(self.addresses)]
        module = f"tests.multi_process.{program}"
        self._start("launcher.txt", [*command, *self.options, "-m", module, *arguments])

    def _start(self, output, command, **environment):
        """Start a process with its output in a file, and with more environment than the gang's."""
        clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CONFIG")}
        paths = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"}
        with (self.folder / output).open("wb") as stream:
            process = subprocess.Popen(
                [*map(str, command)],
                env=clean | paths | self.environment | environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
            )
        self.workers.append(Worker(process, self.folder / output))
        return self.workers[-1]

    def wait(self, *workers, seconds=60):
        """Wait for workers to end; all of them by default."""
        deadline = time.monotonic() + seconds
        for worker in workers or self.workers:
            try:
                worker.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"a worker did not end within {seconds} s; it said:\n{worker.text}"
                ) from None
            worker.seconds = time.monotonic() - worker.began
        return self.workers

    def is_gone(self, seconds=8):
        """Whether nobody listens at the cluster's address any more, after some time."""
        host, port = self.addresses[0].split(":")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                return True
            time.sleep(0.1)
        return False
