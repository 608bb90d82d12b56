"""Ray Train with our backend: the page's own example, a worker that is killed, one that raises."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="make test-clusters installs Ray"
    ),
]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ray.md").read_text()
# Workers that Ray makes nicer would starve on a busy machine.
VARIABLES = {
    "PYTHONPATH": str(ROOT / "src"),
    "JAX_PLATFORMS": "cpu",
    "RAY_worker_niceness": "0",
}
TRAINER = ROOT / "examples" / "clusters" / "ray_train.py"
EXAMPLE = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)[0]
INIT = 'ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": ENVIRONMENT})'
FAULTS = {
    "none": "pass",
    "killed": "os.kill(os.getpid(), 9)",
    "raised": 'raise ValueError("a wrong turn")',
}

FAILING = """
        if int(step) == 3 and ray.train.get_context().get_world_rank() == 1:
            if not os.path.exists("{mark}"):
                open("{mark}", "w").close()
                {fault}
        train_step()
"""
TELLING = """
def train(config):
    try:
        _train(config)
    except rx.errors.WorkerLostError as error:
        with open("{told}", "w") as file:
            file.write(str(error))
        raise


"""


def run_example(folder, fault):
    """Run the page's example, in whose third step worker 1 fails once; return its result."""
    marks = folder / "failed"
    text = EXAMPLE.replace('"/shared/runs"', repr(str(folder / "runs")))
    text = text.replace(
        "        train_step()\n", FAILING.format(mark=marks, fault=FAULTS[fault]), 1
    )
    text = text.replace("def train(", TELLING.format(told=folder / "told") + "def _train(", 1)
    text = text.replace("trainer = ", f"{INIT}\ntrainer = ").replace("print(", "METRICS = (", 1)
    assert text.count(INIT) == 1
    program = folder / "program.py"
    program.write_text(
        f"import json\nimport os\nENVIRONMENT = {VARIABLES}\n{text}\n"
        f'open({str(folder / "metrics")!r}, "w").write(json.dumps(METRICS))\n'
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**env, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=900,  # Ray starts a dozen processes, again after each failure
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "metrics").read_text())


def test_the_example_for_jax_trainer_trains_and_resumes(tmp_path):
    """Worker 1 is killed once, in the third step; the run ends with six steps and their sum."""
    program, mark = tmp_path / "program.py", tmp_path / "killed"
    fault = (
        f"        if step == 3 and ray.train.get_context().get_world_rank() == 1:\n"
        f"            if not __import__('os').path.exists({str(mark)!r}):\n"
        f"                open({str(mark)!r}, 'w').close()\n"
        f"                __import__('os').kill(__import__('os').getpid(), 9)\n"
    )
    text = TRAINER.read_text()
    loop = "        strategy.run("
    assert text.count(loop) == 1
    program.write_text(text.replace(loop, fault + loop))
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(program), "--storage", str(tmp_path / "runs")],
        env={**env, **VARIABLES},
        capture_output=True,
        text=True,
        timeout=900,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert mark.exists()
    assert re.search(r"'step': 6, 'weights': 6\.0", done.stdout), done.stdout


def test_the_example_trains(tmp_path):
    metrics = run_example(tmp_path, "none")

    assert (metrics["step"], metrics["weights"]) == (6, 6.0)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("killed", "was killed, or crashed"), ("raised", "ValueError: a wrong turn")],
)
def test_the_run_continues_from_its_last_checkpoint(tmp_path, fault, cause):
    metrics = run_example(tmp_path, fault)

    assert (metrics["step"], metrics["weights"]) == (6, 6.0)
    assert cause in (tmp_path / "told").read_text()
