"""The launcher starts a gang, shows what it says, and tells which worker failed first."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import replicax
from replicax._src.cli.main import main
from replicax._src.workers import wire
from replicax._src.workers.wire import free_ports
from tests.multi_process.gang import left_behind
from tests.multi_process.hosts import can_make_hosts, two_hosts

slow = pytest.mark.slow

TOY = """
    import os, sys, time
    fault = sys.argv[1]
    import jax.numpy as jnp
    import replicax as rx

    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id

    @rx.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(lambda: x), axis=None)

    for number in range(6):
        total = step(jnp.float32(1))
        if number == 3 and index == 1:
            if fault == "raises":
                raise ValueError("a wrong turn")
            if fault == "killed":
                os.kill(os.getpid(), 9)
            if fault == "stopped":
                os.kill(os.getpid(), 19)
            if fault == "once" and os.environ["REPLICAX_RESTART"] == "0":
                sys.exit(5)
    if fault == "sleeps":
        print("asleep", flush=True)
        time.sleep(1000)
    print(f"total {float(total)} of worker {index}", flush=True)
"""


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(textwrap.dedent(TOY))
    return str(path)


def environment():
    src = str(Path(replicax.__file__).parents[1])
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": src, "XLA_FLAGS": ""}


def command(*arguments):
    return [sys.executable, "-m", "replicax", "launch", *arguments]


def launch(*arguments):
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, timeout=120
    )


def test_the_installed_command_launches_without_importing_jax(toy):
    script = textwrap.dedent("""
        import sys
        from replicax_command import entry
        try:
            entry()
        finally:
            print(sorted({name.split(".")[0] for name in sys.modules} & {"jax", "jaxlib", "numpy"}))
    """)
    arguments = ["launch", "--workers", "2", "--dry-run", toy, "well"]

    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert result.returncode == 0, result.stderr
    first, second, modules = result.stdout.splitlines()
    assert first.startswith("[worker 0] TF_CONFIG=")
    assert second.startswith("[worker 1] TF_CONFIG=")
    assert modules == "[]"


@pytest.mark.multi_process
def test_workers_start_and_their_lines_say_whose_they_are(toy, tmp_path):
    logs = tmp_path / "logs"
    done = launch("--workers", "2", "--log-dir", str(logs), toy, "none")

    assert done.returncode == 0, done.stderr
    for index in range(2):
        line = f"total 2.0 of worker {index}"
        assert f"[worker {index}] {line}" in done.stdout
        log = (logs / f"worker-{index}.log").read_text()
        assert re.search(rf"^\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{{4}} {line}$", log, re.M)
    assert "[Gloo]" not in done.stdout


def test_launchers_of_several_tasks_train_no_models_of_their_own(toy, monkeypatch):
    """`srun -n 2 replicax launch ...`, or the same command in each pod of a PyTorchJob."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")

    done = launch("--workers", "2", toy, "none")

    assert (done.returncode, done.stdout) == (2, "")
    assert "one of several processes" in done.stderr
    assert "worker 0 of 2 (by torchrun)" in done.stderr


@pytest.mark.multi_process
def test_separate_launchers_keep_their_workers_together(toy, monkeypatch):
    monkeypatch.setenv("REPLICAX_ALONE", "1")
    monkeypatch.setenv("SLURM_PROCID", "1")

    done = launch("--workers", "2", toy, "none")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("total 2.0") == 2


VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        ((), None, ["0 0 2 2 None", "1 1 2 2 None"]),
        (("--gpus-per-worker", "2"), None, ["0 0 2 2 0,1", "1 1 2 2 2,3"]),
        (("--gpus-per-worker", "1"), "7,GPU-x", ["0 0 2 2 7", "1 1 2 2 GPU-x"]),
    ],
)
def test_workers_get_ranks_and_their_gpus(tmp_path, monkeypatch, gpus, visible, expected):
    program = tmp_path / "program.py"
    program.write_text(f"import os\nprint(*[os.environ.get(n) for n in {VARIABLES}])")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "3"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)  # of a launcher that started this one

    done = launch("--workers", "2", *gpus, str(program))

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[worker {index}] {line}" for index, line in enumerate(expected)
    ]


