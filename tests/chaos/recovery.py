"""Time from a kill to the next step: ``python -m tests.chaos.recovery --kills 10``.

Three workers train; one at a time is killed, and comes back before the next is. The clock runs from
the kill to the first line of a step that no worker had reached before. A step that is taken again
is work lost: in an elastic run none is, in a restart those since the last commit.

``--peers PYTHON`` names a Python that has torch and Ray Train: the same kills in torchrun, which is
torch's elastic agent, and in Ray Train, with their default settings.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.elastic import SOURCES, TRAINEE, workers_of
from tests.multi_process.gang import left_behind

WORKERS, STEPS = 3, 100_000
PEERS = Path(__file__).with_name("peers")
_LAUNCH = ["-m", "replicax", "launch", "--max-restarts", "1000", "--workers"]
_TORCHRUN = ["-m", "torch.distributed.run", f"--nproc-per-node={WORKERS}", "--max-restarts=1000"]
_LIMIT = 300.0  # seconds for one recovery
_MARK = "RECOVERY_TRIAL"


@dataclass
class System:
    """A launcher that keeps three workers running.

    Attributes:
        name: Its name in the table.
        command: Its command, without the interpreter and the folder of the ledgers.
        is_peer: Whether its workers are those of `peers.recovering`.
    """

    name: str
    command: list[str]
    is_peer: bool = False


SYSTEMS = {
    "elastic": System(
        "replicax, `--elastic`", [*_LAUNCH, f"1:{WORKERS}", "--elastic", str(TRAINEE)]
    ),
    "restart": System("replicax, restart of all", [*_LAUNCH, str(WORKERS), str(TRAINEE)]),
    "torchrun": System(
        "torchrun (restart of all)",
        [*_TORCHRUN, "--standalone", str(PEERS / "recovering.py")],
        is_peer=True,
    ),
    "ray": System("Ray Train", [str(PEERS / "recovering_ray.py")], is_peer=True),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that are added to a step")
    parser.add_argument("--every", type=int, default=20, help="steps between two commits")
    parser.add_argument("--peers", metavar="PYTHON", help="a Python that has torch and Ray Train")
    parser.add_argument("--only", action="append", choices=SYSTEMS, help="repeatable")
    options = parser.parse_args()
    _say(f"{WORKERS} workers, a commit every {options.every} steps, {options.kills} kills each")
    _say("| | next step after (p50) | (p95) | steps taken again (p50) | (most) |")
    _say("| --- | --- | --- | --- | --- |")
    for key, system in SYSTEMS.items():
        if (system.is_peer and not options.peers) or (options.only and key not in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            seconds, again = zip(*_measure(system, options, Path(folder)), strict=True)
        p50, p95 = _quantile(seconds, 0.5), _quantile(seconds, 0.95)
        lost = f"{_quantile(again, 0.5)} | {max(again)}"
        _say(f"| {system.name} | {p50:.1f} s | {p95:.1f} s | {lost} |")


def _say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _quantile(values, q):
    return sorted(values)[round(q * (len(values) - 1))]


def _measure(system, options, folder):
    """Yield the seconds to the next step, and the steps taken again, for each kill."""
    mark = f"{_MARK}={uuid.uuid4()}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", _MARK: mark.split("=")[1]}
    env |= {"PYTHONPATH": str(PEERS if system.is_peer else SOURCES)}
    # Otherwise workers that torchrun 2.13 starts again may read the addresses of those before them.
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    env |= {"PACE": str(options.pace), "EVERY": str(options.every), "OMP_NUM_THREADS": "1"}
    command = [options.peers if system.is_peer else sys.executable, *system.command, str(folder)]
    command += [] if system.is_peer else [str(STEPS)]
    chance = random.Random(0)
    with open(folder / "output", "w") as file:
        launcher = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            for _ in range(options.kills):
                victims = _wait(lambda: _all_here(system, launcher, folder))
                time.sleep(chance.uniform(0.0, 2 * options.every * options.pace))
                last = max(_ends(folder).values())[0]
                attempt = _newest(folder)
                os.kill(chance.choice(victims), signal.SIGKILL)
                began = time.monotonic()
                # The next step may have been complete when the worker was killed: wait for another.
                _wait(lambda last=last: max(_ends(folder).values())[0] > last + 1, 0.01)
                took = time.monotonic() - began
                yield took, _repeated(folder, last) if _newest(folder) != attempt else 0
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(300)
            for pid, _ in left_behind(mark, 30):  # Ray's own processes
                os.kill(pid, signal.SIGKILL)


def _wait(condition, every=0.2):
    """Return the first true value of ``condition()``."""
    until = time.monotonic() + _LIMIT
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"nothing came within {_LIMIT:g} s")
        time.sleep(every)
    return found


def _all_here(system, launcher, folder):
    """Return the processes of all workers, once they have taken a step together; else None."""
    assert launcher.poll() is None, (folder / "output").read_text()[-5000:]
    ends = _ends(folder)
    if system.is_peer:
        newest = _newest(folder) if ends else None
        here = [pid for path, (_, _, pid, *_) in ends.items() if _attempt(path) == newest]
        is_complete = all(Path(f"/proc/{pid}").exists() for pid in here)
    else:
        here, _ = workers_of(launcher.pid)
        is_complete = bool(ends) and max(ends.values())[1] == WORKERS
    return here if len(here) == WORKERS and is_complete else None


def _ends(folder):
    """The last line of each ledger: the step, the number of workers, and more."""
    found = {}
    for path in folder.glob("ledger*"):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
        if lines:
            found[path] = json.loads(lines[-1])
    return found


def _attempt(path):
    return int(path.name.rpartition(".")[2])


def _newest(folder):
    return max(map(_attempt, folder.glob("ledger*")))


def _repeated(folder, last):
    """How many steps up to ``last`` were taken again by the newest attempt."""
    newest = _newest(folder)
    paths = [path for path in folder.glob("ledger*") if _attempt(path) == newest]
    firsts = [path.read_text().split(",", 1)[0] for path in paths]
    return max(0, last + 1 - min(int(text.strip("[")) for text in firsts if text))


if __name__ == "__main__":
    main()
