import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import replicax
from replicax._src.cli.main import main
from replicax._src.preflight.report import Memory, PreflightReport
from tests.preflight.needs import needs_compiler

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


PLAIN = """
import jax, jax.numpy as jnp
from functools import partial

@partial(jax.jit, donate_argnums=0)
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.square(x @ w).mean())(w)

step(jnp.ones((256, 256)), jnp.ones((8, 256)))
print("after")
"""
NNX = """
import jax.numpy as jnp
from flax import nnx

model = nnx.Linear(256, 256, use_bias=False, rngs=nnx.Rngs(0))

@nnx.jit
def step(model, x):
    gradient = nnx.grad(lambda m: jnp.square(m(x)).mean())(model)
    model.kernel[...] -= 0.1 * gradient.kernel[...]

step(model, jnp.ones((8, 256)))
print("after")
"""
KERAS = """
import keras
import numpy as np

model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256, use_bias=False)])
model.compile(optimizer="sgd", loss="mse")
model.fit(np.ones((8, 256)), np.ones((8, 256)), batch_size=8, verbose=0)
print("after")
"""


@needs_compiler
@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param(PLAIN, "step", id="jit"),
        # tests/preflight compiles such steps without the command.
        pytest.param(NNX, "step", id="nnx", marks=pytest.mark.slow),
        pytest.param(KERAS, "train_step", id="fit", marks=pytest.mark.slow),
    ],
)
def test_a_step_without_a_strategy_is_taken_by_its_name(text, name, tmp_path):
    path, out = tmp_path / "plain.py", tmp_path / "report.json"
    path.write_text(text)

    done = replicax_command(
        *("preflight", path, "--function", name, "--topology", "v5e:1x1", "--json", out),
        KERAS_BACKEND="jax",
    )

    assert done.returncode == 0, done.stderr
    assert "after" not in done.stdout
    facts = json.loads(out.read_text())
    assert (facts["step"], facts["num_replicas"]) == (name, 0)
    assert facts["flops"] == 2 * 2 * 8 * 256 * 256


@needs_compiler
def test_a_step_without_a_strategy_is_named_if_it_was_not_asked_for(tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)

    done = replicax_command("preflight", path, "--topology", "v5e:1x1")

    assert done.returncode == 5
    assert "It gave jax.jit the functions step." in done.stderr


@needs_compiler
def test_what_the_compiler_is_wrongly_told_is_no_failure_of_the_script(script):
    done = replicax_command(
        *("preflight", script, "--topology", "v5e:2x2", "--xla-flags=--xla_nonsense", "--", "8")
    )

    assert done.returncode == 2
    assert done.stderr.startswith("replicax preflight: The compiler does not take --xla_nonsense")


@needs_compiler
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--baseline", "other.json"), "other.json has no report of v5e:2x2, only of v4:2x2x1"),
        (("--baseline", "broken.json"), "broken.json is not a preflight report"),
        (("--baseline", "none.json"), "none.json"),
        (("--json", "nowhere/report.json"), "There is no folder 'nowhere'"),
        (("--plot", "nowhere/plot.svg"), "There is no folder 'nowhere'"),
        (("--save-executable", "a.bin", "--topology", "v5e:1x1"), "give one --topology"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_first(given, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('the script was run')")
    facts = "step", "v4:2x2x1", 4, 4, True, True, "", Memory(), 1, (), 0.0, 0.0, 0.0
    Path("other.json").write_text(PreflightReport(*facts).to_json())
    Path("broken.json").write_text("{}")

    assert main(["preflight", "train.py", "--topology", "v5e:2x2", *given]) == 2

    assert told in capsys.readouterr().err


def test_an_amount_of_memory_that_is_none_is_refused_first(script):
    done = replicax_command("preflight", script, "--max-memory", "lots")

    assert done.returncode == 2
    assert "'lots' is not an amount of memory" in done.stderr


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