def test_ranks_count_over_all_hosts(capsys):
    hosts = ["--hosts", "n1,n2", "--host-index", "1", "--port", "7000"]
    main(["launch", "--workers", "4", *hosts, "--dry-run", "x.py"])

    first, second = capsys.readouterr().out.splitlines()
    assert " RANK=2 LOCAL_RANK=0 WORLD_SIZE=4 " in first
    assert " RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 " in second


def test_more_gpus_than_are_visible_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")

    status = main(["launch", "--workers", "2", "--gpus-per-worker", "2", "--dry-run", "x.py"])

    assert status == 2
    assert "CUDA_VISIBLE_DEVICES=4,5,6 shows 3" in capsys.readouterr().err


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("fault", "code", "story"),
    [("raises", 1, "exited with code 1"), ("killed", 137, "was killed by SIGKILL")],
)
def test_the_first_failure_comes_first_and_gives_the_exit_code(toy, fault, code, story):
    done = launch("--workers", "3", toy, fault)

    assert done.returncode == code
    first = done.stderr.splitlines()[0]
    assert first.startswith("replicax launch: worker 1 (127.0.0.1:")
    assert story in first
    assert "it is the first that failed" in first
    assert len(done.stderr.splitlines()) < 40
    if fault == "raises":
        assert "    ValueError: a wrong turn" in done.stderr


@slow
@pytest.mark.multi_process
@pytest.mark.parametrize("fixed", [False, True], ids=["any ports", "the same ports"])
def test_a_gang_that_failed_starts_again(toy, fixed):
    port = ["--port", str(free_ports(1)[0])] if fixed else []

    done = launch("--workers", "2", "--max-restarts", "1", *port, toy, "once")

    assert done.returncode == 0, done.stderr
    assert "worker 1" in done.stderr
    assert "exited with code 5" in done.stderr
    assert "starting all workers again (restart 1 of 1)" in done.stderr
    assert "[worker 1] total 2.0 of worker 1" in done.stdout


@slow
def test_what_was_compiled_once_is_not_after_a_restart(tmp_path):
    program = written(
        tmp_path,
        """
        import collections, os, sys
        import jax, jax.numpy as jnp
        import replicax as rx

        seen = collections.Counter()
        jax.monitoring.register_event_listener(lambda event, **_: seen.update([event]))
        strategy = rx.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = rx.Variable(jnp.ones(3))
        rx.function(lambda: strategy.run(lambda: v.assign_add(2 * jnp.ones(3))))()
        asked, found = (seen[f"/jax/compilation_cache/{name}"]
                        for name in ("compile_requests_use_cache", "cache_hits"))
        print("attempt", os.environ["REPLICAX_RESTART"], "found", found, "of", asked)
        sys.exit(int(os.environ["REPLICAX_RESTART"] == "0"))
        """,
    )

    done = launch("--workers", "2", "--max-restarts", "1", program)

    assert done.returncode == 0, done.stderr
    told = re.findall(r"\[worker (\d)\] attempt (\d) found (\d+) of (\d+)", done.stdout)
    assert sorted(t[:2] for t in told) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert all(int(asked) > 0 for *_, asked in told)
    assert all(found == (asked if attempt == "1" else "0") for _, attempt, found, asked in told)


