"""Emulators of object stores, one of each for all tests."""

import os

import pytest

from replicax._src.files import storage
from tests.object_store import new_process
from tests.stores.emulators import MODULES, started

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # gcsfs reads it at its import


def _emulator(scheme):
    for module in MODULES[scheme]:
        pytest.importorskip(module, reason="make test-stores installs it")
    with started(scheme) as found:
        yield found


@pytest.fixture(autouse=True)
def _no_thread_left():
    """Let the proxy and fsspec keep their threads for all tests of this folder."""


@pytest.fixture(scope="session")
def _s3():
    yield from _emulator("s3")


@pytest.fixture(scope="session")
def _gs():
    yield from _emulator("gs")


@pytest.fixture(params=["s3", "gs"])
def emulator(request, monkeypatch):
    """An emulator, which this process reaches too, as its programs do."""
    found = request.getfixturevalue(f"_{request.param}")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    found.proxy.rule = lambda method, what: None
    storage._instances.clear()
    yield found
    found.proxy.rule = lambda method, what: None
    storage._instances.clear()
    new_process()
