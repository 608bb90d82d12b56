"""Requeueing of interrupted Slurm jobs."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from replicax._src.cluster.checks import ClusterError

VARIABLE = "REPLICAX_REQUEUE"
_PATIENCE = 60.0


def restarts(env: Mapping[str, str] = os.environ) -> int:
    """Return how often Slurm and the launcher have restarted this run.

    Example:
        >>> from replicax._src.cluster.requeue import restarts
        >>> restarts({"SLURM_RESTART_COUNT": "2", "REPLICAX_RESTART": "1"})
        3
    """
    counts = (env.get(name, "") for name in ("SLURM_RESTART_COUNT", "REPLICAX_RESTART"))
    return sum(int(count) for count in counts if count.isdecimal())


def is_asked(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the user asked for the job to be requeued when Slurm announces its end.

    Raises:
        ClusterError: If the variable is invalid, or this is not a Slurm job.
    """
    text = env.get(VARIABLE, "").strip()
    if text in ("", "0"):
        return False
    if text != "1":
        raise ClusterError(f"{VARIABLE}={text!r}: write 1 to requeue the Slurm job, or 0.")
    if not env.get("SLURM_JOB_ID"):
        raise ClusterError(
            f"{VARIABLE}=1 requeues a Slurm job, but SLURM_JOB_ID is not set, so this is not one."
            f" Unset {VARIABLE}, or start the program in a batch script with sbatch."
        )
    return True


def job(env: Mapping[str, str] = os.environ) -> str:
    """Return the job id for `scontrol`; in a job array, that of this task only.

    One task of an array has the array's number as its SLURM_JOB_ID, which would requeue all tasks.

    Example:
        >>> from replicax._src.cluster.requeue import job
        >>> job({"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"})
        '7_2'
    """
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID", "")


def has_timed_out() -> bool:
    """Whether Slurm ends this job because of its time limit, not because it was cancelled."""
    return "Reason=TimeLimit" in _scontrol("--oneliner", "show", "job", job())[1].split()


def requeue() -> str:
    """Requeue this job; return "", or why that failed."""
    code, text = _scontrol("requeue", job())
    return "" if code == 0 else text.strip() or f"scontrol ended with code {code}"


def _scontrol(*arguments: str) -> tuple[int, str]:
    command = shutil.which("scontrol")
    if command is None:
        return 127, "scontrol is not on PATH"
    try:
        done = subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr
