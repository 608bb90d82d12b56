"""``launch --ssh`` starts the launcher on all hosts, and ends it everywhere."""

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import replicax
from replicax._src.cli.main import main
from replicax._src.workers.wire import free_ports
from tests.multi_process.gang import left_behind

pytestmark = pytest.mark.multi_process

# It does what ssh does, on this machine: options, a host, and a command for the host's shell, which
# runs in a session of its own. It notes the host, and has no connection to one called "nowhere".
FAKE = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do
    case "$1" in -o) shift 2;; *) shift;; esac
done
echo "$1" >> "$SSH_LOG"
[ "$1" = nowhere ] && { echo "ssh: no such host" >&2; exit 255; }
shift
exec setsid -w sh -c "$*"
"""
PROGRAM = """
    import os, sys, time
    print("rank", os.environ["RANK"], os.environ["LOCAL_RANK"], sys.argv[1:], flush=True)
    if sys.argv[1] == "fails" and os.environ["RANK"] == "1":
        sys.exit(7)
    if sys.argv[1] in ("sleeps", "fails"):
        time.sleep(1000)
"""


@pytest.fixture
def hosts(tmp_path):
    """Make a program and a fake ssh; return a function that starts the command."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(FAKE)
    ssh.chmod(0o755)
    program = tmp_path / "my program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    port = free_ports(1)[0]
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(replicax.__file__).parents[1]),
        "JAX_PLATFORMS": "cpu",
        "SSH_LOG": str(tmp_path / "hosts"),
        "RX_TEST_MARK": str(tmp_path),
        "XLA_FLAGS": "",
    }
    for name in ("REPLICAX_TOKEN", "REPLICAX_TOKEN_FILE", "REPLICAX_SSH", "REPLICAX_CPU_DEVICES"):
        env.pop(name, None)

    def start(*words, names="127.0.0.1,me@127.0.0.2", script=program):
        enter = "from replicax_command import entry; entry()"
        launch = [sys.executable, "-c", enter, "launch", "--hosts", names, "--ssh"]
        launch += ["--workers", "2", "--port", str(port), "--grace", "5", str(script), *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            launch, env=env, stdout=pipe, stderr=pipe, stdin=pipe, text=True, cwd=tmp_path
        )

    yield start
    assert left_behind(str(tmp_path)) == []


def ended(process, seconds=90):
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def test_every_host_runs_its_workers(hosts, tmp_path):
    code, out, err = ended(hosts("ends", "--", "a b", "$HOME"))

    assert code == 0, out + err
    words = ["ends", "a b", "$HOME"]
    assert sorted(out.splitlines()) == [
        f"[worker 0] rank 0 0 {words}",
        f"[worker 1] rank 1 0 {words}",
    ]
    assert sorted((tmp_path / "hosts").read_text().split()) == ["127.0.0.1", "me@127.0.0.2"]


@pytest.mark.slow
def test_the_token_is_on_no_command_line(hosts):
    process = hosts("sleeps")
    wait_for_ranks(process)
    told = [
        path.read_bytes()
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if (path.parent / "environ").exists()
    ]
    process.send_signal(signal.SIGTERM)
    ended(process)

    assert not any(re.search(rb"[0-9a-f]{64}", line) for line in told)


def wait_for_ranks(process):
    lines = [process.stdout.readline() for _ in range(2)]
    assert all("rank" in line for line in lines), lines


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL],
)
def test_all_hosts_end_with_the_command(hosts, number):
    process = hosts("sleeps")
    wait_for_ranks(process)
    process.send_signal(number)

    code, _, _ = ended(process)

    assert code == (-9 if number == signal.SIGKILL else 128 + number)


def test_an_unreachable_host_ends_the_others(hosts):
    began = time.monotonic()
    code, _, err = ended(hosts("sleeps", names="127.0.0.1,nowhere"))

    assert code == 255
    assert "ssh to nowhere failed" in err
    assert time.monotonic() - began < 45


@pytest.mark.slow
def test_workers_of_two_hosts_train_together(hosts):
    summed = Path(__file__).parents[1] / "multi_process" / "summed.py"
    code, out, err = ended(hosts(script=summed))

    assert code == 0, out + err
    assert sorted(re.findall(r"\[worker \d\] SUM=.*", out)) == [
        "[worker 0] SUM=2",
        "[worker 1] SUM=2",
    ]


@pytest.mark.slow
def test_a_failure_on_one_host_gives_the_exit_code(hosts):
    code, _, err = ended(hosts("fails"), 150)

    assert code == 7
    assert "exited with code 7" in err


def test_a_dry_run_shows_the_commands(capsys):
    arguments = ["--hosts", "n1,n2", "--ssh", "--port", "7000", "--workers", "2", "--dry-run"]

    assert main(["launch", *arguments, "x.py", "--", "a b"]) == 0

    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["ssh", "ssh"]
    assert [line[-2] for line in lines] == ["n1", "n2"]
    assert "launch --remote --host-index 1 --hosts n1,n2" in lines[1][-1]
    assert lines[1][-1].endswith("x.py -- 'a b'")


@pytest.mark.parametrize("arguments", [(), ("--hosts", "a,b", "--port", "1", "--host-index", "1")])
def test_ssh_without_hosts_or_with_an_index_is_refused(capsys, arguments):
    assert main(["launch", "--workers", "2", "--ssh", *arguments, "x.py"]) == 2
    assert "--ssh needs --hosts" in capsys.readouterr().err


def test_a_missing_ssh_is_named(capsys, monkeypatch):
    monkeypatch.setenv("REPLICAX_SSH", "no-such-ssh -p 2222")
    arguments = ["--hosts", "a,b", "--port", "7000", "--ssh"]

    assert main(["launch", "--workers", "2", *arguments, "x.py"]) == 2
    assert "--ssh needs 'no-such-ssh'" in capsys.readouterr().err
