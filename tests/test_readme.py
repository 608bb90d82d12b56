"""The program in the README runs, and does what the README says."""

import re
from pathlib import Path

from tests.fresh_process import run_fresh

README = Path(__file__).parents[1] / "README.md"


def test_the_program_in_the_readme_learns_its_weights():
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

    result = run_fresh(program, REPLICAX_CPU_DEVICES="2")

    assert result.returncode == 0, result.stderr
    assert re.findall(r"0\.333", result.stdout) == ["0.333"] * 3
