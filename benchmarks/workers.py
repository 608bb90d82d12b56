"""Two workers of ours against two of TensorFlow's, two of PyTorch's and two written by hand.

    python benchmarks/workers.py [--tensorflow PYTHON] [--torch PYTHON] [--quick] [--rows NAME ...]

Every gang waits for its next block, and blocks alternate. Also: what it costs that the workers
agree on every batch. Ours have the environment that `replicax launch` gives to its workers.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks._timing import compare_both  # noqa: E402
from benchmarks._workers import networks  # noqa: E402
from replicax._src.cli.launch import WORKERS_MEMORY  # noqa: E402
from replicax._src.workers.wire import free_ports  # noqa: E402

ROWS = (*networks.ALL_REDUCES, *networks.WEIGHTS_AND_BATCH)
AGREED = "MLP with agreed batches / without"


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
    usual = WORKERS_MEMORY if module == "ours" else {}
    return [start(*command, TF_CONFIG=json.dumps(config), **usual) for config in configs]


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
        """Seconds by the clock until the last worker is done, and those of all processors."""

        def run(steps):
            for process in self.processes:
                process.stdin.write(f"{name} {steps}\n")
                process.stdin.flush()
            answers = [map(float, p.stdout.readline().split()) for p in self.processes]
            took, used = zip(*answers, strict=True)
            return max(took), sum(used)

        return run


def main() -> None:
    parser = argparse.ArgumentParser()
    add_peers(parser)
    parser.add_argument(
        "--rows", nargs="+", metavar="NAME", default=[*ROWS, AGREED], help="only these"
    )
    options = parser.parse_args()
    pairs = 4 if options.quick else 30
    peers = {**peers_of(options), "by hand": (sys.executable, "by_hand")}
    print(f"{'what':45} {'by the clock':>18}  {'of the processors':>18}")
    with Workers(sys.executable, "ours") as ours:
        for peer, command in peers.items():
            with Workers(*command) as theirs:
                for name in (row for row in ROWS if row in options.rows):
                    blocks = ours.block(name), theirs.block(name)
                    show(f"{name}, ours / {peer}", *blocks, pairs=pairs)
        if AGREED in options.rows:
            blocks = ours.block("MLP from files"), ours.block("MLP from memory")
            show(AGREED, *blocks, pairs=pairs)


def add_peers(parser):
    """The options that say which libraries to compare with."""
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has it")
    parser.add_argument("--quick", action="store_true", help="few pairs, to try it out")


def peers_of(options):
    """For each library that is there an interpreter that has it, and its worker's module."""
    peers = {
        "TensorFlow": (options.tensorflow or _own("tensorflow"), "in_tensorflow"),
        "PyTorch": (options.torch or _own("torch"), "in_torch"),
    }
    return {name: peer for name, peer in peers.items() if peer[0]}


def launch(**environment):
    command = "from replicax_command import entry; entry()"
    worker = ("-m", "benchmarks._workers.ours", "first")
    arguments = ("launch", "--workers", "2", *worker)
    return [start(sys.executable, "-c", command, *arguments, **environment)]


def show(name, ours, theirs, *, pairs):
    (clock, processors) = compare_both(ours, theirs, pairs=pairs)
    times = " / ".join(f"{1e3 * t:.2f}" for t in (*clock.medians, *processors.medians))
    print(f"{name:45} {clock.ratio!s:>18}  {processors.ratio!s:>18}  {times} ms", flush=True)


def _own(package):
    return sys.executable if importlib.util.find_spec(package) else None


if __name__ == "__main__":
    main()
