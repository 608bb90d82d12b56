"""Every example runs, with few steps, as its docstring says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import replicax

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path):
    source = str(Path(replicax.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, str(path), "--steps", "3"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert result.returncode == 0, result.stdout + result.stderr
