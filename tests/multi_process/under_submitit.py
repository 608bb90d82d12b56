"""The program of `examples/slurm` as a job of submitit's."""

import runpy
import sys
from pathlib import Path

import submitit

PROGRAM = Path(__file__).parents[2] / "examples" / "slurm" / "train.py"


class Training:
    """What submitit calls in every task, again after a requeue."""

    def __call__(self, directory):
        sys.argv = ["train.py", "--directory", directory, "--steps", "100000", "--pause", "0.05"]
        runpy.run_path(str(PROGRAM), run_name="__main__")

    def checkpoint(self, directory):
        return submitit.helpers.DelayedSubmission(Training(), directory)
