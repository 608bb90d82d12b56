"""From nothing to the first step: ours against TensorFlow and PyTorch.

    python -m benchmarks.start [--tensorflow PYTHON] [--torch PYTHON] [--quick] [--rows NAME ...]

Fresh processes in turn. `import`, with bytecode; the first eager step of an MLP on two virtual
devices, behind the import (PyTorch: on one, it has no others on CPUs); two workers from the command
to the first step of both; and the same again where a compilation cache is full, as after a crash.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial

from benchmarks._timing import Comparison
from benchmarks.workers import add_peers, launch, peers_of, start, start_gang

OURS = (sys.executable, "ours", "replicax")
MODULES = {"in_tensorflow": "tensorflow", "in_torch": "torch"}


def main() -> None:
    parser = argparse.ArgumentParser()
    add_peers(parser)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these")
    options = parser.parse_args()
    pairs = 3 if options.quick else 12
    print(f"{'what':55} {'by the clock':>20}  {'of the processors':>20}")
    with tempfile.TemporaryDirectory() as cache:
        for peer, (python, module) in peers_of(options).items():
            theirs = (python, module, MODULES[module])
            kept = {"JAX_COMPILATION_CACHE_DIR": cache, **ALL_PROGRAMS}
            rows = {
                "import": (partial(imported, OURS), partial(imported, theirs)),
                "first eager step": (partial(eager, OURS), partial(eager, theirs)),
                "command to first step": (
                    partial(first_step, launch),
                    partial(first_step, partial(start_gang, python, module, "first")),
                ),
                "the same with a compilation cache": (
                    partial(first_step, partial(launch, **kept)),
                    partial(first_step, partial(start_gang, python, module, "first")),
                ),
            }
            for what, sides in rows.items():
                if options.rows and what not in options.rows:
                    continue
                show(f"{what}, ours / {peer}", *in_turn(*sides, pairs=pairs))


# What compiles within a second is kept too.
ALL_PROGRAMS = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def in_turn(ours, theirs, *, pairs):
    """Seconds by the clock, and of the processors, of both sides."""
    ours(), theirs()  # files are read, bytecode and caches are written
    times = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            times[side].append((ours, theirs)[side]())
    return [Comparison([a[i] for a in times[0]], [b[i] for b in times[1]]) for i in range(2)]


def imported(side):
    python, _, package = side
    return measured(lambda: [start(python, "-c", f"import {package}", TF_CPP_MIN_LOG_LEVEL="3")])


def eager(side):
    """What the process itself says of its first step."""
    python, module, _ = side
    process = start(python, "-m", f"benchmarks._workers.{module}", "eager")
    answer, _ = process.communicate()
    took, used = map(float, answer.split())
    return took, used


def first_step(begin):
    """Until both workers have done a step."""

    def done(processes):
        for process in processes:
            lines = (line for line in process.stdout if "first" in line)
            for _ in range(2 // len(processes)):
                next(lines)

    return measured(begin, done)


def measured(begin, done=None):
    """The seconds until the processes that ``begin`` starts are ``done``, or have ended.

    And what their processors worked, to their end.
    """
    before, began = os.times(), time.perf_counter()
    processes = begin()
    if done:
        done(processes)
        took = time.perf_counter() - began
    for process in processes:
        process.communicate()
        if process.returncode and not done:  # PyTorch's may abort at the end, behind its step
            raise subprocess.CalledProcessError(process.returncode, process.args)
    took = took if done else time.perf_counter() - began
    after = os.times()
    used = [after[i] - before[i] for i in (2, 3)]  # of ended children, and of theirs
    return took, sum(used)


def show(name, clock, processors):
    seconds = " / ".join(f"{t:.2f}" for t in (*clock.medians, *processors.medians))
    print(f"{name:55} {clock.ratio!s:>20}  {processors.ratio!s:>20}  {seconds} s", flush=True)


if __name__ == "__main__":
    main()
