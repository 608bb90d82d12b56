import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import replicax
from tests.ahead.needs import needs_compiler

SCRIPT = """
import sys
import jax.numpy as jnp
import replicax as rx

strategy = rx.distribute.TPUStrategy()
with strategy.scope():
    weight = rx.Variable(lambda: jnp.zeros((int(sys.argv[1]), 128)))

@rx.function
def evaluate():
    return strategy.run(lambda: weight.read_value().sum())

@rx.function
def train_step():
    return strategy.run(lambda: weight.assign_add(jnp.ones(weight.shape)))

print("before")
if "--skip" not in sys.argv:
    evaluate()
train_step()
print("after")
"""


def replicax_command(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "REPLICAX_"))}
    env["PYTHONPATH"] = str(Path(replicax.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-m", "replicax", *map(str, arguments)],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@needs_compiler
def test_the_training_step_of_a_script_is_compiled_and_not_run(script, tmp_path):
    out = tmp_path / "report.json"

    done = replicax_command(
        "preflight", script, "--topology", "v5e:4x4", "--json", out, "--", "256"
    )

    assert done.returncode == 0, done.stderr
    assert "train_step on v5e:4x4" in done.stdout
    assert "16 replicas" in done.stdout
    assert "before" in done.stdout
    assert "after" not in done.stdout
    facts = json.loads(out.read_text())
    assert (facts["step"], facts["memory"]["arguments"]) == ("train_step", 256 * 128 * 4)


@needs_compiler
def test_a_step_is_held_to_a_limit_and_to_what_it_was(script, tmp_path):
    report, folder = tmp_path / "report.json", tmp_path / "hlo"
    command = "preflight", script, "--topology", "v5e:2x2", "--cache", tmp_path / "cache"

    before = replicax_command(*command, "--json", report, "--", "256")
    again = replicax_command(
        *command, "--baseline", report, "--max-memory", "1KiB", "--hlo", folder, "--", "256"
    )
    larger = replicax_command(*command, "--baseline", report, "--", "512")

    assert (before.returncode, again.returncode, larger.returncode) == (0, 6, 6)
    assert "1 KiB allowed" in again.stdout
    assert "->" not in again.stdout  # nothing grew
    assert (folder / "train_step_v5e_2x2.hlo.txt").read_text().startswith("HloModule")
    assert "v5e:2x2: memory" in larger.stdout
    assert len(list((tmp_path / "cache").iterdir())) == 2  # the second was found again


@needs_compiler
def test_several_slices_are_a_sweep_and_a_function_can_be_chosen(script):
    topologies = ["--topology", "v5e:2x2", "--topology", "v4:2x2x1"]

    done = replicax_command("preflight", *topologies, "--function", "evaluate", script, "--", "128")

    assert done.returncode == 0, done.stderr
    assert "evaluate on several slices" in done.stdout


@needs_compiler
def test_a_step_that_does_not_fit_fails_the_command(script):
    done = replicax_command(
        "preflight", "--plan", "--topology", "v5e:2x2", script, "--", 60_000_000, "--skip"
    )

    assert done.returncode == 1, done.stderr
    assert "does NOT fit" in done.stdout


@needs_compiler
def test_a_script_without_a_step_says_what_it_traced(script):
    done = replicax_command("preflight", script, "--function", "fit", "--", "8")

    assert done.returncode == 5
    assert "without a function 'fit'. It traced evaluate, train_step." in " ".join(
        done.stderr.split()
    )


@needs_compiler
def test_a_script_that_fails_shows_its_traceback(script):
    done = replicax_command("preflight", script, "--topology", "v5e:2x2", "--", "many")

    assert done.returncode == 4
    assert "weight = rx.Variable(lambda: jnp.zeros((int(sys.argv[1]), 128)))" in done.stderr
    assert "ValueError: invalid literal for int() with base 10: 'many'" in done.stderr
    assert "runpy" not in done.stderr


def test_a_slice_that_does_not_exist_is_refused(script):
    done = replicax_command("preflight", script, "--topology", "v9:2x2")

    assert done.returncode == 2
    assert "v9:2x2" in done.stderr


def test_a_script_that_does_not_exist_is_refused():
    done = replicax_command("preflight", "no_such.py")

    assert done.returncode == 2
    assert "There is no script 'no_such.py'" in done.stderr


def test_help_lists_the_verbs():
    done = replicax_command("--help")

    assert done.returncode == 0
    assert "preflight" in done.stdout
