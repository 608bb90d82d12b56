"""Fault points: what a test asks for happens to one worker, at one place, at one time."""

import pytest

import replicax as rx
from replicax.testing import Fault, InjectedFaultError, fault_point, run_in_processes


def walk(steps):
    """Passes a point several times; worker 1 leaves a trace of how far it came."""
    for step in range(steps):
        try:
            fault_point("step")
        except InjectedFaultError as error:
            return step, str(error)
    fault_point("end")
    return steps, ""


@pytest.mark.multi_process
def test_a_fault_happens_to_its_worker_at_its_passing_only():
    whole, hurt = run_in_processes(walk, 2, args=(5,), faults=[Fault("step", 1, 3, "raise")])

    assert whole == (5, "")
    assert hurt[0] == 2
    assert "point='step'" in hurt[1]


@pytest.mark.multi_process
@pytest.mark.parametrize(("kind", "told"), [("kill", "by signal 9"), ("exit", "SystemExit: 1")])
def test_a_worker_that_a_fault_ends_is_told_as_one_that_ended(kind, told):
    with pytest.raises(rx.errors.ReplicaxError, match=f"Worker 0 .*{told}"):
        run_in_processes(walk, 1, args=(2,), faults=[Fault("end", kind=kind)])


@pytest.mark.multi_process
def test_a_worker_that_a_fault_stops_runs_into_the_time_limit():
    with pytest.raises(TimeoutError, match="fault_point"):
        run_in_processes(walk, 1, args=(2,), faults=[Fault("end", kind="hang")], timeout=8)


def test_nothing_happens_where_no_fault_was_asked_for():
    assert walk(3) == (3, "")


@pytest.mark.parametrize(
    ("given", "said"), [({"kind": "fire"}, "'kill', 'raise'"), ({"count": 0}, "1 or more")]
)
def test_a_fault_that_makes_no_sense_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Fault("step", **given)
