"""Keras's own tests, as its wheel ships them, with and without a strategy around each of them.

``python -m tests.foreign.keras_own [group ...]`` prints how many pass, file by file.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
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


def main(groups: list[str]) -> None:
    """Print the table, and below it why tests fail."""
    rows, notes = [], []
    for group in groups or GROUPS:
        both = [outcomes(group, in_scope=s) for s in (True, False)]
        within, without = both
        lost = [t for t, r in without.items() if r == "passed" and within.get(t) != "passed"]
        failed = [t for t, r in without.items() if r.startswith("failed")]
        counts = [list(r.values()).count("passed") for r in both]
        rows.append(f"| {group} | {counts[0]} | {counts[1]} | {len(lost)} | {len(failed)} |")
        notes += [f"* `{t}`, not in a scope: {why_excepted(t) or within.get(t)}" for t in lost]
        notes += [f"* `{t}`, neither: {without[t].partition(': ')[2]}" for t in failed]
    head = "| tests | passed in a scope | passed without | only without | failed without |"
    lines = [head, "|---|---|---|---|---|", *rows, "", *notes]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
