"""Run JAX's own tests without replicax, with replicax imported, and after a strategy was used.

JAX ships its tests in no package: ``JAX_SOURCE`` names a checkout of the version of JAX that is
installed. ``python -m tests.foreign.jax_own [group ...]`` prints how many tests pass.
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
MODES = ("without", "imported", "strategy")

# What replicax hooks into or rewrites: a test file, and which of its tests (all if empty).
GROUPS = {
    "api": ("api_test.py", ""),
    "jit": ("jax_jit_test.py", ""),
    "pjit": ("pjit_test.py", ""),
    "shard_map": ("shard_map_test.py", ""),
    "custom_derivatives": ("custom_api_test.py", ""),
    "control_flow": ("lax_control_flow_test.py", ""),
    "lax": ("lax_test.py", "Dot or dot or ReduceWindow or reduce_window or Conv"),
    "lax_derivatives": ("lax_autodiff_test.py", "Dot or ReduceWindow or Conv or Pool"),
    "lax_vmap": ("lax_vmap_test.py", "Dot or ReduceWindow or Conv"),
    "callbacks": ("python_callback_test.py", ""),
    "effects": ("jaxpr_effects_test.py", ""),
    "core": ("core_test.py", ""),
    "cache": ("compilation_cache_test.py", ""),
}

# Tests that pass without replicax and not with it, and why.
EXCEPTIONS: dict[str, str] = {}

PYTEST = ["-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-p", "no:replicax"]
PYTEST += ["--import-mode=importlib", "--continue-on-collection-errors"]
PYTEST += ["-o", "junit_family=xunit1"]


def source() -> Path | None:
    """Return the folder with JAX's tests that ``JAX_SOURCE`` names, if it does."""
    named = os.environ.get("JAX_SOURCE")
    return Path(named).resolve() / "tests" if named else None


def outcomes(group: str, mode: str) -> dict[str, str]:
    """Run a group in a process of its own; return "passed" or the failure of each test."""
    tests = source()
    if tests is None:
        raise RuntimeError("JAX_SOURCE must name a checkout of JAX, for its tests.")
    file, wanted = GROUPS[group]
    plugin = [] if mode == "without" else ["-p", "tests.foreign.jax_plugin"]
    env = {**os.environ, "FOREIGN_WAY": mode, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    # The same devices in every mode, created before JAX's tests ask for them.
    env |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_SKIP_SLOW_TESTS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", *PYTEST, *plugin, "--rootdir", scratch]
        command += [f"--junitxml={report}", "-k", wanted, str(tests / file)]
        told = subprocess.run(command, env=env, cwd=scratch, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"pytest ended without a report:\n{told.stdout}{told.stderr}")
        cases = ElementTree.parse(report).iter("testcase")
        found = {f"{c.get('classname')}.{c.get('name')}": _outcome(c) for c in cases}
    if not found:
        raise RuntimeError(f"{file} has no tests that match {wanted!r}:\n{told.stdout}")
    return found


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            kind = "skipped" if child.tag == "skipped" else "failed"
            why = (child.get("message") or "").strip().splitlines() or [""]
            return f"{kind}: {why[0]}"
    return "passed"


def why_excepted(test: str) -> str | None:
    """Return why a test may fail with replicax, if the list of exceptions has it."""
    return next((why for name, why in EXCEPTIONS.items() if name in test), None)


@dataclass(frozen=True)
class Compared:
    """The outcomes of a group in every mode."""

    group: str
    results: dict[str, dict[str, str]]

    @classmethod
    def of(cls, group: str) -> "Compared":
        return cls(group, {mode: outcomes(group, mode) for mode in MODES})

    @property
    def lost(self) -> dict[str, str]:
        """The tests that pass without replicax only, with the mode and the failure."""
        without, *others = MODES
        passed = [t for t, result in self.results[without].items() if result == "passed"]
        return {
            f"{test}, {mode}": result
            for mode in others
            for test in passed
            if (result := self.results[mode].get(test, "not run")) != "passed"
        }

    @property
    def row(self) -> str:
        """The group's line of the table."""
        passed = [list(self.results[mode].values()).count("passed") for mode in MODES]
        failed = [r for r in self.results["without"].values() if r.startswith("failed")]
        cells = [self.group, *passed, len(self.lost), len(failed)]
        return f"| {' | '.join(map(str, cells))} |"

    @property
    def notes(self) -> list[str]:
        """One line for each test that passes without replicax only."""
        return [f"* `{t}`: {why_excepted(t) or result}" for t, result in self.lost.items()]


def main(groups: list[str]) -> None:
    """Print the table, and below it the tests that replicax changes."""
    head = "| tests | without replicax | imported | strategy used | lost | failed without |"
    sys.stdout.write(f"{head}\n|---|---|---|---|---|---|\n")
    notes: list[str] = []
    for group in groups or GROUPS:
        compared = Compared.of(group)
        notes += compared.notes
        sys.stdout.write(f"{compared.row}\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(["", *notes, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
