"""Two machines with a firewall between them: network namespaces that a cable connects."""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid

import pytest

from tests.clusters.slow_link import slow_link
from tests.clusters.test_real import PROGRAM, PYTHON, SECONDS, environment, need, started, sums

pytestmark = [pytest.mark.slow, pytest.mark.clusters]

HUB, SERVICE, RANGE = 7000, 7001, (40000, 40100)
ADDRESSES = "10.77.0.1", "10.77.0.2"
ROUND_TRIP = 0.5
ELSEWHERE = "10.77.9.9"  # translated to the first machine's address


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Return the names of two network namespaces, with addresses `ADDRESSES`."""
    for command in ("ip", "iptables", "sysctl"):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed: make test-clusters installs it")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    tag = uuid.uuid4().hex[:6]
    names = [f"{tag}a", f"{tag}b"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", f"v{names[0]}", "type", "veth", "peer", f"v{names[1]}")
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "link", "set", f"v{name}", "netns", name)
            inside = ("ip", "-n", name)
            run(*inside, "addr", "add", f"{address}/24", "dev", f"v{name}")
            run(*inside, "link", "set", f"v{name}", "up")
            run(*inside, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def close_ports(name, *, but):
    """Drop what comes to a machine over the cable, except to these ports."""
    table = ("ip", "netns", "exec", name, "iptables", "-A", "INPUT", "-p", "tcp")
    run(*table, "-m", "conntrack", "--ctstate", "ESTABLISHED", "-j", "ACCEPT")
    for ports in but:
        run(*table, "--dport", ports, "-j", "ACCEPT")
    run(*table, "-i", f"v{name}", "-j", "DROP")


def start(names, command=PYTHON, addresses=ADDRESSES, **more):
    """Start one worker on each machine; return their exit codes and outputs."""
    cluster = {"worker": [f"{address}:{HUB}" for address in addresses]}
    workers = []
    for index, name in enumerate(names):
        config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        workers.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env=environment(TF_CONFIG=json.dumps(config), REPLICAX_TOKEN="t", **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        return [(worker.communicate(timeout=SECONDS)[0], worker.returncode) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def require_sum_of_two(results):
    for output, code in results:
        assert code == 0, output
        assert "SUM=2" in output


def test_machines_without_a_firewall_need_no_settings(hosts):
    require_sum_of_two(start(hosts))


@pytest.mark.parametrize(
    "command", [PYTHON, [sys.executable, "-m", "replicax", "doctor", "--cluster"]]
)
def test_closed_ports_are_named_before_jax_starts(hosts, command):
    for name in hosts:
        close_ports(name, but=[str(HUB)])

    for output, code in start(hosts, command):
        assert code == 1, output
        assert "RollCallError" in output
        assert "cannot connect to worker 0 at 10.77.0.1:" in output
        assert "cannot connect to JAX's coordination service at 10.77.0.1:" in output
        assert "no answer within 5 s" in output
        assert "ip_local_port_range" in output


def test_two_fixed_ports_and_a_range_are_enough(hosts):
    for name in hosts:
        close_ports(name, but=[str(HUB), str(SERVICE), "{}:{}".format(*RANGE)])
        limits = "net.ipv4.ip_local_port_range={} {}".format(*RANGE)
        run("ip", "netns", "exec", name, "sysctl", "-w", limits)

    require_sum_of_two(start(hosts, REPLICAX_SERVICE_PORT=str(SERVICE)))


def test_worker_0_may_listen_at_another_address_than_its_advertised_one(hosts):
    first, second = hosts
    for chain in ("PREROUTING", "OUTPUT"):
        translate = ("-d", ELSEWHERE, "-j", "DNAT", "--to-destination", ADDRESSES[0])
        run("ip", "netns", "exec", first, "iptables", "-t", "nat", "-A", chain, *translate)
    run("ip", "-n", second, "route", "add", ELSEWHERE, "via", ADDRESSES[0])
    run("ip", "-n", first, "route", "add", ELSEWHERE, "dev", f"v{first}")
    advertised = ELSEWHERE, ADDRESSES[1]

    for output, code in start(hosts, addresses=advertised, REPLICAX_JOIN_TIMEOUT="5"):
        assert code == 1, output
    require_sum_of_two(start(hosts, addresses=advertised, REPLICAX_BIND_ADDRESS=ADDRESSES[0]))


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK), reason="needs root and tun devices"
)
def test_round_trips_of_an_all_reduce_and_of_reduce():
    tag = uuid.uuid4().hex[:6]
    names = [f"{tag}a", f"{tag}b"]
    command = [sys.executable, str(PROGRAM.with_name("timed.py"))]
    with slow_link(names, ADDRESSES, ROUND_TRIP / 2):
        results = start(names, command)

    for output, code in results:
        assert code == 0, output
        found = dict(re.findall(r"(\w+)=([0-9.]+)", output))
        trips = {name: round(float(seconds) / ROUND_TRIP) for name, seconds in found.items()}
        assert trips == {"plain": 2, "step": 1, "run": 1, "compiled": 1, "reduce": 1}, output


def test_open_mpi_over_two_machines(hosts, tmp_path):
    need("mpirun.openmpi")
    # Open MPI calls it as it would call ssh: HOST COMMAND...
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {hosts[1]} sh -c "$*"\n')
    agent.chmod(0o755)
    command = (
        *("ip", "netns", "exec", hosts[0], "mpirun.openmpi", "--allow-run-as-root"),
        *("--mca", "plm_rsh_agent", str(agent), "--mca", "oob_tcp_if_include", "10.77.0.0/24"),
        *("-H", f"{ADDRESSES[0]}:1,{ADDRESSES[1]}:1", "-np", "2"),
        *("-x", "PYTHONPATH", "-x", "JAX_PLATFORMS", "-x", "REPLICAX_JOIN_TIMEOUT"),
        *PYTHON,
    )

    assert sums(started(command, environment())) == ["2", "2"]
