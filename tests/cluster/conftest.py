"""What the cluster tests share: an environment without launchers, and TF_CONFIG set for a test."""

import json
import os

import pytest

from replicax._src.cluster import launchers

_PREFIXES = (
    "SLURM_",
    "OMPI_",
    "MV2_",
    "PMI_",
    "PMIX_",
    "MPI_",
    "TPU_",
    "MEGASCALE_",
    "JAX_",
    "CUDA_",
)
_PREFIXES += ("MVP_", "PET_", "DSTACK_", "LWS_", "LOCAL_", "MASTER_", "AZ_", "VC_", "NEURON_")
_PREFIXES += ("SKYPILOT_", "SM_", "AWS_BATCH_", "JSM_", "LSB_", "PBS_", "FLUX_", "TORCHELASTIC_")
_NAMES = ("TF_CONFIG", "COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")
_NAMES += (
    "RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "NNODES",
    "NUM_NODES",
    "CLUSTER_SPEC",
    "JOB_COMPLETION_INDEX",
    "REPLICAX_ALONE",
    "REPLICAX_HUB",
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.setattr(launchers, "_has_mpi4py", lambda: False)  # it would initialize MPI here
    for name in list(os.environ):
        if name.startswith(_PREFIXES) or name in _NAMES:
            monkeypatch.delenv(name)


@pytest.fixture
def set_tf_config(monkeypatch):
    def set_to(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)

    return set_to
