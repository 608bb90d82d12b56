"""Metrics of a run: what Prometheus reads, and who may ask."""

import os
import re
import socket
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import replicax
from replicax._src.workers import wire
from replicax._src.workers.prometheus import Metrics, lines
from replicax._src.workers.wire import free_ports

WORKER = {
    "index": 1,
    "host": 'a"b\\c\nd',
    "state": "here",
    "collectives": 7,
    "silent": 0.5,
    "steps": 3.0,
    "rate": 1.5,
}
STATUS = {"size": 2, "seconds": 12.5, "workers": [WORKER, {**WORKER, "index": 0, "state": "lost"}]}
LINE = re.compile(r'(\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (-?[0-9.e+-]+)')


def parsed(text):
    """Read Prometheus' text format: {(name, labels): value}, and the type of each name."""
    values, kinds = {}, {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            name, labels, value = LINE.fullmatch(line).groups()
            assert name in kinds, f"{name} has no type before its first value"
            values[name, labels or ""] = float(value)
    return values, kinds


def test_status_is_written_in_the_text_format():
    values, kinds = parsed("".join(f"{line}\n" for line in lines(STATUS)))

    host = r'host="a\"b\\c\nd"'
    assert values["replicax_worker_steps_total", f'worker="1",{host}'] == 3
    assert values["replicax_workers", 'state="here"'] == 1
    assert values["replicax_workers", 'state="lost"'] == 1
    assert values["replicax_workers_expected", ""] == 2
    assert kinds["replicax_worker_steps_total"] == "counter"
    assert kinds["replicax_worker_silent_seconds"] == "gauge"


def asked(address, path="/metrics", **headers):
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), ""


@pytest.fixture
def served():
    with wire.listen("0.0.0.0:0") as listener:
        metrics = Metrics(listener, "the-token")
        metrics.note(lambda: STATUS)
        yield listener.getsockname()[1]
        metrics.close()


def test_loopback_needs_no_token(served):
    status, text, kind = asked(f"127.0.0.1:{served}")

    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert parsed(text)[0]["replicax_workers_expected", ""] == 2
    assert asked(f"127.0.0.1:{served}", "/other")[0] == 404


def test_others_need_a_digest_of_the_token(served):
    own = own_address()
    if own is None:
        pytest.skip("this machine has the loopback address only")

    refused, text, _ = asked(f"{own}:{served}")
    assert (refused, "replicax_" in text) == (401, False)
    for wrong in ("another", "the-token", ""):  # the token itself must not travel
        assert asked(f"{own}:{served}", Authorization=f"Bearer {wrong}")[0] == 401
    command = "printf 'replicax metrics %s' the-token | sha256sum | cut -d' ' -f1"  # of the page
    made = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert asked(f"{own}:{served}", Authorization=f"Bearer {made.stdout.strip()}")[0] == 200


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            return None
        found = probe.getsockname()[0]
    return None if found.startswith("127.") else found


@pytest.mark.multi_process
def test_a_launched_run_serves_its_metrics(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import re, sys, time, urllib.request
            import jax.numpy as jnp
            import replicax as rx

            strategy = rx.distribute.MultiWorkerMirroredStrategy()

            @rx.function
            def step():
                return strategy.reduce("SUM", strategy.run(lambda: jnp.float32(1)), axis=None)

            for _ in range(5):
                step()
            if strategy.cluster_resolver.task_id == 0:
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                deadline, text = time.monotonic() + 20, ""
                while len(re.findall(r"_worker_steps_total{.*} 5$", text, re.M)) < 2:
                    assert time.monotonic() < deadline, text
                    time.sleep(0.2)
                    text = opener.open(sys.argv[1], timeout=10).read().decode()
                open(sys.argv[2], "w").write(text)
            step()
        """)
    )
    port, answer = free_ports(1)[0], tmp_path / "answer"
    url = f"http://127.0.0.1:{port}/metrics"
    launch = [sys.executable, "-m", "replicax", "launch", "--workers", "2", "--metrics-port"]
    done = subprocess.run(
        [*launch, str(port), str(program), url, str(answer)],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(replicax.__file__).parents[1]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    values, _ = parsed(answer.read_text())
    label = f'worker="0",host="{socket.gethostname()}"'
    assert values["replicax_worker_steps_total", label] == 5
    assert values["replicax_workers", 'state="here"'] == 2
    assert values["replicax_worker_memory_bytes", label] > 2**20


def test_a_port_that_is_taken_is_named(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("")
    with wire.listen("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        launch = [sys.executable, "-m", "replicax", "launch", "--workers", "2", "--metrics-port"]
        done = subprocess.run(
            [*launch, str(port), str(program)], capture_output=True, text=True, timeout=60
        )

    assert done.returncode == 2
    assert f"REPLICAX_METRICS_PORT={port} is not a free port of this machine" in done.stderr
