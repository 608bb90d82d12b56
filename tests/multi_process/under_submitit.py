"""The program of `examples/slurm` as a job of submitit's."""

import importlib
import runpy
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "examples" / "slurm" / "train.py"


class Training:
    """What submitit calls in every task, again after a requeue."""

    def __call__(self, directory):
        sys.argv = ["train.py", "--directory", directory, "--steps", "100000", "--pause", "0.05"]
        runpy.run_path(str(PROGRAM), run_name="__main__")

    def checkpoint(self, directory):
        # Imported here: only the environment of the tests of clusters has submitit.
        helpers = importlib.import_module("submitit.helpers")
        return helpers.DelayedSubmission(Training(), directory)
