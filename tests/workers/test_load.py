"""What a worker counts of its steps and waits."""

import threading

import pytest

from replicax.workers import _watch
from replicax.workers._watch import FIGURES, Load, Progress

PING = {"count": 1, "inside": False, "pace": 0.0, "journal": []}


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_watch.time, "monotonic", lambda: now[0])
    return now


def test_rates_are_those_of_the_last_seconds(clock):
    load = Load()
    for _ in range(30):
        clock[0] += 1.0
        load.steps += 4
        with load:
            clock[0] += 1.0
        told = load.told()

    assert told["steps"] == 120
    assert told["rate"] == pytest.approx(2.0)
    assert told["waited"] == pytest.approx(30.0)
    assert told["waits"] == pytest.approx(0.5)
    assert load.batches == 30


def test_a_wait_that_goes_on_is_counted_while_it_does(clock):
    load = Load()
    load.told()
    with load:
        clock[0] += 8.0
        seen = load.told()

    assert seen["waited"] == load.told()["waited"] == pytest.approx(8.0)
    assert seen["waits"] == pytest.approx(1.0)


def test_threads_wait_each_for_itself(clock):
    load = Load()

    def inner():
        with load:
            pass

    with load:
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        clock[0] += 3.0

    assert load.waited == pytest.approx(3.0)


def test_the_hub_takes_what_a_worker_tells():
    load = Load()
    load.steps = 3
    progress = Progress()
    progress.note({**PING, "load": load.told()})

    assert progress.load["steps"] == 3
    assert set(load.told()) == set(FIGURES)


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), "x", None, [1], 10**400])
def test_what_is_no_number_is_no_message_of_a_worker(figure):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        Progress().note({**PING, "load": {"steps": figure}})
