"""Run a script in a new Python, for what can be tried only before JAX starts."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import replicax

_JAX_SETTINGS = ("NPROC", "PJRT_NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")


def run_fresh(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``script`` on the CPU with the variables of ``environment`` and none of JAX's others."""
    env = {name: value for name, value in os.environ.items() if name not in _JAX_SETTINGS}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(replicax.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
