"""Strategies that many tests take: made once, as they hold no state of their own."""

import signal

import pytest

import replicax as rx
from tests.replicas import mirrored


@pytest.fixture(scope="session", autouse=True)
def _hears_signals():
    """What a shell starts in the background ignores SIGINT, and with `nohup` SIGHUP; so would all
    that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGHUP, hang_up)


@pytest.fixture(scope="session")
def two():
    return mirrored(2)


@pytest.fixture(scope="session")
def four():
    return mirrored(4)


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def mode(request):
    """Runs a function as it is, or as an rx.function."""
    return rx.function if request.param else lambda f: f
