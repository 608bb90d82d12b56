"""Run programs on one device and with replicas, and compare the numbers."""

import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.foreign.public import guest
from tests.foreign.public.exceptions import EXCEPTIONS
from tests.foreign.public.programs import Program, missing_package, needs_other_backend, statements
from tests.foreign.public.steps import has_steps

ROOT = Path(__file__).parents[3]

# The largest relative difference that float32 arithmetic in another order explains, by the start of
# a key; a difference above it is measured against a run with perturbed weights.
TOLERANCES = {
    "fit": 1e-3,
    "evaluate": 1e-3,
    "train_on_batch": 1e-3,
    "test_on_batch": 1e-3,
    "predict": 2e-3,
    "printed": 2e-3,
    "shown": 2e-3,
    "weights": 2e-3,
    "state": 2e-3,
    "variable": 2e-3,
}
SPREAD = 10  # times the difference that a perturbation of the last bit makes
GOOD = ("unchanged", "explained")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a program, read back from the process that ran it."""

    arrays: dict[str, np.ndarray]
    errors: dict[str, str]
    missing: str | None
    trained: int
    own: list[str]
    devices: int
    ended: str  # why there is no report; empty if there is one
    seconds: float

    @property
    def first_error(self) -> str:
        """The line and the text of the first error."""
        line, text = next(iter(self.errors.items()), ("", ""))
        return f"line {line}: {text}" if text else ""


# Compiling takes most of the time, hence the fast one; `guest` undoes it, to round otherwise.
_ENVIRONMENT = {
    "KERAS_BACKEND": "jax",
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONPATH": f"{ROOT}/src:{ROOT}",
    "PYTHONHASHSEED": "0",
    "MPLBACKEND": "Agg",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_DETERMINISTIC_OPS": "1",
    "PUBLIC_PRELOAD": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


@functools.cache
def _processes() -> multiprocessing.context.ForkServerContext:
    """Start the process that runs are forked from, so that they need not import libraries."""
    for name in ("XLA_FLAGS", "REPLICAX_CPU_DEVICES", "JAX_NUM_CPU_DEVICES"):
        os.environ.pop(name, None)
    os.environ.update(_ENVIRONMENT)
    sys.path.insert(0, f"{ROOT}/src")  # which the server takes over, before any installed replicax
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.foreign.public.preload"])
    return context


def run(
    program: Program,
    replicas: int,
    options: Sequence[str],
    timeout: float,
    logs: Path | None = None,
) -> Run:
    """Run a program in a process of its own, with a home and a working folder of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "report.json"
        process = _processes().Process(
            target=guest.main, args=(program, out, replicas, tuple(options))
        )
        started = time.monotonic()
        process.start()
        name = "-".join([program.name.replace("/", "."), str(replicas), *options]) + ".txt"
        ended = _wait(process, out, timeout, logs / name if logs else None)
        return _read(out, ended, time.monotonic() - started)


def _wait(process: Any, out: Path, timeout: float, kept: Path | None) -> str:
    """Return why the process did not end well: its last words, or that it took too long."""
    process.join(timeout)
    slow = process.exitcode is None
    # Its group, as loaders may have started processes of their own.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    log = out.with_name(guest.LOG)
    words = log.read_text(errors="replace").strip() if log.exists() else ""
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(words)
    if slow:
        return f"takes longer than {timeout:.0f} s"
    code = process.exitcode
    return f"ended with {code}: {words.splitlines()[-1] if words else ''}" if code else ""


def _read(out: Path, ended: str, seconds: float) -> Run:
    if ended or not out.exists():
        return Run({}, {}, None, 0, [], 0, ended or "ended without a report", seconds)
    report = json.loads(out.read_text())
    with np.load(out.with_suffix(".npz")) as stored:
        arrays = {key: stored[f"a{i}"] for i, key in enumerate(report["keys"])}
    return Run(
        arrays,
        report["errors"],
        report["missing"],
        report["trained"],
        report["own"],
        report["devices"],
        "",
        seconds,
    )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A row of the table.

    Attributes:
        program: Its name.
        how: How the replicas run it.
        verdict: "unchanged", "explained", "differs", "fails", "not run", or "not distributed": the
            numbers are equal, but the program ran in a scope without a step on all replicas.
        difference: The largest relative difference of compared numbers.
        compared: How many arrays were compared.
        reason: Why, for every verdict but "unchanged".
        seconds: How long the run with replicas took.
    """

    program: str
    how: str
    verdict: str
    difference: float
    compared: int
    reason: str
    seconds: float = 0.0

    @property
    def row(self) -> str:
        """The row in Markdown."""
        reason = self.reason.replace("|", "\\|").replace("\n", " ")
        difference = f"{self.difference:.1e}" if self.compared else ""
        cells = [self.program, self.how, self.verdict, str(self.compared), difference, reason]
        return f"| {' | '.join(cells)} |"


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest value."""
    if got.shape != expected.shape:
        return float("inf")
    if not np.array_equal(np.isfinite(got), np.isfinite(expected)):
        return float("inf")
    finite = np.isfinite(expected)
    got, expected = got[finite].astype(np.float64), expected[finite].astype(np.float64)
    if not expected.size:
        return 0.0
    scale = np.abs(expected).max()
    return float(np.abs(got - expected).max() / max(scale, 1e-3))


