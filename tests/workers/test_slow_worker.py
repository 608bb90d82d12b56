"""A worker that others wait for is named with its cause: real processes, real delays."""

import os
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import sys, time
    import numpy as np
    import replicax as rx

    late = sys.argv[1]
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    is_last = strategy.cluster_resolver.task_id == 2

    def rows():
        for _ in range(90):
            time.sleep(0.1 if is_last and late == "input" else 0.0)
            yield np.ones((2, 4), "f")

    def read(context):
        return rx.data.Dataset.from_generator(rows, output_signature=rx.TensorSpec((2, 4), "f4"))

    @rx.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(x,)), axis=None)

    for x in strategy.distribute_datasets_from_function(read):
        step(x)
        time.sleep(0.1 if is_last and late == "host" else 0.01)
"""
ENTRY = "from replicax_command import entry; entry()"


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize(("late", "advice"), [("host", "Python"), ("input", "input is slow")])
def test_slow_worker_is_named_with_its_cause(tmp_path, late, advice):
    program, page = tmp_path / "train.py", tmp_path / "run.html"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-c", ENTRY, "launch", "--workers", "3", "--report", str(page)]

    run = subprocess.run(
        [*command, str(program), late],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
    )

    said = [line for line in (run.stdout + run.stderr).splitlines() if " is slow: " in line]
    assert said, run.stderr
    assert all("Worker 2 " in line and advice in line for line in said)
    assert {line.split("]")[0] for line in said} == {"[worker 0"}
    assert "Slow workers" in page.read_text()
