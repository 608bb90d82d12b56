"""What happens to one worker reaches the others as one error, in time, and nothing stays behind."""

import os
import re
import signal
import time

import pytest

from tests.multi_process.gang import Gang
from tests.multi_process.hosts import can_make_hosts, two_hosts

pytestmark = pytest.mark.multi_process

SOON = 3.0  # seconds for news that travel by a closed connection
LATER = 12.0  # seconds for a worker that must first be missed; the limits are 4 s in these tests

slow = pytest.mark.slow
GONE = [
    pytest.param("killed", "its process was killed, or crashed", SOON),
    pytest.param("terminated", "its process was killed, or crashed", SOON, marks=slow),
    pytest.param("crashed", "its process was killed, or crashed", SOON, marks=slow),
    pytest.param("vanishes", "its process was killed, or crashed", SOON, marks=slow),
    pytest.param("forks and is killed", "its process was killed, or crashed", SOON),
    pytest.param("raises", "it raised ValueError: a wrong turn", SOON),
    pytest.param("interrupted", "it raised KeyboardInterrupt", SOON, marks=slow),
    pytest.param("leaves", "it reached the end of its program", SOON, marks=slow),
    pytest.param("fails", "it reached the end of its program", SOON, marks=slow),
    pytest.param("stopped", "it has not answered for", LATER, marks=slow),
    pytest.param("stuck", "it is alive but stuck", LATER, marks=slow),
    pytest.param("busy", "it is alive but stuck", LATER, marks=slow),
    pytest.param("data-stuck", "it is alive but stuck", LATER, marks=slow),
]


def trained(gang, fault, who, size):
    for index in range(size):
        gang.start(index, fault, who)
    victim = gang.workers[who]
    others = [w for w in gang.workers if w is not victim]
    gang.wait(*others, seconds=90)
    return victim, others


@pytest.mark.parametrize(("fault", "cause", "limit"), GONE)
@pytest.mark.parametrize(
    ("size", "who"), [(2, 1), pytest.param(3, 0, marks=slow)], ids=["a worker", "the chief"]
)
def test_the_others_say_which_worker_is_gone_and_why(tmp_path, fault, cause, limit, size, who):
    with Gang(tmp_path, size) as gang:
        victim, others = trained(gang, fault, who, size)

        for worker in others:
            assert worker.code == 1
            assert worker.error.startswith(f"WorkerLostError: Worker {who} (")
            assert gang.addresses[who] in worker.error
            assert f"pid {victim.process.pid}" in worker.error
            assert "at collective" in worker.error
            assert cause in worker.error
            assert worker.moment("NOTICED") - victim.moment("FAULT") < limit
        if fault == "stopped":
            os.killpg(victim.process.pid, signal.SIGKILL)
        gang.wait(victim, seconds=15)
        assert gang.is_gone()


@slow
@pytest.mark.parametrize(("size", "who"), [(2, 1), (3, 0)], ids=["a worker", "the chief"])
def test_input_that_raises_on_one_worker_is_told_to_all(tmp_path, size, who):
    with Gang(tmp_path, size) as gang:
        trained(gang, "data-raises", who, size)
        gang.wait(seconds=30)

        for index, worker in enumerate(gang.workers):
            assert worker.code == 1
            assert "ValueError: the disk is full of holes" in worker.text
            if index != who:  # the second, if that worker has ended before this one hears of it
                told = (f"The input of worker {who} failed", f"WorkerLostError: Worker {who} (")
                assert any(words in worker.error for words in told)
                assert "ValueError: the disk is full of holes" in worker.error
        assert gang.is_gone()


def test_workers_that_end_together_leave_nothing(tmp_path):
    with Gang(tmp_path, 2) as gang:
        for index in range(2):
            gang.start(index, "none", 0)
        gang.wait(seconds=90)

        assert [w.code for w in gang.workers] == [0, 0]
        assert gang.is_gone()


def test_a_forked_child_that_exits_disturbs_nobody(tmp_path):
    with Gang(tmp_path, 2) as gang:
        for index in range(2):
            gang.start(index, "forks", 1)
        gang.wait(seconds=90)

        assert [w.code for w in gang.workers] == [0, 0]


def test_all_workers_say_that_the_process_of_jax_s_service_is_gone(tmp_path):
    with Gang(tmp_path, 2) as gang:
        for index in range(2):
            gang.start(index, "keeper killed", 1)
        gang.wait(seconds=90)

        for worker in gang.workers:
            assert worker.code == 1
            # As an error, or where the collective does not come back from Gloo, in its place.
            assert "The process that runs JAX's coordination service" in worker.text
            assert "is gone: it was killed, or crashed" in worker.text
        assert gang.is_gone()


