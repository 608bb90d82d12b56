"""A pytest plugin: run another library's tests without replicax, beside it, or in a scope.

`tests.foreign.own_tests` sets `FOREIGN_WAY`, as a plugin of `-p` takes no options before it loads.
"""

import contextlib
import functools
import os
import sys

import pytest

WAY = os.environ["FOREIGN_WAY"]

if WAY != "without":
    import replicax as rx


@functools.cache
def _strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(autouse=True)
def _way():
    with _strategy().scope() if WAY == "scope" else contextlib.nullcontext():
        yield


def pytest_sessionfinish():
    # Otherwise the comparison would be of replicax with itself.
    assert ("replicax" in sys.modules) == (WAY != "without")
