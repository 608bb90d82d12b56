"""run_in_processes gives back what workers return, and leaves none of them behind.

Fault points: what a test asks for happens to one worker, at one place, at one time.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import replicax as rx
from replicax._src.base.errors import ReplicaxError
from replicax.testing import Fault, InjectedFaultError, fault_point, run_in_processes
from tests.multi_process.gang import left_behind


@pytest.mark.multi_process
@pytest.mark.parametrize("call", [(sys.exit, 3), (signal.raise_signal, signal.SIGINT)])
def test_a_worker_that_exits_does_not_end_the_caller(call):
    with pytest.raises(ReplicaxError, match=r"raised (SystemExit: 3|KeyboardInterrupt)"):
        rx.testing.run_in_processes(call[0], 1, args=call[1:])


@pytest.mark.multi_process
def test_workers_end_with_a_caller_that_is_killed(tmp_path):
    (tmp_path / "waits.py").write_text(
        textwrap.dedent("""
            import subprocess, sys, time
            from pathlib import Path
            def wait(folder):
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
                Path(folder, f"{time.time_ns()}.here").touch()
                time.sleep(300)
        """)
    )
    script = (
        "import waits, replicax as rx, sys; rx.testing.run_in_processes("
        "waits.wait, 2, args=(sys.argv[1],))"
    )
    (tmp_path / "tmp").mkdir()
    mark = f"TMPDIR={tmp_path}/tmp"
    src = str(Path(rx.__file__).parents[1])
    path = os.pathsep.join([src, str(tmp_path)])
    caller = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": f"{tmp_path}/tmp"},
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.here"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        caller.kill()
        caller.wait()

        assert len(list(tmp_path.glob("*.here"))) == 2
        assert left_behind(mark, 20) == []
        assert list((tmp_path / "tmp").iterdir()) == []
    finally:
        for pid, _ in left_behind(mark, 0):
            os.kill(pid, signal.SIGKILL)


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
        run_in_processes(walk, 1, args=(2,), faults=[Fault("end", kind="hang")], timeout=15)


def test_nothing_happens_where_no_fault_was_asked_for():
    assert walk(3) == (3, "")


@pytest.mark.parametrize(
    ("given", "said"), [({"kind": "fire"}, "'kill', 'raise'"), ({"count": 0}, "1 or more")]
)
def test_an_invalid_fault_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Fault("step", **given)
