"""A pytest plugin: run another library's tests without replicax, after it was used, or in a scope.

`tests.foreign.own_tests` sets `FOREIGN_WAY`, as a plugin of `-p` takes no options before it loads,
and `FOREIGN_ONLY`, a file with the names of the tests to run: they may be too many for arguments.
"""

import contextlib
import functools
import json
import os
import sys
from pathlib import Path

import pytest

WAY = os.environ.get("FOREIGN_WAY", "without")  # pytest imports it too, to look for doctests

if WAY != "without":
    import replicax as rx


@functools.cache
def _strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def _use_a_strategy():
    """Run a compiled step, which installs whatever replicax installs when it is first used."""
    with _strategy().scope():
        variable = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)
    rx.function(lambda: _strategy().run(lambda: variable.assign_add(1.0)))()
    assert float(variable) == 2.0


if WAY == "strategy":
    _use_a_strategy()


@pytest.fixture(autouse=True)
def _way():
    with _strategy().scope() if WAY == "scope" else contextlib.nullcontext():
        yield


def pytest_collection_modifyitems(config, items):
    if chosen := os.environ.get("FOREIGN_ONLY"):
        names = set(json.loads(Path(chosen).read_text()))
        config.hook.pytest_deselected(items=[x for x in items if x.name not in names])
        items[:] = [x for x in items if x.name in names]


def pytest_sessionfinish():
    # Otherwise the comparison would be of replicax with itself.
    assert ("replicax" in sys.modules) == (WAY != "without")
