"""Run another library's own tests in several ways, and compare what passes.

The ways are ``without`` replicax, with replicax ``imported`` before the library, after a
``strategy`` was used in the process, and each test in the ``scope`` of a strategy of two replicas.
Only the tests that do not pass in one of the other ways run without replicax too: most pass.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PASSED = "passed"

PYTEST = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "tests.foreign.own_plugin"]
PYTEST += ["-p", "no:replicax", "--import-mode=importlib", "--continue-on-collection-errors"]
PYTEST += ["-o", "junit_family=xunit1"]


@dataclass(frozen=True)
class Suite:
    """The tests of a library.

    Attributes:
        groups: Return the names of the groups of tests, which run in a process each.
        files: Return the files of a group.
        ways: The ways to run them, beside the one without replicax.
        exceptions: For each way, tests (a part of their name) that may fail in it, and why.
        env: Return the environment variables that the tests need.
        config: Return pytest's configuration file.
        wanted: Return pytest's expression for the tests of a group that run; empty for all.
    """

    groups: Callable[[], Sequence[str]]
    files: Callable[[str], Sequence[Path]]
    ways: Sequence[str]
    exceptions: Mapping[str, Mapping[str, str]]
    env: Callable[[], Mapping[str, str]]
    config: Callable[[], str] = lambda: os.devnull
    wanted: Callable[[str], str] = lambda _: ""

    def outcomes(self, group: str, way: str, only: Collection[str] | None = None) -> dict[str, str]:
        """Return the outcome of each test of a group: "passed", "failed: ..." or "skipped: ...".

        Args:
            group: The group.
            way: The way to run it.
            only: The tests to run, named as in the outcomes; all by default. Tests of the same name
                in other classes run too.
        """
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "FOREIGN_WAY": way, **self.env()}
        env |= {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling takes most of the time
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.xml"
            if only is not None:
                chosen = Path(scratch) / "only.json"
                chosen.write_text(json.dumps([name.split(".", 2)[2] for name in only]))
                env["FOREIGN_ONLY"] = str(chosen)
            ended = subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", *PYTEST, "-c", self.config()),
                    *("--rootdir", scratch, f"--junitxml={report}", "-k", self.wanted(group)),
                    *self.files(group),
                ],
                env=env,
                cwd=scratch,
                capture_output=True,
                text=True,
            )
            if not report.exists():
                raise RuntimeError(f"pytest ended without a report:\n{ended.stdout}{ended.stderr}")
            cases = ElementTree.parse(report).iter("testcase")
            return {_name(case): _outcome(case) for case in cases}

    def why_excepted(self, test: str, way: str) -> str | None:
        """Return why a test may fail in a way, if the list of exceptions has it."""
        known = self.exceptions.get(way, {})
        return next((why for name, why in known.items() if name in test), None)

    def compare(self, group: str) -> "Compared":
        """Run a group in every way, and without replicax what does not pass in one of them."""
        ways = {way: self.outcomes(group, way) for way in self.ways}
        doubtful = {t for found in ways.values() for t, result in found.items() if result != PASSED}
        without = self.outcomes(group, "without", doubtful) if doubtful else {}
        return Compared(self, group, ways, without)

    def main(self, groups: Sequence[str]) -> None:
        """Print a table with a row for each group, and below it why tests fail."""
        ways = [f"passed {way}, lost" for way in self.ways]
        head = ["tests", *ways, "failed without"]
        sys.stdout.write(f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n")
        notes = []
        for group in groups or self.groups():
            compared = self.compare(group)
            notes += compared.notes
            sys.stdout.write(compared.row + "\n")
            sys.stdout.flush()
        sys.stdout.write("\n".join(["", *notes, ""]))


@dataclass(frozen=True)
class Compared:
    """The outcomes of the tests of a group.

    Attributes:
        suite: The suite.
        group: The group.
        ways: The outcomes of all tests in each way of the suite.
        without: The outcomes without replicax of the tests that do not pass in one of these ways.
    """

    suite: Suite
    group: str
    ways: Mapping[str, Mapping[str, str]]
    without: Mapping[str, str]

    def lost(self, way: str) -> dict[str, str]:
        """Return what passes without replicax and not in ``way``, with its outcomes.

        A file that cannot be imported in ``way`` alone counts as one test.
        """
        failing = {t: result for t, result in self.ways[way].items() if result != PASSED}
        return {t: result for t, result in failing.items() if self.without.get(t, PASSED) == PASSED}

    @property
    def unexplained(self) -> dict[str, str]:
        """The tests that replicax breaks and that the list of exceptions does not have."""
        return {
            f"{t} ({way})": result
            for way in self.ways
            for t, result in self.lost(way).items()
            if not self.suite.why_excepted(t, way)
        }

    @property
    def row(self) -> str:
        """The group's row of the table."""
        cells = [self.group, *(f"{self._passed(w)}, {len(self.lost(w))}" for w in self.ways)]
        return f"| {' | '.join([*cells, str(len(self._failed))])} |"

    @property
    def notes(self) -> list[str]:
        """Why tests fail, a line for each."""
        lines = [
            f"* `{t}`, {way}: {self.suite.why_excepted(t, way) or result}"
            for way in self.ways
            for t, result in self.lost(way).items()
        ]
        return lines + [f"* `{t}`, always: {r.partition(': ')[2]}" for t, r in self._failed.items()]

    @property
    def _failed(self) -> dict[str, str]:
        return {t: r for t, r in self.without.items() if r.startswith("failed")}

    def _passed(self, way: str) -> int:
        return list(self.ways[way].values()).count(PASSED)


def _name(case: ElementTree.Element) -> str:
    file, test = Path(case.get("file", "")), case.get("name")
    return f"{file.stem}.{case.get('classname', '').rpartition('.')[2]}.{test}"


def _outcome(case: ElementTree.Element) -> str:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            kind = "skipped" if child.tag == "skipped" else "failed"
            why = (child.get("message") or "").strip().splitlines() or [""]
            return f"{kind}: {why[0]}"
    return PASSED
