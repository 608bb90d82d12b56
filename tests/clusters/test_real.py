"""Jobs of real launchers that run side by side, inside each other, or with one process.

They run by `make test-clusters`, which installs the launchers.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.clusters]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "multi_process" / "summed.py"
PYTHON = [sys.executable, str(PROGRAM)]
SECONDS = 900  # a hang, not a busy machine


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "REPLICAX_"))}
    kept.pop("XLA_FLAGS", None)
    common = {
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "REPLICAX_JOIN_TIMEOUT": "300",
    }
    return {**kept, **common, **more}


def started(command, env):
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def sums(process):
    """Return what the workers of a job printed, once all have ended."""
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return re.findall(r"SUM=(\d+)", output)


def need(command):
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed: make test-clusters installs it")


@pytest.mark.parametrize("command", [["mpirun.openmpi", "--allow-run-as-root"], ["mpirun.mpich"]])
def test_one_process_of_mpirun_is_alone(command):
    need(command[0])

    assert sums(started([*command, "-n", "1", *PYTHON], environment())) == ["1"]


def test_two_mpich_jobs_at_once_do_not_meet():
    need("mpirun.mpich")
    jobs = [started(["mpirun.mpich", "-n", "2", *PYTHON], environment()) for _ in range(2)]

    assert [sums(job) for job in jobs] == [["2", "2"], ["2", "2"]]


@pytest.mark.parametrize("how", ["environment", "slurm"])
def test_two_slurm_jobs_at_once_do_not_meet(slurm, how):
    env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
    jobs = [started(["srun", "-n", "2", *PYTHON, how], env) for _ in range(2)]

    assert [sums(job) for job in jobs] == [["2", "2"], ["2", "2"]]


@pytest.mark.parametrize("distribution", ["block", "cyclic", "arbitrary"])
def test_slurm_places_ranks_in_any_order(slurm, tmp_path, distribution):
    env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
    if distribution == "arbitrary":
        names = sorted([socket.gethostname().partition(".")[0], "localhost"], reverse=True)
        env["SLURM_HOSTFILE"] = str(tmp_path / "hosts")
        (tmp_path / "hosts").write_text("\n".join([names[0], *names, names[1]]))
    command = ["srun", "-N", "2", "-n", "4", f"--distribution={distribution}", *PYTHON]

    assert sums(started(command, env)) == ["4"] * 4


def test_heterogeneous_slurm_job_is_refused(slurm):
    env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
    job = started(["srun", "-n", "1", *PYTHON, ":", "-n", "1", *PYTHON], env)
    output, _ = job.communicate(timeout=SECONDS)

    assert job.returncode != 0
    assert "SUM=" not in output
    assert "ClusterError: The Slurm job is heterogeneous (SLURM_HET_SIZE=2)" in output


def test_sbatch_script_without_srun_is_refused(slurm, tmp_path):
    env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{' '.join(PYTHON)}\n")
    output = tmp_path / "out"
    job = subprocess.run(
        ["sbatch", "-W", "-n", "2", "-o", str(output), str(script)], env=env, timeout=SECONDS
    )

    assert job.returncode != 0
    assert "start the program with srun" in output.read_text()


def test_launchers_of_two_slurm_tasks_train_no_models_of_their_own(slurm):
    env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
    launch = [sys.executable, "-m", "replicax", "launch", "--workers", "2", str(PROGRAM)]
    job = started(["srun", "-n", "2", *launch], env)
    output, _ = job.communicate(timeout=SECONDS)

    assert job.returncode != 0
    assert "SUM=" not in output
    assert "one of several processes" in output

    assert sums(started(["srun", "-n", "1", *launch], env)) == ["2", "2"]


def test_mpirun_inside_a_slurm_step_wins(slurm):
    need("mpirun.mpich")
    env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]}
    inner = ["mpirun.mpich", "-launcher", "fork", "-hosts", "localhost", "-n", "2", *PYTHON]

    assert sums(started(["srun", "-n", "1", *inner], env)) == ["2", "2"]
