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
    "trainers": ["trainers/*_test.py", "trainers/data_adapters/*_test.py"],
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
    "test_jit_fit_with_out_shardings_logic_distributed": "asserts that a keras.distribution"
    " decides the layout; inside a scope it is refused",
}

# Files that need what the wheel does not have: TensorFlow, torch, or data of Keras's repository.
LEFT_OUT = ("tf_dataset_adapter_test.py", "torch_data_loader_adapter_test.py")

PYTEST = ["-q", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
PYTEST += ["--import-mode=importlib"]


def files(group: str) -> list[Path]:
    """The test files of a group."""
    found = [path for pattern in GROUPS[group] for path in sorted(KERAS.glob(pattern))]
    return [path for path in found if path.name not in LEFT_OUT]


def outcomes(path: Path, *, in_scope: bool, select: str = "") -> dict[str, str]:
    """What became of each test of a file: passed, failed or skipped."""
    plugin = ["-p", "tests.foreign.keras_plugin"] if in_scope else []
    chosen = ["-k", select] if select else []
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    env |= {"REPLICAX_CPU_DEVICES": "2", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *PYTEST, *plugin, *chosen),
                *("--rootdir", scratch, f"--junitxml={report}", str(path)),
            ],
            env=env,
            cwd=scratch,
            capture_output=True,
        )
        if not report.exists():
            return {"the file itself": "failed"}
        cases = ElementTree.parse(report).iter("testcase")
        return {
            f"{c.get('classname')}.{c.get('name')}".rpartition("src.")[2]: _outcome(c)
            for c in cases
        }


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def is_excepted(test: str) -> bool:
    """Whether the list says why a test does not pass within a strategy."""
    return any(name in test for name in EXCEPTIONS)


def main(groups: list[str]) -> None:
    """Print the table."""
    for group in groups or GROUPS:
        for path in files(group):
            within, without = (outcomes(path, in_scope=s) for s in (True, False))
            counts = [list(r.values()).count("passed") for r in (within, without)]
            lost = [t for t, r in without.items() if r == "passed" and within.get(t) != "passed"]
            name = path.relative_to(KERAS)
            sys.stdout.write(f"| {name} | {counts[0]} | {counts[1]} | {', '.join(lost)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
