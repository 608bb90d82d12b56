"""Fixtures and options for pytest: virtual devices, and strategies on them.

pytest loads this module wherever replicax is installed. It imports neither replicax nor JAX until
a test uses a fixture, so that other test suites of the same environment pay nothing.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option and an ini value for the number of virtual CPU devices."""
    about = "virtual CPU devices for JAX in this test run"
    parser.addini("replicax_cpu_devices", about)
    group = parser.getgroup("replicax")
    group.addoption("--replicax-cpu-devices", metavar="N", help=about)


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of virtual devices in the environment, before a test module imports JAX."""
    config.addinivalue_line("markers", "rx_replicas(n): the `rx_strategy` fixture has n replicas")
    count = config.getoption("--replicax-cpu-devices") or config.getini("replicax_cpu_devices")
    if count:
        os.environ["REPLICAX_CPU_DEVICES"] = str(count)


@pytest.fixture
def rx_mirrored() -> Callable[[int], Any]:
    """Return a function that makes a `MirroredStrategy` of n virtual devices, or skips the test."""

    def make(count: int) -> Any:
        rx: Any = importlib.import_module("replicax")
        names = [device.name for device in rx.config.list_logical_devices("CPU")]
        if len(names) < count:
            pytest.skip(
                f"needs {count} CPU devices, and there are {len(names)}: run pytest with"
                f" --replicax-cpu-devices={count}"
            )
        return rx.distribute.MirroredStrategy(names[:count])

    return make


@pytest.fixture
def rx_strategy(request: pytest.FixtureRequest, rx_mirrored: Callable[[int], Any]) -> Any:
    """Return a `MirroredStrategy` of two replicas, or of n with `@pytest.mark.rx_replicas(n)`."""
    marker = request.node.get_closest_marker("rx_replicas")
    return rx_mirrored(marker.args[0] if marker else 2)
