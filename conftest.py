"""Test set-up for the whole tree, here at the root so that doctests in src/ get it too."""

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest

# Before JAX reads them: the developer's own settings must not reach the tests.
for _name in ("REPLICAX_CPU_DEVICES", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONUNBUFFERED"):
    os.environ.pop(_name, None)
os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it when it is imported

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import replicax as rx  # noqa: E402
from replicax._src.data.seeds import set_global_seed  # noqa: E402
from replicax.compat import tf  # noqa: E402

# Programs that need TensorFlow, torch or Ray, and test nothing by themselves.
collect_ignore_glob = [
    "tests/golden/make_*.py",
    "tests/golden/port/*.py",
    "tests/chaos/peers/with_*.py",
    "tests/chaos/peers/recovering*.py",
]

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)

# The first call of a function compiles it, so that no time limit for one example makes sense.
hypothesis.settings.register_profile("replicax", deadline=None)
hypothesis.settings.load_profile("replicax")

_CLUSTER_VARIABLES = ("TF_CONFIG", "SLURM_", "KUBERNETES_", "TPU_", "JAX_COORDINATOR_", "REPLICAX_")
_THREAD_PATIENCE = 5.0  # seconds that a thread may take to end after its test


def pytest_collection_finish() -> None:
    """Let garbage collections skip what lives until the end: modules and collected tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _doctest_names(request: pytest.FixtureRequest, doctest_namespace: dict[str, object]) -> None:
    if request.path.suffix == ".py":  # pages import what they use: people paste them
        doctest_namespace.update(rx=rx, jax=jax, jnp=jnp, np=np, tf=tf)


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Remove the variables of clusters, and undo what the test changes.

    Many examples set variables of launchers. A fixture of a module runs before this one, so it
    would see those of the test before.
    """
    before = dict(os.environ)
    for name in before:
        if name.startswith(_CLUSTER_VARIABLES):
            del os.environ[name]
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _enough_devices(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("multi_device")
    if marker is not None and jax.device_count() < marker.args[0]:
        pytest.skip(f"needs {marker.args[0]} devices, this machine has {jax.device_count()}")


@pytest.fixture(autouse=True)
def _no_simulated_tpu() -> Iterator[None]:
    yield
    rx.tpu.experimental.shutdown_tpu_system()


@pytest.fixture(autouse=True)
def _no_global_seed() -> Iterator[None]:
    yield
    set_global_seed(None)


@pytest.fixture(autouse=True)
def _same_log_level() -> Iterator[None]:
    """Programs that a test runs may set the level of messages, for their whole process."""
    log = logging.getLogger("replicax")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(autouse=True)
def _no_open_scope() -> Iterator[None]:
    yield
    distribute = getattr(rx, "distribute", None)
    if distribute is not None:
        assert not distribute.has_strategy(), "the test left a strategy scope open"


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + _THREAD_PATIENCE
    while left := _own_threads() - before:
        if time.monotonic() > deadline:
            names = ", ".join(sorted(thread.name for thread in left))
            pytest.fail(f"the test left threads running: {names}")
        time.sleep(0.01)


def _own_threads() -> set[threading.Thread]:
    # A thread of XLA that once called back into Python shows up as a dummy until XLA ends it; those
    # of Grain end with its iterators, which Keras keeps.
    return {
        t
        for t in threading.enumerate()
        if not (isinstance(t, threading._DummyThread) or t.name.startswith("grain-"))
    }
