"""The program in the README runs, and does what the README says."""

import re
from pathlib import Path

from tests.fresh_process import run_fresh

README = Path(__file__).parents[1] / "README.md"


KERAS, PLAIN = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_keras_program_in_the_readme_trains():
    result = run_fresh(KERAS, REPLICAX_CPU_DEVICES="2")

    assert result.returncode == 0, result.stderr
    losses = [float(x) for x in re.findall(r"loss: ([\d.]+)\n", result.stdout)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


def test_the_plain_program_in_the_readme_learns_its_weights():
    result = run_fresh(PLAIN, REPLICAX_CPU_DEVICES="2")

    assert result.returncode == 0, result.stderr
    assert re.findall(r"0\.333", result.stdout) == ["0.333"] * 3
