"""A run is looked at while it goes on, and told of on a page when it is over."""

import io
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

import replicax
from replicax._src.base.rendering import page
from replicax._src.cli.main import main
from replicax._src.cli.report import Reporter, Samples
from replicax._src.cli.top import launched, table
from replicax._src.workers import run_registry
from replicax._src.workers.join import HubProcess, statuses
from replicax._src.workers.membership import MembershipLog
from tests.workers.test_hub import options

# Steps until it is told to stop; the first attempt of worker 1 fails with a name that is markup.
PROGRAM = """
    import os, pathlib, sys, time
    import jax.numpy as jnp
    import numpy as np
    import replicax as rx

    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    stop = pathlib.Path(sys.argv[1])
    with strategy.scope():
        total = rx.Variable(jnp.zeros(()))

    def rows():
        while True:
            time.sleep(0.02)
            yield np.ones(2, "f")

    @rx.function
    def step(batch):
        strategy.run(lambda x: total.assign_add(
            rx.distribute.get_replica_context().all_reduce("SUM", x.sum())), args=(batch,))

    dataset = rx.data.Dataset.from_generator(
        rows, output_signature=rx.TensorSpec((2,), "float32"))
    for batch in strategy.experimental_distribute_dataset(dataset):
        step(batch)
        if os.environ["REPLICAX_RESTART"] == "0" and total.numpy() > 20:
            if strategy.cluster_resolver.task_id == 1:
                raise ValueError("<script>a wrong turn</script>")
        # One worker may see the file a step before the other.
        is_told = strategy.reduce("SUM", jnp.float32(stop.exists()), axis=None)
        if total.numpy() > 400 or is_told > 0:
            break
"""


def environment():
    src = str(Path(replicax.__file__).parents[1])
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": src, "XLA_FLAGS": ""}


def replicax_command(*arguments):
    code = "from replicax_command import entry; entry()"
    return [sys.executable, "-c", code, *arguments]


