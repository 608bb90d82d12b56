"""Two real processes under the variables of a launcher train together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicax._src.workers.wire import free_ports

pytestmark = pytest.mark.multi_process

PROGRAM = Path(__file__).with_name("summed.py")
ROOT = Path(__file__).parents[2]

# The variables of both processes, and the one that holds the rank. {port} is a free port.
CLUSTERS = {
    "JAX": (
        {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"},
        "JAX_PROCESS_ID",
    ),
    "PyTorchJob": (
        {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"},
        "RANK",
    ),
    "initialized": ({"ADDRESS": "127.0.0.1:{port}"}, "INDEX"),
    "tpu": (
        {
            "JAX_COORDINATOR_ADDRESS": "127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "REPLICAX_CPU_DEVICES": "1",
        },
        "JAX_PROCESS_ID",
    ),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_two_processes_add_up_to_two(name):
    variables, rank = CLUSTERS[name]
    port = str(free_ports(1)[0])
    common = {k: v.replace("{port}", port) for k, v in variables.items()}
    path = f"{ROOT}/src"
    clean = {k: v for k, v in os.environ.items() if k != "REPLICAX_CPU_DEVICES"}
    clean.pop("XLA_FLAGS", None)
    workers = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), name],
            env={**clean, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **common, rank: str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()

    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert all("SUM=2\n" in output for output in outputs), outputs
