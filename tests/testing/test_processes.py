"""run_in_processes gives back what workers return, and leaves none of them behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import replicax as rx
from replicax._errors import ReplicaxError
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
