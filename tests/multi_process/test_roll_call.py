"""Workers that do not come together say who is missing, double, or of another kind."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from replicax._src.workers.wire import free_ports
from tests.multi_process.gang import ROOT, Gang

pytestmark = [pytest.mark.multi_process, pytest.mark.slow]

NONSENSE = [b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b"{}\n", b"\xff" * 99]


def test_a_missing_worker_is_named_to_those_who_wait(tmp_path):
    with Gang(tmp_path, 3, REPLICAX_JOIN_TIMEOUT="8") as gang:
        present = [gang.start(0, "none", 0), gang.start(2, "none", 0)]
        gang.wait(seconds=60)

        for worker in present:
            assert worker.code == 1
            assert worker.error.startswith("RollCallError: 1 of 3 workers did not join within 8 s")
            assert f"worker 1 ({gang.addresses[1]})" in worker.error
            assert f"worker 2 ({gang.addresses[2]}, pid {present[1].process.pid})" in worker.error
            assert f"waiting for worker 1 ({gang.addresses[1]})" in worker.text
        assert gang.is_gone()


def test_a_late_worker_is_waited_for(tmp_path):
    with Gang(tmp_path, 2) as gang:
        gang.start(1, "none", 0)
        time.sleep(6)
        gang.start(0, "none", 0)
        gang.wait(seconds=90)

        assert [w.code for w in gang.workers] == [0, 0]
        assert f"waiting for worker 0 ({gang.addresses[0]})" in gang.workers[0].text


def test_a_worker_whose_coordinator_never_comes_says_so(tmp_path):
    with Gang(tmp_path, 2, REPLICAX_JOIN_TIMEOUT="5") as gang:
        worker = gang.start(1, "none", 0)
        gang.wait(seconds=60)

        assert worker.error.startswith(f"RollCallError: Worker 1 ({gang.addresses[1]}) could not")
        assert f"reach worker 0 at {gang.addresses[0]} within 5 s" in worker.error


@pytest.mark.parametrize("index", [0, 1])
def test_an_index_that_is_used_twice_is_refused_to_the_second(tmp_path, index):
    with Gang(tmp_path, 3, REPLICAX_JOIN_TIMEOUT="40") as gang:
        first = [gang.start(0, "none", 0), gang.start(1, "none", 0)]
        time.sleep(8)
        double = gang.start(index, "none", 0)
        gang.wait(double, seconds=30)

        assert (
            f"RollCallError: The index {index} is claimed twice: by worker {index}" in double.text
        )
        assert f"pid {first[index].process.pid}" in double.error
        assert f"pid {double.process.pid}" in double.error
        gang.start(2, "none", 0)
        gang.wait(*first, seconds=60)
        assert [w.code for w in first] == [0, 0]


def test_another_world_size_is_refused(tmp_path):
    with Gang(tmp_path, 3, REPLICAX_JOIN_TIMEOUT="15", REPLICAX_TOKEN="same") as gang:
        gang.start(0, "none", 0)
        other = gang.start(1, "none", 0, size=2)
        gang.wait(other, seconds=30)

        assert "for a cluster of 2 workers, and worker 0 for one of 3" in other.error
        assert f"worker 1 ({gang.addresses[1]}, pid {other.process.pid})" in other.error.lower()


def test_another_version_is_refused_with_both_versions(tmp_path):
    fake = tmp_path / "fake" / "jaxlib-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 9.9.9\n")
    with Gang(tmp_path, 2, REPLICAX_JOIN_TIMEOUT="15") as gang:
        gang.start(0, "none", 0)
        time.sleep(5)
        path = f"{tmp_path / 'fake'}:src:."
        other = gang.start(1, "none", 0, PYTHONPATH=path)
        gang.wait(other, seconds=30)

        assert "runs jaxlib 9.9.9, and worker 0 (" in other.error
        assert "All workers must run the same versions." in other.error


def test_different_numbers_of_devices_are_refused_on_all_workers(tmp_path):
    with Gang(tmp_path, 2) as gang:
        gang.start(0, "none", 0, REPLICAX_CPU_DEVICES="1")
        gang.start(1, "none", 0, REPLICAX_CPU_DEVICES="2")
        gang.wait(seconds=60)

        for worker in gang.workers:
            assert "RollCallError: Worker 0 has 1 cpu device(s), and worker 1" in worker.text


def test_a_port_that_another_program_holds_is_named(tmp_path):
    with Gang(tmp_path, 2, REPLICAX_JOIN_TIMEOUT="10") as gang:
        host, port = gang.addresses[0].split(":")
        with socket.create_server((host, int(port))) as server:
            chatter = threading.Thread(target=_answer, args=(server,), daemon=True)
            chatter.start()
            gang.start(0, "none", 0)
            gang.start(1, "none", 0)
            gang.wait(seconds=60)
        chatter.join(5)

        first, second = gang.workers
        assert first.error.startswith(
            f"RollCallError: Worker 0 cannot listen at its address {gang.addresses[0]}: Address"
            " already in use."
        )
        assert f"listens at {gang.addresses[0]} is not worker 0 of this run" in second.error


def _answer(server):
    server.settimeout(30)
    try:
        for _ in range(2):
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")
    except OSError:
        pass


def test_a_worker_with_another_token_is_kept_out(tmp_path):
    with Gang(tmp_path, 2, REPLICAX_JOIN_TIMEOUT="30", REPLICAX_TOKEN="ours") as gang:
        first = gang.start(0, "none", 0)
        time.sleep(5)
        stranger = gang.start(1, "none", 0, REPLICAX_TOKEN="theirs")
        gang.wait(stranger, seconds=30)

        assert "another REPLICAX_TOKEN" in stranger.error
        gang.start(1, "none", 0)
        gang.wait(first, seconds=60)
        assert first.code == 0


def test_nonsense_at_the_port_does_not_disturb_the_roll_call(tmp_path):
    with Gang(tmp_path, 2) as gang:
        first = gang.start(0, "none", 0)
        host, port = gang.addresses[0].split(":")
        deadline = time.monotonic() + 30
        sent = 0
        while sent < 20 and time.monotonic() < deadline:
            try:
                with socket.create_connection((host, int(port)), timeout=1) as connection:
                    connection.sendall(NONSENSE[sent % len(NONSENSE)])
                    sent += 1
            except OSError:
                time.sleep(0.1)
        gang.start(1, "none", 0)
        gang.wait(seconds=90)

        assert sent == 20
        assert first.code == 0


def test_only_the_address_of_the_cluster_is_listened_at(tmp_path):
    with Gang(tmp_path, 2) as gang:
        gang.start(0, "stuck", 0)
        gang.start(1, "stuck", 0)
        deadline = time.monotonic() + 60
        while not gang.workers[0].moment("FAULT") and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = {w.process.pid for w in gang.workers}
        places = {address for pid in pids for address in _listening(pid)}

        assert places
        assert all(a.startswith(("0100007F:", "0000000000000000FFFF00000100007F:")) for a in places)


def _listening(pid):
    """The addresses where a process listens, as the kernel writes them."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                yield fields[1]


