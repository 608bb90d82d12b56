"""What workers write reaches the terminal and the logs, in time, and never stops the workers."""

import contextlib
import io
import os
import re
import stat
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cli import gang as _gang
from replicax._src.cli.gang import Console, Gang, GangPlan, Log, OutputSplitter, pump
from replicax._src.workers.sessions import Guard
from tests.cli.test_launch import command, environment, launched, written


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Closed(io.StringIO):
    """Takes one piece, and then is a pipe that nobody reads."""

    def write(self, text):
        if self.getvalue():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def spoken(out, *pieces, log=None):
    lines = []
    with contextlib.closing(Log(log)) as log:
        splitter = OutputSplitter(Console(out), "[w] ", log, lines.append)
        for piece in pieces:
            splitter.feed(piece)
        splitter.flush(final=True)
    return lines


@given(st.binary(max_size=200), st.integers(1, 20))
def test_no_cutting_changes_the_lines_that_are_noted(data, size):
    data = data.replace(b"\x1b", b"").replace(b"\r", b"")
    pieces = [data[i : i + size] for i in range(0, len(data), size)]

    # A character of several bytes may be cut only where a line is shown before it has ended.
    assert spoken(io.StringIO(), *pieces) == spoken(io.StringIO(), data)


def test_lines_of_several_workers_do_not_mix():
    out = io.StringIO()
    console = Console(out)
    a, b = (OutputSplitter(console, f"[{n}] ", Log(None), lambda _: None) for n in "ab")

    a.feed(b"one ")
    a.flush()
    b.feed(b"two\n")
    a.feed(b"half\n")
    b.feed(b"three")
    b.flush()
    console.finish()

    assert out.getvalue() == "[a] one \n[b] two\n[a] half\n[b] three\n"


def test_dots_of_progress_appear_before_their_line_ends():
    out = io.StringIO()
    reads, writes = os.pipe()
    splitter = OutputSplitter(Console(out), "[w] ", Log(None), lambda _: None)
    thread = threading.Thread(target=pump, args=(os.fdopen(reads, "rb"), splitter, Log(None)))
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while "..." not in out.getvalue() and time.monotonic() < deadline:
            os.write(writes, b".")  # without a pause that would let the line be taken for done
            time.sleep(0.01)
    finally:
        os.close(writes)
        thread.join(30)

    assert out.getvalue().startswith("[w] ...")


def test_much_text_without_a_newline_is_carried_in_pieces():
    out = io.StringIO()

    lines = spoken(out, *([b"x" * 1000] * 50_000))

    assert out.getvalue() == "[w] " + "x" * 50_000_000
    assert lines == []


@pytest.mark.parametrize("cut", range(12))
def test_escape_codes_reach_a_terminal_only(tmp_path, cut):
    data = b"\x1b[31mred\x1b[0m \x1b]0;title\x07end"
    terminal, file, log = Terminal(), io.StringIO(), tmp_path / "log"

    spoken(terminal, data + b"\n")
    lines = spoken(file, data[:cut], data[cut:] + b"\n", log=log)

    assert terminal.getvalue() == "[w] " + data.decode() + "\n"
    assert file.getvalue() == "[w] red end\n"
    assert re.fullmatch(rb"\d{4}-\d\d-\d\dT[\d:+-]+ red end\n", log.read_bytes())
    assert lines == ["red end"]


@pytest.mark.parametrize("cut", range(1, 31))
def test_an_escape_code_is_not_shown_by_halves(cut):
    data = b"\x1b[31mred\x1b[0m \x1b]0;title\x07end"
    out = io.StringIO()
    splitter = OutputSplitter(Console(out), "[w] ", Log(None), lambda _: None)

    splitter.feed(data[:cut])
    splitter.flush()
    splitter.feed(data[cut:] + b"\n")

    assert out.getvalue() == "[w] red end\n"


def test_a_log_is_its_owners_and_follows_no_link(tmp_path):
    path = tmp_path / "log"
    path.touch(mode=0o644)
    Log(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        Log(tmp_path / "link")


def test_an_output_that_nobody_reads_gives_one_warning(capfd):
    out = Closed()

    lines = spoken(out, b"one\n", b"two\n", b"three\n")

    assert lines == ["one", "two", "three"]
    assert out.getvalue() == "[w] one\n"
    assert capfd.readouterr().err.count("can no longer be shown") == 1


def test_a_full_disk_gives_one_warning_and_the_worker_continues(capfd):
    out = io.StringIO()
    splitter = OutputSplitter(Console(out), "[w] ", log := Log(None), lambda _: None)
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115

    for _ in range(3):
        splitter.feed(b"text\n")

    assert out.getvalue() == "[w] text\n" * 3
    assert capfd.readouterr().err.count("can no longer be written: No space left") == 1


def test_a_run_whose_reader_has_gone_comes_to_its_end(tmp_path):
    program = written(tmp_path, "for i in range(20_000): print('line', i)\nopen('done', 'w')")
    launcher = subprocess.Popen(
        command("--workers", "1", program),
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    launcher.stdout.readline()
    launcher.stdout.close()
    said = launcher.stderr.read().decode()
    launcher.wait(60)
    launcher.stderr.close()

    assert launcher.returncode == 0
    assert said.count("can no longer be shown") == 1
    assert (tmp_path / "done").exists()
    assert sys.executable not in said


def test_a_restart_keeps_the_logs_of_the_attempt_that_failed(tmp_path):
    program = written(
        tmp_path,
        "import os; print('attempt', n := int(os.environ['REPLICAX_RESTART'])); exit(n < 2)",
    )
    logs = tmp_path / "logs"
    options = ("--workers", "1", "--max-restarts", "3", "--log-dir", str(logs))

    with launched(tmp_path, *options, program) as launcher:
        launcher.stderr.read()

    assert launcher.returncode == 0
    assert {p.name: p.read_text().partition(" ")[2] for p in logs.iterdir()} == {
        "worker-0.log": "attempt 0\n",
        "worker-0.restart-1.log": "attempt 1\n",
        "worker-0.restart-2.log": "attempt 2\n",
    }


@pytest.mark.filterwarnings("ignore:os.fork")  # a launcher has no JAX
def test_a_worker_that_cannot_be_killed_does_not_keep_the_launcher(monkeypatch):
    monkeypatch.setattr(_gang, "_DYING", 0.2)
    code = "import time; time.sleep(60)"
    plans = [
        GangPlan(0, "a:1", (sys.executable, "-c", "raise SystemExit(3)"), dict(os.environ)),
        GangPlan(1, "b:1", (sys.executable, "-c", code), dict(os.environ)),
    ]
    guard = Guard(1.0)
    gang = Gang(plans, [Log(None)] * 2, guard)
    process = gang.workers[1].process
    with monkeypatch.context() as patched:  # as the system does while a disk does not answer
        patched.setattr(process, "poll", lambda: None)
        patched.setattr(process, "_wait", lambda timeout: _hang(process, timeout))
        first = gang.wait(0.1)
    process.wait()
    guard.end()

    assert (first.plan.index, first.code) == (0, 3)
    assert "it is still there, as it hangs in a call of the system" in gang.workers[1].story()


def _hang(process, timeout):
    raise subprocess.TimeoutExpired(process.args, timeout)
