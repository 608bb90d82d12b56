"""Workers that see the same GPUs divide them; others keep what they see."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import replicax
from replicax._src.cluster.checks import RollCallError
from replicax._src.workers.gpus import local_gpus, part_of

FOUR = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("lists", "parts"),
    [
        pytest.param([FOUR, FOUR], [[0, 1], [2, 3]], id="two workers of a host"),
        pytest.param([["a"], ["b"]], [None, None], id="divided by the scheduler"),
        pytest.param([FOUR, ["e"] * 4], [None, None], id="one worker of each host"),
        pytest.param(
            [["a", "b"], ["x", "y"], ["a", "b"], ["x", "y"]], [[0], [0], [1], [1]], id="cyclic"
        ),
        pytest.param([[], []], [None, None], id="no GPUs"),
        pytest.param([["a", "b", "c"]] * 2, [[0], [1]], id="one stays unused"),
    ],
)
def test_parts_of_workers(lists, parts):
    assert [part_of(lists, index) for index in range(len(lists))] == parts


@pytest.mark.parametrize(
    ("lists", "fault"),
    [([["a"]] * 2, "share 1 GPU"), ([["a", "b"], ["b", "c"]], r"with \['b'\] in both")],
)
def test_gpus_that_cannot_be_divided_are_refused(lists, fault):
    with pytest.raises(RollCallError, match=fault):
        part_of(lists, 0)


@pytest.fixture
def four_gpus(tmp_path):
    """Make a driver's command that lists four GPUs, and an empty CUDA plugin of JAX."""
    tool = tmp_path / "nvidia-smi"
    lines = "".join(f"echo 'GPU {i}: NVIDIA A100 (UUID: GPU-{n})'\n" for i, n in enumerate(FOUR))
    tool.write_text(f"#!/bin/sh\n{lines}")
    tool.chmod(0o755)
    (tmp_path / "jax_cuda12_plugin").mkdir()
    (tmp_path / "jax_cuda12_plugin" / "__init__.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]),
        ("2,0", ["GPU-c", "GPU-a"]),
        ("1,9,2", ["GPU-b"]),
        ("", []),
        ("GPU-b", ["GPU-b"]),
    ],
)
def test_own_gpus_are_those_that_are_visible(four_gpus, monkeypatch, visible, found):
    monkeypatch.setattr("replicax._src.workers.gpus.cuda_is_possible", lambda: True)
    monkeypatch.setenv("PATH", f"{four_gpus}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert local_gpus() == found


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((), ["2,3", "0,1"]),
        pytest.param(("--gpus-per-worker", "1"), ["all", "all"], marks=pytest.mark.slow),
    ],
)
def test_workers_of_a_host_divide_its_gpus(four_gpus, arguments, shown):
    program = four_gpus / "program.py"
    program.write_text(
        textwrap.dedent("""
            import jax
            import replicax as rx

            strategy = rx.distribute.MultiWorkerMirroredStrategy()
            print("GPUs", jax.config.values["jax_cuda_visible_devices"], flush=True)
        """)
    )
    env = {
        **os.environ,
        "PATH": f"{four_gpus}:{os.environ['PATH']}",
        "PYTHONPATH": f"{Path(replicax.__file__).parents[1]}:{four_gpus}",
        "XLA_FLAGS": "",
    }
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", "--workers", "2", *arguments, str(program)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "GPUs" in line]
    assert sorted(line.split()[-1] for line in lines) == sorted(shown)
