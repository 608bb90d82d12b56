"""What the cluster tests share: an environment without schedulers, and TF_CONFIG set for a test."""

import json
import os

import pytest

_SCHEDULERS = ("TF_CONFIG", "SLURM_", "OMPI_", "PMIX_", "TPU_", "MEGASCALE_", "JAX_", "CUDA_")
_JAXJOB = ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "NUM_PROCESSES", "PROCESS_ID")


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch):
    for name in list(os.environ):
        if name.startswith(_SCHEDULERS) or name in _JAXJOB:
            monkeypatch.delenv(name)


@pytest.fixture
def set_tf_config(monkeypatch):
    def set_to(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)

    return set_to
