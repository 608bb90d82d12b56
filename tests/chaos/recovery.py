"""Time from a kill to the next step: ``python -m tests.chaos.recovery --kills 10``.

Three workers train; one at a time is killed, and comes back before the next is. The clock runs from
the kill to the first line of a step that no worker had reached before. A step that is taken again
is work lost: in an elastic run none is, in a restart those since the last commit.
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
from pathlib import Path

from tests.chaos.elastic import SOURCES, TRAINEE, workers_of

WORKERS, STEPS = 3, 100_000
SYSTEMS = {
    "elastic": ("replicax, `--elastic`", ["--workers", f"1:{WORKERS}", "--elastic"]),
    "restart": ("replicax, restart of all", ["--workers", str(WORKERS)]),
}
_LIMIT = 300.0  # seconds for one recovery


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that are added to a step")
    parser.add_argument("--every", type=int, default=20, help="steps between two commits")
    options = parser.parse_args()
    _say(f"{WORKERS} workers, a commit every {options.every} steps, {options.kills} kills each")
    _say("| | next step after (p50) | (p95) | steps taken again (p50) |\n| --- | --- | --- | --- |")
    for name, arguments in SYSTEMS.values():
        with tempfile.TemporaryDirectory() as folder:
            seconds, again = zip(*_measure(arguments, options, Path(folder)), strict=True)
        p50, p95 = _quantile(seconds, 0.5), _quantile(seconds, 0.95)
        _say(f"| {name} | {p50:.1f} s | {p95:.1f} s | {_quantile(again, 0.5)} |")


def _say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _quantile(values, q):
    return sorted(values)[round(q * (len(values) - 1))]


def _measure(arguments, options, folder):
    """Yield the seconds to the next step, and the steps taken again, for each kill."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(SOURCES)}
    env |= {"PACE": str(options.pace), "EVERY": str(options.every)}
    command = [sys.executable, "-m", "replicax", "launch", *arguments, "--max-restarts", "1000"]
    command += [str(TRAINEE), str(folder), str(STEPS)]
    chance = random.Random(0)
    with open(folder / "output", "w") as file:
        launcher = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            for _ in range(options.kills):
                victims = _wait(lambda: _all_here(launcher, folder))
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


def _wait(condition, every=0.2):
    """Return the first true value of ``condition()``."""
    until = time.monotonic() + _LIMIT
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"nothing came within {_LIMIT:g} s")
        time.sleep(every)
    return found


def _all_here(launcher, folder):
    """Return the processes of all workers, once they have taken a step together; else None."""
    assert launcher.poll() is None, (folder / "output").read_text()[-5000:]
    here, _ = workers_of(launcher.pid)
    ends = _ends(folder)
    is_complete = bool(ends) and max(ends.values())[1] == WORKERS
    return here if len(here) == WORKERS and is_complete else None


def _ends(folder):
    """The last step of each ledger, and its number of workers."""
    found = {}
    for path in folder.glob("ledger*"):
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().split(b"\n")[:-1]
        if lines:
            step, size, *_ = json.loads(lines[-1])
            found[path] = step, size
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
