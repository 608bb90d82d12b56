"""Checkpoints against writing and reading the same bytes: ``python -m benchmarks.checkpoint``."""

import os
import shutil
import tempfile
import time
from statistics import median

import numpy as np

import replicax as rx
from benchmarks._timing import block, compare

_COUNT, _SIZE = 50, 1_000_000  # 200 MB


class Bench:
    """The same numbers in variables and in a file."""

    def __init__(self, folder: str) -> None:
        self.path, self.raw = f"{folder}/ckpt", f"{folder}/raw"
        rng = np.random.default_rng(0)
        self.values = [rng.standard_normal(_SIZE, np.float32) for _ in range(_COUNT)]
        self.variables = [rx.Variable(v) for v in self.values]
        self.checkpoint = rx.train.Checkpoint(all=self.variables)

    def save(self):
        self.checkpoint.write(self.path)

    def write(self):
        """Over the old file: whoever is killed meanwhile has neither."""
        self._write_to(self.raw)

    def replace(self):
        """Beside the old file, whose place it takes when it is whole, as a save does."""
        self._write_to(f"{self.raw}-new")
        os.replace(f"{self.raw}-new", self.raw)

    def _write_to(self, path):
        with open(path, "wb") as file:
            for value in self.values:
                file.write(memoryview(value).cast("B"))
            file.flush()
            os.fsync(file.fileno())

    def restore(self):
        self.checkpoint.read(self.path)

    def read(self):
        """One after the other: whoever finds damage in the middle has half of the new values."""
        with open(self.raw, "rb") as file:
            for variable in self.variables:
                variable.assign(self._next(file))

    def read_all(self):
        """All, and then put them in their places, as a restore does."""
        with open(self.raw, "rb") as file:
            values = [self._next(file) for _ in self.variables]
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def _next(self, file):
        return np.frombuffer(file.read(4 * _SIZE), np.float32)

    def pause(self):
        """The part of a save beside the training for which the training waits."""
        began = time.perf_counter()
        self.checkpoint.write(self.path, block=False)
        paused = time.perf_counter() - began
        self.checkpoint.sync()
        return paused / (time.perf_counter() - began)


def main() -> None:
    folder = tempfile.mkdtemp()
    bench = Bench(folder)
    print(f"\nA checkpoint of {4e-6 * _COUNT * _SIZE:.0f} MB in {_COUNT} variables\n")
    print("| what | against | ratio (median, quartiles) | ours, ms |\n|---|---|---|---|")
    for name, other, ours, theirs in (
        ("save", "write and fsync, beside the old file", bench.save, bench.replace),
        ("save", "write and fsync, over the old file", bench.save, bench.write),
        ("restore", "read all, then assign all", bench.restore, bench.read_all),
        ("restore", "read and assign, one by one", bench.restore, bench.read),
    ):
        result = compare(block(ours), block(theirs), pairs=11)
        ratio = result.ratio
        shown = f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
        print(f"| {name} | {other} | {shown} | {1e3 * median(result.ours):.0f} |")
    paused = median(bench.pause() for _ in range(7))
    print(f"| pause, if saved beside the training | a whole save | {paused:.3f} | |")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