def differences(got: Run, expected: Run) -> dict[str, float]:
    """Return the difference of each array that both runs have; infinite if one has not."""
    keys = [*expected.arrays, *(key for key in got.arrays if key not in expected.arrays)]
    return {
        key: difference(got.arrays[key], expected.arrays[key])
        if key in got.arrays and key in expected.arrays
        else float("inf")
        for key in keys
    }


def tolerance(key: str) -> float:
    """Return the tolerance of an array by the kind of its key."""
    return TOLERANCES[key.split()[0]]


def too_large(found: dict[str, float]) -> dict[str, float]:
    """Return the differences above their tolerance."""
    return {key: value for key, value in found.items() if value > tolerance(key)}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How to compare one program."""

    program: Program
    replicas: int
    timeout: float
    options: tuple[str, ...] = ()
    logs: Path | None = None

    def verdict(self) -> Verdict:
        """Run the program as often as it takes to decide."""
        if package := missing_package(self.program):
            return Verdict(self.program.name, "", "not run", 0.0, 0, f"needs {package}")
        if backend := needs_other_backend(self.program):
            reason = f"is written for Keras's {backend} backend"
            return Verdict(self.program.name, "", "not run", 0.0, 0, reason)
        alone = self._run(0)
        if reason := _why_not_run(self.program, alone):
            return self._judge("not run", {}, reason, alone)
        if self.program.library == "keras":
            return dataclasses.replace(self._compare(alone), how="scope, fit")
        if not self.program.file.is_dir() and not has_steps(statements(self.program)):
            return self._in_scope(alone)
        by_steps = self._compare(alone, "run")
        if by_steps.verdict in GOOD:
            return dataclasses.replace(by_steps, how="steps by strategy.run")
        return self._in_scope(alone, f"by strategy.run {by_steps.verdict}: {by_steps.reason}")

    def _in_scope(self, alone: Run, why: str = "the program jits no function") -> Verdict:
        """Judge a program none of whose steps ran on replicas."""
        found = self._compare(alone)
        reason = "; ".join(filter(None, [found.reason, why]))
        verdict = "not distributed" if found.verdict in GOOD else found.verdict
        return dataclasses.replace(found, how="scope only", verdict=verdict, reason=reason)

    def _compare(self, alone: Run, *options: str) -> Verdict:
        together = self._run(self.replicas, *options)
        if reason := _why_failed(together, alone):
            found = differences(together, alone) if not together.ended else {}
            return self._excepted("fails", found, reason, together)
        found = differences(together, alone)
        if too_large(found) and "run" in options:
            return self._judge("differs", found, _beyond(too_large(found), together), together)
        if too_large(found):
            return self._explain(alone, together, found)
        if together.devices < self.replicas:
            reason = f"the models are on {together.devices} devices"
            return self._judge("not distributed", found, reason, together)
        reason = f"both fail at {alone.first_error}" if alone.errors else ""
        return self._judge("unchanged", found, reason, together)

    def _explain(self, alone: Run, together: Run, found: dict[str, float]) -> Verdict:
        again = self._run(0)
        unstable = too_large(differences(again, alone))
        left = {key: value for key, value in found.items() if key not in unstable}
        if not too_large(left):
            reason = "differs from run to run on one device: " + _largest(unstable)
            return self._judge("explained", left, reason, together)
        spread = differences(self._run(0, "perturb"), alone)
        beyond = {k: v for k, v in too_large(left).items() if v > SPREAD * spread.get(k, 0.0)}
        if not beyond:
            reason = f"rounding: a last bit moves one device as far ({_largest(too_large(left))})"
            return self._judge("explained", left, reason, together)
        return self._excepted("differs", left, _beyond(beyond, together), together)

    def _run(self, replicas: int, *options: str) -> Run:
        return run(self.program, replicas, (*self.options, *options), self.timeout, self.logs)

    def _excepted(self, verdict: str, found: dict[str, float], reason: str, ran: Run) -> Verdict:
        why = EXCEPTIONS.get(self.program.name)
        if why is not None:
            return self._judge("explained", found, f"{why} [{reason}]", ran)
        return self._judge(verdict, found, reason, ran)

    def _judge(self, verdict: str, found: dict[str, float], reason: str, ran: Run) -> Verdict:
        largest = max(found.values(), default=0.0)
        return Verdict(
            self.program.name, "", verdict, largest, len(found), reason, round(ran.seconds, 1)
        )


def _largest(found: dict[str, float]) -> str:
    key = max(found, key=lambda k: found[k] / tolerance(k))
    return f"{key}: {found[key]:.1e}"


def _beyond(found: dict[str, float], ran: Run) -> str:
    own = f" ({', '.join(ran.own)}: each replica's own in strategy.run)" if ran.own else ""
    return _largest(found) + own


def _why_not_run(program: Program, alone: Run) -> str:
    """Return why a program says nothing about replicax: it does not work on one device."""
    if alone.ended:
        return alone.ended
    if alone.missing and not alone.trained:
        return f"needs {alone.missing}"
    if not alone.arrays:
        return alone.first_error or "computes no numbers"
    # A reader of a notebook goes on after a cell that shows an error; a script of JAX ends there.
    if alone.errors and not alone.trained and not program.path.endswith(".ipynb"):
        return alone.first_error
    return ""


def _why_failed(together: Run, alone: Run) -> str:
    if together.ended:
        return together.ended
    new = {k: text for k, text in together.errors.items() if alone.errors.get(k) is None}
    if new:
        line, text = next(iter(new.items()))
        return f"line {line}: {text}"
    return ""
