"""Every example runs, with few steps, as its docstring says."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import replicax
from replicax._src.port.rewrite import port
from tests.fresh_process import run_fresh

FOLDER = Path(__file__).parents[1] / "examples"
FOR_TENSORFLOW = FOLDER / "from_tensorflow" / "tensorflow_program.py"
EXAMPLES = [path for path in sorted(FOLDER.rglob("*.py")) if path != FOR_TENSORFLOW]
SHORT = [path for path in EXAMPLES if path.parent.name == "extend"]


@pytest.mark.parametrize(
    "path", [p for p in EXAMPLES if p not in SHORT], ids=lambda path: path.stem
)
def test_an_example_runs(path):
    if "import torch" in path.read_text() and importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    if "import ray" in path.read_text():
        pytest.skip("make test-clusters runs it on a Ray cluster")
    source = str(Path(replicax.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, str(path), "--steps", "3"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert result.returncode == 0, result.stdout + result.stderr


def test_the_examples_of_extensions_run():
    """In one process, as each is short; all set fewer virtual devices than the first."""
    script = f"""
        import runpy
        for path in {sorted(map(str, SHORT))!r}:
            runpy.run_path(path, run_name="__main__")
            print("done:", path)
    """
    result = run_fresh(script, REPLICAX_CPU_DEVICES="8")

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("done:") == len(SHORT) == 6


def test_the_port_beside_the_program_for_tensorflow_is_what_the_command_makes():
    result = port(FOR_TENSORFLOW.read_text())

    assert result.code == FOR_TENSORFLOW.with_name("ported.py").read_text()
    assert result.marks == []


def test_the_table_names_every_example():
    table = (FOLDER / "README.md").read_text()

    for path in EXAMPLES:
        name = path.relative_to(FOLDER).parts[0]
        assert f"[{name}]({name})" in table


def test_the_page_about_slurm_shows_the_script_of_the_example():
    script = (FOLDER / "slurm" / "train.sbatch").read_text()
    page = (FOLDER.parent / "docs" / "slurm.md").read_text()

    assert textwrap.indent(script, "    ") in page
