"""Two workers of ours against two of TensorFlow's, two of PyTorch's and two written by hand.

    python benchmarks/workers.py [--tensorflow PYTHON] [--torch PYTHON] [--quick]

Every gang waits for its next block, and blocks alternate. Also: what it costs that the workers
agree on every batch, and how long it takes from the command to the first step.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks._timing import Comparison, compare  # noqa: E402
from replicax.workers._wire import free_ports  # noqa: E402

ALL_REDUCES = ("all_reduce 1", "all_reduce 1024", "all_reduce 262144")


def start(*command, **environment):
    return subprocess.Popen(
        command,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONDONTWRITEBYTECODE": "",  # an installed package has its bytecode
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            **environment,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def start_gang(python, module, *arguments, count=2):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    configs = [
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
        for i in range(count)
    ]
    command = (python, "-m", f"benchmarks._workers.{module}", *arguments)
    return [start(*command, TF_CONFIG=json.dumps(config)) for config in configs]


class Workers:
    """A gang, of two by default, that does blocks of steps on request."""

    def __init__(self, python, module, count=2):
        self.processes = start_gang(python, module, count=count)

    def __enter__(self):
        for process in self.processes:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{' '.join(process.args)} did not start")
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def block(self, name):
        def run(steps):
            for process in self.processes:
                process.stdin.write(f"{name} {steps}\n")
                process.stdin.flush()
            return max(float(process.stdout.readline()) for process in self.processes)

        return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--quick", action="store_true", help="few pairs, to try it out")
    options = parser.parse_args()
    pairs = 4 if options.quick else 30
    peers = {
        "TensorFlow": (options.tensorflow or _own("tensorflow"), "in_tensorflow"),
        "PyTorch": (options.torch or _own("torch"), "in_torch"),
        "by hand": (sys.executable, "by_hand"),
    }
    peers = {name: peer for name, peer in peers.items() if peer[0]}
    with Workers(sys.executable, "ours") as ours:
        for peer, command in peers.items():
            with Workers(*command) as theirs:
                for name in (*ALL_REDUCES, "MLP", "CNN", "transformer"):
                    blocks = ours.block(name), theirs.block(name)
                    show(f"{name}, ours / {peer}", compare(*blocks, pairs=pairs))
        blocks = ours.block("MLP from files"), ours.block("MLP from memory")
        show("MLP with agreed batches / without", compare(*blocks, pairs=pairs))
    for peer, command in peers.items():
        begin = partial(start_gang, *command, "first")
        times = [(first_step(launch), first_step(begin)) for _ in range(max(pairs // 2, 3))]
        show(
            f"command to first step, ours / {peer}",
            Comparison(*map(list, zip(*times, strict=True))),
        )


def launch():
    command = "from replicax_command import entry; entry()"
    worker = ("-m", "benchmarks._workers.ours", "first")
    return [start(sys.executable, "-c", command, "launch", "--workers", "2", *worker)]


def first_step(begin):
    """The seconds from the command until both workers have done a step."""
    began = time.perf_counter()
    processes = begin()
    for process in processes:
        lines = (line for line in process.stdout if "first" in line)
        for _ in range(2 // len(processes)):
            next(lines)
    took = time.perf_counter() - began
    for process in processes:
        process.communicate()
    return took


def show(name, comparison):
    ratio = comparison.ratio
    quartiles = f"({ratio.low:.2f} to {ratio.high:.2f})"
    ours, theirs = (sorted(x)[len(x) // 2] for x in (comparison.ours, comparison.theirs))
    print(f"{name:45s} {ratio.median:5.2f}  {quartiles}  {1e3 * ours:.2f}, {1e3 * theirs:.2f} ms")


def _own(package):
    return sys.executable if importlib.util.find_spec(package) else None


if __name__ == "__main__":
    main()
