"""The programs in the README and in the page about Keras run, and do what is said there."""

import doctest
import re
from pathlib import Path

import pytest

from tests.fresh_process import run_fresh

ROOT = Path(__file__).parents[1]


def programs(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


KERAS, PLAIN = programs("README.md")


@pytest.mark.parametrize("devices", ["", "2"])
def test_the_keras_program_in_the_readme_trains(devices):
    result = run_fresh(KERAS, REPLICAX_CPU_DEVICES=devices)

    assert result.returncode == 0, result.stderr
    _, *epochs = result.stdout.split("Epoch ")  # each with the bar as it went along
    losses = [float(re.findall(r"loss: ([\d.e-]+)", epoch)[-1]) for epoch in epochs]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("devices", ["", "2"])
def test_the_plain_program_in_the_readme_learns_its_weights(devices):
    result = run_fresh(PLAIN, REPLICAX_CPU_DEVICES=devices)

    assert result.returncode == 0, result.stderr
    assert re.findall(r"0\.333", result.stdout) == ["0.333"] * 3


def test_the_programs_of_the_page_about_keras_run_as_they_are():
    """Without any setting: the first two are one program, and so are the others."""
    fit, loop, layouts, keras_layouts = programs("docs/keras.md")
    looks = """
assert int(model.optimizer.iterations) == 3 and len(model.weights[0].value.devices()) == 2
"""
    looks_again = """
assert int(optimizer.iterations) == 3 and float(loss) < 1e6 and float(error.result()) > 0
"""
    looks_at_parts = """
import numpy as np
cut.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
[*slots] = [v for v in cut.optimizer.variables if "wide_kernel" in v.name]
assert len(slots) == 2
for v in (wide.kernel, *slots):
    assert v.value.addressable_shards[0].data.shape == (4, 3)
"""
    looks_at_keras = """
assert layer.kernel.value.addressable_shards[0].data.shape == (4, 3)
"""
    for program in (
        fit + looks + loop + looks_again,
        layouts + looks_at_parts + keras_layouts + looks_at_keras,
    ):
        result = run_fresh(program, REPLICAX_CPU_DEVICES="")

        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("program", programs("docs/index.md")[1:], ids=["keras", "nnx", "optax"])
def test_the_programs_of_the_first_page_learn(program):
    result = run_fresh(program, REPLICAX_CPU_DEVICES="2")

    assert result.returncode == 0, result.stderr
    assert float(re.findall(r"loss: ([\d.e-]+)", result.stdout)[-1]) < 0.5


def pasted(path):
    """What a reader pastes: the code blocks of a page, without prompts and outputs."""
    examples = doctest.DocTestParser().get_examples((ROOT / path).read_text())
    return "".join(example.source for example in examples) or "".join(programs(path)[:2])


QUICKSTARTS = ["docs/index.md", "docs/custom_loop.md", "docs/jax.md"]


@pytest.mark.parametrize("path", [*QUICKSTARTS, "docs/porting.md"])
def test_a_page_runs_when_it_is_pasted_without_any_setting(path, tmp_path):
    """On a machine with one CPU device; `strategy` makes the second, as JAX has not started yet."""
    result = run_fresh(pasted(path), REPLICAX_CPU_DEVICES="", TMPDIR=str(tmp_path))

    assert result.returncode == 0, result.stderr
