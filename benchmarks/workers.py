"""Two workers of ours and two of TensorFlow's MultiWorkerMirroredStrategy, in ratios.

    python benchmarks/workers.py [--tensorflow /path/to/python] [--pairs 20]

Both gangs wait for their next block, and blocks alternate. Also: what it costs that the workers
agree on every batch, and how long it takes from the command to the first step.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent)]

from benchmarks._timing import compare  # noqa: E402
from replicax.workers._wire import free_ports  # noqa: E402


class Workers:
    """A gang of two that does blocks of steps on request."""

    def __init__(self, python, script, **environment):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.began = time.perf_counter()
        self.processes = []
        for index in range(2):
            task = {"type": "worker", "index": index}
            env = {
                **os.environ,
                "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": str(HERE.parent / "src"),
                **environment,
            }
            self.processes.append(
                subprocess.Popen(
                    [python, str(HERE / script)],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )

    def __enter__(self):
        for process in self.processes:
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{process.args} did not start")
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
    parser.add_argument("--tensorflow", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    has_tensorflow = Path(options.tensorflow).exists()
    with ExitStack() as stack:
        ours = stack.enter_context(Workers(sys.executable, "_workers_ours.py"))
        if has_tensorflow:
            theirs = stack.enter_context(Workers(options.tensorflow, "_workers_tensorflow.py"))
            for name in ("all_reduce 1", "all_reduce 1024", f"all_reduce {2**18}", "MLP"):
                show(
                    f"{name}, ours / TensorFlow",
                    compare(ours.block(name), theirs.block(name), pairs=options.pairs),
                )
        show(
            "MLP with agreed batches / without",
            compare(
                ours.block("MLP from files"), ours.block("MLP from memory"), pairs=options.pairs
            ),
        )
    if has_tensorflow:
        first = [
            (
                first_step(sys.executable, "_workers_ours.py"),
                first_step(options.tensorflow, "_workers_tensorflow.py"),
            )
            for _ in range(3)
        ]
        a, b = (sorted(x)[1] for x in zip(*first, strict=True))
        print(
            f"{'command to first step, ours / TensorFlow':45s} {a / b:5.2f}  ({a:.1f} s, {b:.1f} s)"
        )


def first_step(python, script):
    workers = Workers(python, script)
    with workers:
        workers.block("MLP")(1)
        return time.perf_counter() - workers.began


def show(name, comparison):
    ratio = comparison.ratio
    print(f"{name:45s} {ratio.median:5.2f}  ({ratio.low:.2f} to {ratio.high:.2f})", flush=True)


if __name__ == "__main__":
    main()
