"""The batch script of `examples/slurm` under a real Slurm: announced ends, requeues, dead nodes.

Slurm signals every process of a job here (proctrack/linuxproc), the coordinator too.
"""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clusters.conftest import wait_until_idle
from tests.clusters.test_real import ROOT, environment
from tests.multi_process import under_submitit

pytestmark = [pytest.mark.slow, pytest.mark.clusters]

SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
HOST = socket.gethostname().partition(".")[0]


class Job:
    """A job of the batch script, with 2 tasks; cancelled when the block ends."""

    def __init__(self, slurm, folder, *options, steps=100_000, **variables):
        self.folder = folder
        self._env = {**environment(), "SLURM_CONF": slurm["SLURM_CONF"]} | variables
        self._env["PROGRAM"] = str(ROOT / "examples" / "slurm" / "train.py")
        arguments = ["--steps", str(steps), "--pause", "0.05"]
        command = ["sbatch", "--parsable", f"--chdir={folder}", *options, str(SCRIPT), *arguments]
        self.id = self.run(*command).strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(subprocess.CalledProcessError):
            self.run("scancel", self.id)
        self.wait_for(lambda: self.id not in self.run("squeue", "-h", "-o", "%F"), "its end")

    def run(self, *command):
        done = subprocess.run(
            command, env=self._env, cwd=self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def text(self, task=None):
        name = f"*_{task}.out" if task is not None else "*.out"
        return "".join(path.read_text(errors="replace") for path in self.folder.glob(name))

    def shown(self, field, task=None):
        """What Slurm says of the job."""
        name = self.id if task is None else f"{self.id}_{task}"
        return re.search(rf"\b{field}=(\S+)", self.run("scontrol", "-o", "show", "job", name))[1]

    def wait_for(self, what, name=None, task=None, seconds=600):
        """Wait until a text stands in the output, or something is true."""
        deadline = time.monotonic() + seconds
        while not (what() if callable(what) else what in self.text(task)):
            assert time.monotonic() < deadline, f"{name or what}: {self.text()}"
            time.sleep(0.2)

    def starts(self, task=None):
        """The restarts and first steps that the first task wrote."""
        found = re.findall(r"^restart (\d+), from step (\d+)$", self.text(task), re.MULTILINE)
        return sorted({(int(restart), int(step)) for restart, step in found})


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("number", ["USR1", "USR2"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_announced_end_saves_and_requeues(slurm, folder, number, nodes):
    with Job(slurm, folder, f"--nodes={nodes}") as job:
        job.wait_for("from step 0")
        time.sleep(2)
        job.run("scancel", f"--signal={number}", job.id)
        job.wait_for("restart 1, from step")
        assert job.shown("Restarts") == "1"

    assert f"SIG{number}: saving after this step, then ending." in job.text()
    assert f"Slurm job {job.id} is requeued." in job.text()
    (first, second) = job.starts()
    assert first == (0, 0)
    assert second[0] == 1
    assert second[1] > 0  # no commit but the last: the script commits after 50 steps


def test_announced_end_and_scancel_save_with_cgroups(slurm_with_cgroups, folder):
    run = folder / "run"
    with Job(slurm_with_cgroups, folder, RUN_DIRECTORY=str(run)) as job:
        job.wait_for("from step 0")
        time.sleep(2)
        job.run("scancel", "--signal=USR1", job.id)
        job.wait_for("restart 1, from step")
        assert job.shown("Restarts") == "1"
        time.sleep(2)
        job.run("scancel", job.id)
        # Slurm ends `srun` at once here, so nothing that the tasks write after that is seen.
        job.wait_for(lambda: len(list(run.glob("ckpt-*/checkpoint.json"))) >= 2, "the commit")
        job.wait_for(lambda: job.shown("JobState") == "CANCELLED", "CANCELLED")
        assert job.shown("Restarts") == "1"

    assert "SIGUSR1: saving after this step, then ending." in job.text()
    assert job.starts()[1][1] > 0


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two tasks need two cores")
def test_tasks_use_the_cores_that_slurm_gave_them(slurm_with_cgroups):
    env = {**environment(), "SLURM_CONF": slurm_with_cgroups["SLURM_CONF"]}
    half = os.cpu_count() // 2
    options = ("-n", "2", "-c", f"{half}", "--cpu-bind=cores")
    program = [sys.executable, "-m", "tests.multi_process.cores"]
    done = subprocess.run(
        ["srun", *options, *program], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
    )

    assert done.returncode == 0, done.stderr
    seen = sorted(line.split() for line in done.stdout.splitlines())
    assert [uses for _, uses in seen] == [f"{half}"] * 2
    assert seen[0][0] != seen[1][0]  # other cores


def test_slurm_announces_the_end_of_the_time_limit(slurm, folder):
    # The script has --signal=USR1@90, so that a busy machine has 90 s to begin with training.
    with Job(slurm, folder, "--time=3") as job:
        job.wait_for("restart 1, from step", seconds=900)

    assert "SIGUSR1: saving after this step, then ending." in job.text()
    assert job.starts()[1][1] > 0


def test_time_limit_without_a_warning_saves_and_requeues(slurm, folder):
    # SIGTERM comes at the end of the minute, and SIGKILL after KillWait.
    with Job(slurm, folder, "--time=1", "--signal=CONT@1") as job:
        job.wait_for("restart 1, from step", seconds=900)

    assert "SIGTERM: saving after this step, then ending." in job.text()
    assert f"Slurm job {job.id} is requeued." in job.text()
    assert job.starts()[1][1] > 0


def test_cancelled_job_saves_and_is_not_requeued(slurm, folder):
    with Job(slurm, folder, RUN_DIRECTORY=str(folder / "run")) as job:
        job.wait_for("from step 0")
        time.sleep(2)
        job.run("scancel", job.id)
        job.wait_for(lambda: job.shown("JobState") == "CANCELLED", "CANCELLED")
        time.sleep(8)  # longer than a requeue takes
        assert (job.shown("JobState"), job.shown("Restarts")) == ("CANCELLED", "0")

    assert "SIGTERM: saving after this step, then ending." in job.text()
    assert "is not requeued: SIGTERM may be `scancel`" in job.text()
    again = folder / "again"
    again.mkdir()
    again.chmod(0o755)
    with Job(slurm, again, RUN_DIRECTORY=str(folder / "run")) as second:
        second.wait_for("from step")

    assert second.starts()[0][1] > 0


def test_two_jobs_of_an_array_do_not_mix(slurm, folder):
    with Job(slurm, folder, "--array=0-1") as job:
        for task in (0, 1):
            job.wait_for("from step 0", task=task)
        time.sleep(2)
        # Its number is that of the whole array.
        assert job.shown("JobId", 1) == job.id
        job.run("scancel", "--signal=USR1", f"{job.id}_1")
        job.wait_for("restart 1, from step", task=1)
        assert [job.shown("Restarts", task) for task in (0, 1)] == ["0", "1"]
        assert job.shown("JobState", 0) == "RUNNING"

    assert job.starts(0) == [(0, 0)]
    assert job.starts(1)[1][1] > 0


@pytest.mark.parametrize("dead", [HOST, "localhost"], ids=["a node", "the batch host"])
def test_node_that_dies_costs_the_steps_since_the_last_commit(slurm, folder, dead):
    with Job(slurm, folder, "--nodes=2") as job:
        job.wait_for("from step 0")
        job.wait_for(lambda: list(folder.glob("run-*/ckpt-*/checkpoint.json")), "a commit")
        processes = _processes(dead, job.id)
        slurm.kill(dead)
        for pid in [*map(_parent, processes), *processes]:  # first slurmstepd, which would report
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            job.wait_for(lambda: job.shown("Restarts") == "1", "a requeue")
        finally:
            slurm.start(dead)
        job.wait_for("restart 1, from step")

    assert job.starts()[1][1] >= 50
    wait_until_idle(slurm, folder)


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _processes(node, job):
    """The processes of a job on one of the nodes, which are all on this machine."""
    marks = (f"SLURMD_NODENAME={node}\0".encode(), f"SLURM_JOB_ID={job}\0".encode())
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            environ = (path / "environ").read_bytes() if path.name.isdigit() else b""
            if all(mark in environ for mark in marks):
                found.append(int(path.name))
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("submitit") is None, reason="make test-clusters installs submitit"
)
def test_submitit_requeues_after_the_save(slurm, folder, monkeypatch):
    submitit = importlib.import_module("submitit")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_CONF", slurm["SLURM_CONF"])
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("TEST_PATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    executor = submitit.SlurmExecutor(folder=folder / "logs")
    executor.update_parameters(nodes=1, ntasks_per_node=2, time=10)
    job = executor.submit(under_submitit.Training(), str(folder / "run"))

    def text():
        return "".join(p.read_text() for p in (folder / "logs").glob("*_log.*"))

    def wait_for(word):
        deadline = time.monotonic() + 600
        while word not in text():
            assert time.monotonic() < deadline, text()
            time.sleep(0.2)

    try:
        wait_for("from step 0")
        time.sleep(2)
        subprocess.run(["scancel", "--signal=USR2", job.job_id], check=True)
        wait_for("restart 1, from step")
    finally:
        job.cancel()

    assert "SIGUSR2: saving after this step, then ending." in text()
    assert "Caught signal SIGUSR2" in text()  # submitit's own handler, which has requeued the job
    assert "restart 1, from step 0" not in text()