@pytest.mark.multi_process
def test_a_run_is_seen_while_it_runs_and_summarized_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program, stop, report = tmp_path / "train.py", tmp_path / "stop", tmp_path / "run.html"
    program.write_text(textwrap.dedent(PROGRAM))
    asked = ("--workers", "2", "--max-restarts", "1", "--report", str(report))
    process = subprocess.Popen(
        replicax_command("launch", *asked, str(program), str(stop)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        status = _seen(_both_step)
        other = subprocess.run(
            replicax_command("top", "--once"), env=environment(), capture_output=True, text=True
        )
        stop.write_text("")
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 0, said
    assert other.returncode == 0, other.stderr
    assert "launched by pid" in " ".join(other.stdout.split())  # the title may be wrapped
    for worker in status["workers"]:
        assert worker["steps"] > 0
        assert 0 <= worker["waits"] <= 1
        assert worker["memory"] > 1 << 20
        assert worker["state"] == "here"
    told = report.read_text()
    assert "ended well" in told
    assert "1 restart" in told
    assert "Why attempt 0 ended" in told
    assert "ValueError: &lt;script&gt;a wrong turn" in told
    assert "<script" not in told
    assert told.count("<polyline") >= 4


def _both_step(status):
    workers = status["workers"]
    return len(workers) == 2 and all(w["state"] == "here" and w["rate"] > 0 for w in workers)


def _seen(is_so):
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        done = subprocess.run(
            replicax_command("top", "--json"), env=environment(), capture_output=True, text=True
        )
        if done.returncode == 0 and is_so(status := json.loads(done.stdout)):
            return status
        time.sleep(0.2)
    raise AssertionError(done.stderr)


def test_without_a_run_it_says_how_to_name_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    assert main(["top"]) == 2
    assert "replicax top HOST:PORT --token-file F" in capsys.readouterr().err
    assert main(["top", "127.0.0.1:1"]) == 2
    assert "its token is needed" in capsys.readouterr().err


def noted(tmp_path, name, pid):
    folder = tmp_path / f"replicax-launch-{name}"
    run_registry.write_token("t", folder)
    run_registry.note(folder, "127.0.0.1:1", "train.py", run_registry.BY_LAUNCHER, pid)
    return folder / "run.json"


def test_several_runs_are_listed_to_choose_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, pid in (("a", os.getpid()), ("b", os.getppid())):
        noted(tmp_path, name, pid)
    (tmp_path / "replicax-launch-damaged").mkdir()
    (tmp_path / "replicax-launch-damaged" / "run.json").write_text("[]")

    assert [r.address for r in launched()] == ["127.0.0.1:1"] * 2
    assert main(["top"]) == 2
    assert f"replicax top {os.getpid()}" in capsys.readouterr().err


def test_dead_launchers_are_not_listed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    noted(tmp_path, "ended", ended.pid)
    ended.communicate()
    reused = noted(tmp_path, "another process has its number now", os.getpid())
    reused.write_text(json.dumps(json.loads(reused.read_text()) | {"birth": "1"}))

    assert launched() == []


def test_run_without_a_launcher_is_found_until_it_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = options(2, program="train.py")
    hub = HubProcess(told)
    assert not hub.fault()
    deadline = time.monotonic() + 30
    while not (runs := launched()) and time.monotonic() < deadline:
        time.sleep(0.05)
    (run,) = runs
    assert (run.address, run.token) == (told.address, told.token)
    assert run.name.startswith("train.py, with the hub pid ")
    (status,) = itertools.islice(statuses(run.address, run.token), 1)
    assert status["size"] == 2
    hub.end()

    assert list(tmp_path.iterdir()) == []


def test_worker_takes_one_line_of_a_terminal_of_80_columns():
    worker = STATUS["workers"][0] | {
        "host": "compute-node-0123.cluster.example.org",
        "pid": 1234567,
        "steps": 123_456.0,
        "memory": 12_345_678_901.0,
        "doing": "call 123456 of train_step (program 0123456789ab), which is rather long",
    }
    workers = [worker | {"index": index} for index in range(5)]
    out = io.StringIO()
    Console(file=out, width=80).print(table(STATUS | {"workers": workers, "news": []}, "run"))

    *_, head = [i for i, line in enumerate(out.getvalue().splitlines()) if "steps/s" in line]
    rows = out.getvalue().splitlines()[head + 1 :]
    assert len(rows) == 5
    assert all(f in row for row in rows for f in ("1234567, ", "123456 ", "11.50 GiB"))


def test_a_report_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, capsys):
    target = str(tmp_path / "no" / "run.html")

    assert main(["launch", "--workers", "1", "--report", target, __file__]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_long_run_keeps_a_bounded_number_of_samples():
    samples = Samples()
    for second in range(20_000):
        samples.add(second, {"steps": 3 * second, "waited": 0.0})

    assert len(samples.points) <= 1000
    assert samples.points[0][0] < 100
    assert samples.points[-1][0] > 19_000
    assert all(steps == 3 * second for second, steps, _ in samples.points)


STATUS = {
    "size": 3,
    "seconds": 5.0,
    "news": ["Worker 1 is gone: <b>it</b> raised \x1b[31mred"],
    "workers": [
        {
            "index": 0,
            "host": "<i>h</i>\x1b]0;title\x07",
            "address": "",
            "pid": 7,
            "state": "here",
            "steps": 12.0,
            "rate": 1.5,
            "waits": 0.25,
            "memory": 2048.0,
            "silent": 0.5,
            "doing": "call 3 of step",
        }
    ],
}


def test_what_workers_say_cannot_steer_the_terminal():
    text = str(table(STATUS, "run"))

    assert "\x1b" not in text
    assert "\x07" not in text
    assert all(figure in text for figure in ("12", "1.50", "25 %", "2 KiB", "2 not here yet"))


def test_membership_of_an_elastic_run_is_shown(tmp_path):
    log = MembershipLog()
    log.add(0, 1.0, [0, 1, 2])
    assert log.total({0: 12, 2: 12}) == 12
    log.add(12, 9.0, [0, 2], cause="Worker 1 <is> gone.")
    log.add(20, 30.0, [0, 1, 2], [1])
    assert log.total({1: 5}) == 25  # a worker counts only the steps since it has joined
    status = {**STATUS, "most": 3, "membership": log.entries}

    text = str(table(status, "run"))
    assert "0 1 2 from step 1, 0 2 from step 13, 0 1 2 from step 21" in " ".join(text.split())

    reporter = Reporter(tmp_path / "run.html", "train.py")
    reporter.begin("127.0.0.1:1", "token")
    reporter._add_status(reporter.attempts[0], status)
    reporter.end(0)
    page_text = reporter.page()
    assert "<h2>Membership</h2>" in page_text
    assert "Worker 1 &lt;is&gt; gone." in page_text
    assert "Membership" not in Reporter(tmp_path / "run.html", "train.py").page()


def test_a_page_needs_no_other_file_and_its_tags_are_closed(tmp_path):
    reporter = Reporter(tmp_path / "run.html", "train <x>.py")
    reporter.begin("127.0.0.1:1", "token")
    reporter._add_status(reporter.attempts[0], STATUS)
    reporter._add_status(reporter.attempts[0], STATUS)
    reporter.end(1, "worker 0 <failed>")
    reporter.write()

    text = (tmp_path / "run.html").read_text()

    checker = _Closed()
    checker.feed(text)
    assert checker.open == []
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<failed>" not in text
    assert page("t", "b").startswith("<!doctype html>")


class _Closed(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