def can_have_own_hosts_file():
    if not shutil.which("unshare") or os.getuid() != 0:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


class Pods:
    """Two workers on hosts whose names are those of a file, which may change."""

    def __init__(self, folder, **environment):
        self.hosts, resolver = folder / "hosts", folder / "resolv.conf"
        self.hosts.write_text("127.0.0.1 localhost\n")
        resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
        script = f"mount --bind {self.hosts} /etc/hosts && mount --bind {resolver} /etc/resolv.conf"
        self.port = free_ports(1)[0]
        left_out = ("XLA_FLAGS", "REPLICAX_CPU_DEVICES")
        env = {
            **{name: value for name, value in os.environ.items() if name not in left_out},
            "PYTHONPATH": str(ROOT / "src"),
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": f"train-0.train:{self.port}",
            "JAX_NUM_PROCESSES": "2",
            **environment,
        }
        program = f"{sys.executable} {Path(__file__).with_name('summed.py')}"
        command = ["unshare", "-m", "sh", "-c", f"{script} && exec {program}"]
        self._outputs = [folder / f"worker-{index}" for index in range(2)]
        self.workers = []
        for index, output in enumerate(self._outputs):
            with output.open("w") as file:
                own = {**env, "JAX_PROCESS_ID": str(index)}
                self.workers.append(subprocess.Popen(command, env=own, stdout=file, stderr=file))

    @property
    def texts(self):
        return [output.read_text() for output in self._outputs]

    def wait(self):
        return [worker.wait(60) for worker in self.workers]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self.workers:
            worker.kill()
            worker.wait()


needs_own_hosts_file = pytest.mark.skipif(
    not can_have_own_hosts_file(), reason="needs root and mount namespaces"
)


@needs_own_hosts_file
def test_names_that_do_not_resolve_yet_are_waited_for(tmp_path):
    with Pods(tmp_path, REPLICAX_JOIN_TIMEOUT="60") as pods:
        waits = [
            "waiting for the name of this worker, train-0.train, to resolve",
            f"waiting for worker 0 (train-0.train:{pods.port}: ",
        ]
        deadline = time.monotonic() + 50
        while not all(words in text for words, text in zip(waits, pods.texts, strict=True)):
            assert time.monotonic() < deadline, pods.texts
            assert [worker.poll() for worker in pods.workers] == [None, None]
            time.sleep(0.1)
        pods.hosts.write_text("127.0.0.1 localhost train-0.train\n")
        assert pods.wait() == [0, 0], pods.texts
    assert all("SUM=2" in text for text in pods.texts)


@needs_own_hosts_file
def test_a_name_that_stays_unresolved_is_an_error_long_before_the_join_timeout(tmp_path):
    with Pods(tmp_path, REPLICAX_NAME_TIMEOUT="2") as pods:
        assert pods.wait() == [1, 1], pods.texts
    for text in pods.texts:
        assert "RollCallError: The host name 'train-0.train' of worker 0" in text
        assert "did not resolve within 2 s" in text