@pytest.mark.multi_process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_launcher(toy, number, tmp_path):
    with subprocess.Popen(
        command("--workers", "2", "--grace", "3", toy, "sleeps"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        _until_asleep(launcher, 2)
        children = _children(launcher.pid)
        launcher.send_signal(number)
        launcher.wait(20)
        deadline = time.monotonic() + 10
        while any(map(_is_alive, children)) and time.monotonic() < deadline:
            time.sleep(0.1)

        assert len(children) >= 2
        assert not any(map(_is_alive, children))
        if number != signal.SIGKILL:
            assert launcher.returncode == 128 + number


def _until_asleep(launcher, workers):
    """Read until so many workers have come there; on a busy machine they wait for each other."""
    for line in launcher.stdout:
        workers -= "asleep" in line
        if not workers:
            return
    pytest.fail("the launcher ended before its workers were asleep")


def _children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [child for child in map(int, text.split()) if b"toy.py" in _command_line(child)]


def _command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


STUBBORN = """
    import os, signal, subprocess, sys, time
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], process_group=0)
    print("asleep", flush=True)
    if sys.argv[1] == "dies" and "index\\": 1" in os.environ["TF_CONFIG"]:
        os.kill(os.getpid(), 9)
    time.sleep(300)
"""


def written(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


@contextlib.contextmanager
def launched(tmp_path, *arguments):
    """A launcher that runs; at the end, whatever is left of it is an error."""
    mark = f"TMPDIR={tmp_path}/tmp"
    (tmp_path / "tmp").mkdir()
    with subprocess.Popen(
        command(*arguments),
        env=environment() | {"TMPDIR": f"{tmp_path}/tmp"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            yield launcher
            launcher.stdout.read()
            launcher.wait(30)
            assert left_behind(mark, 20) == []
            assert list((tmp_path / "tmp").iterdir()) == []
        finally:
            for pid, _ in left_behind(mark, 0):
                os.kill(pid, signal.SIGKILL)


def test_a_program_that_ends_early_leaves_no_hub_and_its_port_is_free(tmp_path):
    program = written(tmp_path, "import nothing_of_this_name")
    port = str(free_ports(1)[0])

    with launched(tmp_path, "--workers", "2", "--port", port, "--max-restarts", "1", program) as it:
        said = it.stderr.read()

    assert it.returncode == 1
    assert "starting all workers again (restart 1 of 1)" in said
    assert said.count("ModuleNotFoundError: No module named 'nothing_of_this_name'") == 2
    wire.listen(f"127.0.0.1:{port}").close()


def test_a_port_that_another_process_holds_is_named_before_anything_starts(tmp_path):
    program = written(tmp_path, "print('it started')")
    (port,) = free_ports(1)

    with (
        contextlib.closing(wire.listen(f"127.0.0.1:{port}")),
        launched(tmp_path, "--workers", "2", "--port", str(port), program) as it,
    ):
        said = it.stderr.read()

    assert it.returncode == 2
    assert f"The launcher cannot listen at 127.0.0.1:{port}: Address already in use." in said


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o644, True)])
def test_a_token_that_others_can_read_is_reported(tmp_path, mode, warns):
    path = tmp_path / "token"
    path.write_text("a secret of this run")
    path.chmod(mode)
    program = written(tmp_path, "print('it started')")

    with launched(tmp_path, "--workers", "1", "--token-file", str(path), program) as it:
        said = it.stderr.read()

    assert it.returncode == 0
    assert ("others on this machine can read the token" in said) == warns


def test_a_restart_finds_its_folder_also_after_old_temporary_files_were_removed(tmp_path):
    program = written(
        tmp_path,
        """
        import os, pathlib, shutil
        if os.environ["REPLICAX_RESTART"] == "0":
            shutil.rmtree(pathlib.Path(os.environ["REPLICAX_TOKEN_FILE"]).parent)
            raise SystemExit(4)
        token = pathlib.Path(os.environ["REPLICAX_TOKEN_FILE"])
        modes = [oct(p.stat().st_mode)[-3:] for p in (token, token.parent)]
        print("restarted", len(token.read_text()), *modes, flush=True)
        """,
    )

    with launched(tmp_path, "--workers", "1", "--max-restarts", "1", program) as it:
        said = it.stdout.read()

    assert it.returncode == 0
    assert "restarted 64 600 700" in said


@pytest.mark.parametrize(
    ("code", "first"), [(0, "import replicax"), (3, "pass"), (3, "time.sleep(12)")]
)
def test_workers_do_not_wait_for_one_that_has_ended_before_it_came(tmp_path, code, first):
    program = written(
        tmp_path,
        f"""
        import json, os, sys, time
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            {first}
            sys.exit({code})
        import replicax as rx
        rx.distribute.MultiWorkerMirroredStrategy()
        """,
    )

    with launched(tmp_path, "--workers", "3", "--grace", "200", program) as it:
        told, said = it.stdout.read(), it.stderr.read()

    assert it.returncode == (code or 1)
    story = rf"RollCallError: Worker 1 \(.*\) exited with code {code} before all workers had joined"
    for index in (0, 2):
        assert re.search(rf"\[worker {index}\] .*{story}", told)
        assert re.search(rf"worker {index} \(.*\) exited with code 1", said)


@pytest.mark.parametrize(
    ("strategy", "warns"),
    [
        ("get_strategy()", True),
        ("MirroredStrategy()", True),
        ("MultiWorkerMirroredStrategy(alone=True)", False),
        ("MultiWorkerMirroredStrategy()", False),
    ],
)
def test_workers_that_never_look_for_each_other_are_reported(tmp_path, strategy, warns):
    program = written(tmp_path, f"import replicax as rx; rx.distribute.{strategy}")

    done = launch("--workers", "2", program)

    assert done.returncode == 0, done.stderr
    warned = "2 of 2 workers have completed the program without a strategy" in done.stderr
    assert warned == warns


def test_no_folder_for_temporary_files_is_reported(tmp_path):
    program = written(tmp_path, "print('here')")

    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *command("--workers", "2", program)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 2
    assert done.stderr.startswith("replicax launch: There is no folder for temporary files that")
    assert "Set TMPDIR to one" in done.stderr


def test_a_log_folder_that_is_a_file_is_refused_before_anything_starts(tmp_path):
    program = written(tmp_path, "print('here')")

    with launched(tmp_path, "--workers", "2", "--log-dir", program, program) as it:
        said = it.stderr.read()

    assert it.returncode == 2
    assert said.startswith(
        f"replicax launch: --log-dir {program} cannot be written to: File exists"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_stubborn_workers_and_their_helpers_end_with_the_launcher(tmp_path, number):
    program = written(tmp_path, STUBBORN)

    with launched(tmp_path, "--workers", "2", "--grace", "0.5", program, "sleeps") as launcher:
        lines = [launcher.stdout.readline() for _ in range(2)]
        launcher.send_signal(number)

    assert all("asleep" in line for line in lines)
    assert launcher.returncode == (-9 if number == signal.SIGKILL else 128 + number)


def test_the_helpers_of_a_worker_that_was_killed_end_too(tmp_path):
    program = written(tmp_path, STUBBORN)

    with launched(tmp_path, "--workers", "2", "--grace", "0.5", program, "dies") as launcher:
        said = launcher.stderr.read()

    assert launcher.returncode == 137
    assert "was killed by SIGKILL; it is the first that failed." in said
    assert "pid " in said
    assert "had not ended 0.5 s after another, and was killed by the launcher." in said


def test_the_launcher_can_be_ended_at_any_moment_of_its_start(tmp_path):
    program = written(tmp_path, "import time; time.sleep(300)")
    for delay in (0.05, 0.2, 0.4):
        folder = tmp_path / str(delay)
        folder.mkdir()
        with launched(folder, "--workers", "2", "--grace", "0.5", program) as launcher:
            time.sleep(delay)
            launcher.send_signal(signal.SIGTERM)
        assert launcher.returncode in (143, -15)


@pytest.mark.multi_process
def test_a_stopped_worker_is_named_and_not_the_kill_of_the_launcher(toy):
    done = launch(
        *("--workers", "2", "--env", "REPLICAX_PING_TIMEOUT=4", "--grace", "60", toy, "stopped")
    )

    assert done.returncode == 1
    first, second, third = done.stderr.splitlines()[:3]
    assert first.startswith("replicax launch: worker 1 (127.0.0.1:")
    assert first.endswith("was stopped, and killed by the launcher.")
    assert second.startswith("Worker 0 (127.0.0.1:")
    assert "it has not answered for 4 s: its process is stopped" in third


def test_a_dry_run_shows_the_commands_and_starts_nothing(capsys):
    code = main(
        ["launch", "--workers", "2", "--devices-per-worker", "3", "--dry-run", "-m", "train", "--x"]
    )

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert len(lines) == 2
    assert lines[1].startswith("[worker 1] TF_CONFIG=")
    assert "REPLICAX_CPU_DEVICES=3" in lines[1]
    assert lines[1].endswith("-m train --x")
    assert "TOKEN" not in "".join(lines)


@pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's")
def test_workers_get_large_pages_unless_somebody_says_otherwise(capsys, monkeypatch):
    def told(*arguments):
        assert main(["launch", "--workers", "2", "--dry-run", *arguments, "train.py"]) == 0
        return re.findall(r"GLIBC_TUNABLES=(\S+)", capsys.readouterr().out)

    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert told() == ["glibc.malloc.hugetlb=1"] * 2
    assert told("--env", "GLIBC_TUNABLES=") == ["''"] * 2
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert told() == ["glibc.malloc.check=3"] * 2


def test_several_hosts_share_one_cluster(capsys):
    for host in range(2):
        words = ["--hosts", "a,b", "--host-index", str(host), "--port", "7000", "--dry-run", "t.py"]
        assert main(["launch", "--workers", "4", *words]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("]")[0] for line in lines] == [f"[worker {i}" for i in range(4)]
    assert all('["a:7000", "a:7001", "b:7000", "b:7001"]' in line for line in lines)


def test_several_hosts_need_a_secret_and_are_told_how_to_make_one(tmp_path):
    words = ["--workers", "2", "--hosts", "127.0.0.1", "--port", str(free_ports(1)[0])]
    program = written(tmp_path, "print('here')")

    refused = launch(*words, program)
    assert refused.returncode == 2
    assert "add `--token-file token`" in refused.stderr

    (tmp_path / "token").write_text("known to all\n")
    done = launch(*words, "--token-file", str(tmp_path / "token"), program)
    assert done.returncode == 0, done.stderr
    assert "[worker 1] here" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--workers", "0"], "--workers must be at least 1"),
        (["--workers", "3", "--hosts", "a,b", "--port", "1"], "cannot be divided evenly"),
        (["--workers", "2", "--hosts", "a,b"], "--hosts needs --port"),
        (["--workers", "2", "--host-index", "1"], "--host-index 1 is not one of 0 to 0"),
        (["--workers", "2", "--env", "X"], "--env takes NAME=VALUE"),
        (["--workers", "2", "--port", "65535"], "worker 1 has the address '127.0.0.1:65536'"),
        (["--workers", "2", "--port", "70000"], "a port is a number from 1 to 65535"),
        (["--workers", "2", "--port", "0"], "a port is a number from 1 to 65535"),
        (["--workers", "2", "--port", "-1"], "it must be host:port"),
        (["--workers", "2", "--hosts", "a,b c", "--port", "1"], "worker 1 has the address 'b c:1'"),
        (["--workers", "2", "--max-restarts", "-1"], "cannot be negative"),
        (["--workers", "2", "--devices-per-worker", "0"], "must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(arguments, fault, capsys):
    assert main(["launch", *arguments, "train.py"]) == 2
    assert fault in " ".join(capsys.readouterr().err.split())


@slow
@pytest.mark.multi_process
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces cannot be made here")
def test_two_machines_start_again_when_a_worker_of_one_of_them_fails(toy):
    with two_hosts() as hosts:
        names = ",".join(host.address for host in hosts)
        launchers = [
            subprocess.Popen(
                [
                    *host.enter,
                    *command("--workers", "4", "--hosts", names, "--host-index", str(index)),
                    *("--port", "7000", "--max-restarts", "1", toy, "once"),
                ],
                env=environment() | {"REPLICAX_TOKEN": "known to both"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for index, host in enumerate(hosts)
        ]
        said = [launcher.communicate(timeout=120) for launcher in launchers]

    assert [launcher.returncode for launcher in launchers] == [0, 0], said
    assert "worker 1 (10.213.7.1:7001" in said[0][1]
    assert "no worker of this machine failed by itself" in said[1][1]
    for index in range(4):
        assert f"[worker {index}] total 4.0 of worker {index}" in said[index // 2][0]


@contextlib.contextmanager
def two_launchers(tmp_path, restarts, *program, **variables):
    """Launchers of one worker each, as if on two hosts."""
    ports = free_ports(1)
    env = environment() | {"REPLICAX_TOKEN": "known to both", **variables}
    hosts = ("--workers", "2", "--hosts", "127.0.0.1,127.0.0.2", "--port", str(ports[0]))
    launchers, outputs = [], []
    for index in range(2):
        outputs.append(tmp_path / f"launcher{index}.txt")
        words = (*hosts, "--host-index", str(index), "--max-restarts", str(restarts[index]))
        with outputs[-1].open("w") as output:
            launchers.append(
                subprocess.Popen(
                    command(*words, *program), env=env, stdout=output, stderr=subprocess.STDOUT
                )
            )
    try:
        yield launchers, [path.read_text for path in outputs]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()


@pytest.mark.multi_process
@pytest.mark.parametrize("restarts", [(2, 0), pytest.param((0, 2), marks=slow)])
def test_launchers_of_two_hosts_restart_together_or_not_at_all(toy, tmp_path, restarts):
    with two_launchers(tmp_path, restarts, toy, "raises") as (launchers, texts):
        codes = [launcher.wait(60) for launcher in launchers]

    assert codes == [1, 1]
    eager, other = restarts.index(2), restarts.index(0)
    told = f"the launcher of host {other} (127.0.0.{other + 1}) has ended for good, with code 1"
    assert f"Not starting the workers again: {told}." in texts[eager]()
    assert "starting all workers again" not in texts[0]() + texts[1]()


@slow
@pytest.mark.multi_process
def test_launchers_of_two_hosts_restart_together(toy, tmp_path):
    with two_launchers(tmp_path, (1, 2), toy, "once") as (launchers, texts):
        codes = [launcher.wait(120) for launcher in launchers]

    assert codes == [0, 0]
    assert all(text().count("starting all workers again") == 1 for text in texts)


def test_program_that_fails_on_another_host_is_not_waited_for(tmp_path):
    program = written(
        tmp_path,
        """
        import json, os, sys
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            sys.exit(3)
        import replicax as rx
        rx.distribute.MultiWorkerMirroredStrategy()
        """,
    )
    with two_launchers(tmp_path, (0, 0), program) as (launchers, texts):
        codes = [launcher.wait(60) for launcher in launchers]

    assert codes == [1, 3]
    assert re.search(r"RollCallError: .* before all workers had joined", texts[0]())


@slow
@pytest.mark.multi_process
def test_host_that_is_gone_costs_one_join_timeout(toy, tmp_path):
    given = {"REPLICAX_JOIN_TIMEOUT": "15"}
    with two_launchers(tmp_path, (3, 3), toy, "sleeps", **given) as (launchers, texts):
        deadline = time.monotonic() + 60
        while not all("asleep" in text() for text in texts):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        launchers[1].kill()
        for child in _children(launchers[0].pid):  # what the loss of the other does to a training
            os.kill(child, signal.SIGKILL)
        launchers[0].wait(90)

    assert texts[0]().count("starting all workers again") == 1
    assert "the launcher of host 1 (127.0.0.2) did not come" in texts[0]()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_host_of_the_newer_internet_needs_no_brackets(host, capsys):
    arguments = ["--workers", "1", "--hosts", host, "--port", "7000", "--dry-run", "train.py"]

    assert main(["launch", *arguments]) == 0
    assert "[::1]:7000" in capsys.readouterr().out