@slow
def test_a_stuck_worker_shows_its_stack_and_ends(tmp_path):
    with Gang(tmp_path, 2) as gang:
        victim, _ = trained(gang, "stuck", 1, 2)
        gang.wait(victim, seconds=15)

        assert victim.code == 1
        assert "in happen" in victim.text
        assert "time.sleep(1000)" in victim.text
        assert "this process ends, as the others gave this worker up" in victim.text


@slow
def test_a_worker_that_was_stopped_and_continues_finds_out(tmp_path):
    with Gang(tmp_path, 2) as gang:
        victim, _ = trained(gang, "stopped", 1, 2)
        os.killpg(victim.process.pid, signal.SIGCONT)
        gang.wait(victim, seconds=30)

        assert victim.code == 1
        assert "has not answered" in victim.text or "coordinator" in victim.text


@slow
def test_a_worker_that_is_slow_is_not_given_up(tmp_path):
    with Gang(tmp_path, 2, REPLICAX_STEP_TIMEOUT="6", REPLICAX_PING_TIMEOUT="6") as gang:
        for index in range(2):
            gang.start(index, "none", 0)
        victim = gang.workers[1]
        while victim.process.poll() is None:
            os.killpg(victim.process.pid, signal.SIGSTOP)
            time.sleep(0.5)
            os.killpg(victim.process.pid, signal.SIGCONT)
            time.sleep(0.5)
        gang.wait(seconds=120)

        assert [w.code for w in gang.workers] == [0, 0]


@slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("fault", "cause", "limit"),
    [("hub killed", "is gone", SOON), ("hub stopped", "has not answered for 4 s", LATER)],
)
def test_all_workers_say_that_the_coordinator_is_gone(tmp_path, fault, cause, limit, size):
    with Gang(tmp_path, size) as gang:
        victim, others = trained(gang, fault, 1, size)
        gang.wait(victim, seconds=15)

        for worker in (*others, victim):
            assert worker.code == 1
            assert worker.error.startswith("WorkerLostError: The coordinator of all workers (pid ")
            assert gang.addresses[0] in worker.error
            assert cause in worker.error
            assert worker.moment("NOTICED") - victim.moment("FAULT") < limit
        if fault == "hub stopped":
            os.kill(int(re.search(r"pid (\d+)", victim.error)[1]), signal.SIGCONT)
        assert gang.is_gone(seconds=20)


@slow
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces cannot be made here")
def test_both_sides_of_a_broken_network_find_out(tmp_path):
    with two_hosts() as hosts, Gang(tmp_path, 3, hosts=hosts[:1] + hosts[1:] * 2) as gang:
        for index in range(3):
            gang.start(index, "none", 0, 1000)
        while not all(w.moment("WELL") for w in gang.workers):
            time.sleep(0.1)
        hosts[1].cut()
        began = time.monotonic()
        gang.wait(seconds=60)

        assert time.monotonic() - began < LATER
        assert [w.code for w in gang.workers] == [1, 1, 1]
        here, *there = gang.workers
        assert "it has not answered for 4 s" in here.error
        for worker in there:
            assert "The coordinator of all workers" in worker.error
            assert "the network between here and there is down" in worker.error


@slow
@pytest.mark.parametrize("size", [2, 3])
def test_workers_that_do_different_things_are_told_which(tmp_path, size):
    with Gang(tmp_path, size) as gang:
        victim, others = trained(gang, "other", 1, size)
        gang.wait(victim, seconds=30)

        for worker in (*others, victim):
            assert worker.code != 0
            assert "The workers run different programs. As collective" in worker.text
            assert gang.addresses[1] in worker.text
            assert "sum of float32[3]" in worker.text or "the next batch" in worker.text
        assert gang.is_gone()


@pytest.mark.parametrize(
    "delay", [0.0, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.0013, 0.0047, 0.011))]
)
def test_ctrl_c_leaves_every_worker_with_whole_variables(tmp_path, delay):
    with Gang(tmp_path, 2) as gang:
        for index in range(2):
            gang.start(index, program="interrupted")
        deadline = time.monotonic() + 60
        while not all("trains" in w.text for w in gang.workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(delay)
        for worker in gang.workers:
            worker.process.send_signal(signal.SIGINT)
        for worker in gang.wait(seconds=60):
            assert "whole True" in worker.text, worker.text
