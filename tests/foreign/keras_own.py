"""Keras's own tests, as its wheel ships them, with and without a strategy around each of them.

``python -m tests.foreign.keras_own [group ...]`` prints how many pass, file by file.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
KERAS = Path(importlib.util.find_spec("keras").submodule_search_locations[0]) / "src"

GROUPS = {
    "trainers": ["trainers/*_test.py"],
    "data_adapters": ["trainers/data_adapters/*_test.py"],
    "callbacks": ["callbacks/*_test.py"],
    "optimizers": ["optimizers/*_test.py", "optimizers/schedules/*_test.py"],
    "metrics": ["metrics/*_test.py"],
    "normalization": ["layers/normalization/*_test.py"],
    "rnn": ["layers/rnn/*_test.py"],
    "saving": ["saving/*_test.py"],
}

# Tests that pass without a strategy and not within one, and why.
EXCEPTIONS = {
    "test_fit_eval_flow_for_jax_model_weights": "asserts that weights are absent during fit; here"
    " they stay in their variables",
    "test_jit_fit_with_out_shardings_logic_distributed": "asserts the shardings that a"
    " keras.distribution gives; inside a scope the strategy gives them",
    "test_distributed_checkpoint": "cuts weights with a keras.distribution along the axis of the"
    " replicas; inside a scope that is refused",
    "test_best_case_step": "counts the batches of an epoch that starts again when it was"
    " interrupted; here it goes on with the batch that comes next",
    "test_backup_corrupted": "looks for the files of Keras's backup; here it is a checkpoint of"
    " rx.train, of which the one before is read if the last is damaged",
}

PYTEST = ["-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
PYTEST += ["--import-mode=importlib", "--continue-on-collection-errors"]
PYTEST += ["-o", "junit_family=xunit1"]


def files(group: str) -> list[Path]:
    """The test files of a group."""
    return [path for pattern in GROUPS[group] for path in sorted(KERAS.glob(pattern))]


def outcomes(group: str, *, in_scope: bool) -> dict[str, str]:
    """What became of each test of a group: passed, or why it failed or was skipped."""
    plugin = ["-p", "tests.foreign.keras_plugin"] if in_scope else []
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    env |= {"REPLICAX_CPU_DEVICES": "2", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # most of the time would go there
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        told = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *PYTEST, *plugin),
                *("--rootdir", scratch, f"--junitxml={report}", *files(group)),
            ],
            env=env,
            cwd=scratch,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended without a report:\n{told.stdout}{told.stderr}")
        cases = ElementTree.parse(report).iter("testcase")
        return {_name(case): _outcome(case) for case in cases}


def _name(case: ElementTree.Element) -> str:
    file, test = Path(case.get("file", "")), case.get("name")
    return f"{file.stem}.{case.get('classname', '').rpartition('.')[2]}.{test}"


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            kind = "skipped" if child.tag == "skipped" else "failed"
            why = (child.get("message") or "").strip().splitlines() or [""]
            return f"{kind}: {why[0]}"
    return "passed"


def why_excepted(test: str) -> str | None:
    """Why a test does not pass within a strategy, if the list says so."""
    return next((why for name, why in EXCEPTIONS.items() if name in test), None)


@dataclass(frozen=True)
class Compared:
    """What became of the tests of a group, with and without a strategy around them."""

    group: str
    within: dict[str, str]
    without: dict[str, str]

    @classmethod
    def of(cls, group: str) -> "Compared":
        return cls(group, *(outcomes(group, in_scope=s) for s in (True, False)))

    @property
    def lost(self) -> dict[str, str]:
        """The tests that pass only without a strategy, and what became of them with one."""
        passed = [t for t, result in self.without.items() if result == "passed"]
        results = {t: self.within.get(t, "not run") for t in passed}
        return {t: result for t, result in results.items() if result != "passed"}

    @property
    def row(self) -> str:
        """The group's line of the table."""
        passed = [list(r.values()).count("passed") for r in (self.within, self.without)]
        failed = [r for r in self.without.values() if r.startswith("failed")]
        return f"| {self.group} | {passed[0]} | {passed[1]} | {len(self.lost)} | {len(failed)} |"

    @property
    def notes(self) -> list[str]:
        """Why tests fail, a line for each."""
        lines = [f"* `{t}`, not in a scope: {why_excepted(t) or r}" for t, r in self.lost.items()]
        failed = {t: r for t, r in self.without.items() if r.startswith("failed")}
        return lines + [f"* `{t}`, neither: {r.partition(': ')[2]}" for t, r in failed.items()]


def main(groups: list[str]) -> None:
    """Print the table, and below it why tests fail."""
    found = [Compared.of(group) for group in groups or GROUPS]
    head = "| tests | passed in a scope | passed without | only without | failed without |"
    rows, notes = [c.row for c in found], [line for c in found for line in c.notes]
    sys.stdout.write("\n".join([head, "|---|---|---|---|---|", *rows, "", *notes]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
