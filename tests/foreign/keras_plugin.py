"""A pytest plugin: every test runs in the scope of a strategy of two replicas."""

import pytest

import replicax as rx


@pytest.fixture(scope="session")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(autouse=True)
def _in_scope(strategy):
    with strategy.scope():
        yield
