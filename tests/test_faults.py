"""Fault points do what they are told, the time they are told, and nothing else."""

import errno
import time

import pytest

from replicax._src.base import fault_points
from replicax._src.base.errors import ReplicaxError
from replicax._src.base.fault_points import ACTIONS, POINTS, arm, fault_point


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    arm("")


def test_a_fault_happens_at_its_point_the_time_it_was_asked_for():
    arm("input:raise@3,commit-write:full")

    for _ in range(2):
        fault_point("input")
        fault_point("collective")
    with pytest.raises(ValueError, match="REPLICAX_FAULT asked for"):
        fault_point("input")
    fault_point("input")
    with pytest.raises(OSError, match="No space left") as caught:
        fault_point("commit-write")
    assert caught.value.errno == errno.ENOSPC


def test_without_faults_nothing_happens():
    for point in POINTS:
        fault_point(point)


@pytest.mark.parametrize(
    "text", ["input", "nowhere:kill", "input:dance", "input:kill@x", "input:@1"]
)
def test_an_invalid_fault_is_refused(text):
    with pytest.raises(ReplicaxError, match="is not POINT:ACTION@N"):
        arm(text)


def test_a_fault_is_written_down_where_somebody_wants_to_know(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLICAX_FAULT_LOG", str(tmp_path / "log"))
    monkeypatch.setitem(ACTIONS, "slow", lambda: None)
    arm("join:slow@2")

    before = time.time()
    fault_point("join")
    assert not (tmp_path / "log").exists()
    fault_point("join")

    when, point, action = (tmp_path / "log").read_text().split()
    assert (point, action) == ("join", "slow")
    assert float(when) >= before
    assert fault_points.FAULT_VARIABLE == "REPLICAX_FAULT"
