"""Real processes that are told to end, or killed, and started again."""

import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

import replicax as rx
from replicax._src.cluster import requeue
from replicax._src.train import preemption
from replicax._src.train.preemption import Notice
from replicax._src.workers import group
from tests.fresh_process import run_fresh
from tests.multi_process.gang import Gang, left_behind

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 24


def start(folder, pause=0.0):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CONFIG")}
    env |= {"REPLICAX_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu", "TRAINEE_PAUSE": str(pause)}
    env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    command = [
        sys.executable,
        str(ROOT / "tests/multi_process/trainee.py"),
        str(folder),
        str(STEPS),
    ]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def final(text):
    found = re.search(r"^final (.*)$", text, re.MULTILINE)
    return json.loads(found[1]) if found else None


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    process = start(tmp_path_factory.mktemp("whole"))
    text, _ = process.communicate(timeout=120)
    return final(text)


def test_a_run_that_was_told_to_end_continues_bit_for_bit(tmp_path, uninterrupted):
    process = start(tmp_path, pause=0.1)  # told well before its own end
    for line in process.stdout:
        if line.startswith("at 10"):
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)  # twice is once
            break
    process.communicate(timeout=60)
    assert process.returncode == 143
    saved = rx.train.load_checkpoint(tmp_path).get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE")
    assert 10 <= saved < STEPS

    text, _ = start(tmp_path).communicate(timeout=120)

    assert final(text) == uninterrupted


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_at_any_moment_continues_bit_for_bit(tmp_path, uninterrupted, kills):
    chance = random.Random(7)
    for _ in range(kills):
        process = start(tmp_path)
        began = next((line for line in process.stdout if line.startswith("at")), None)
        if began is not None:
            time.sleep(chance.random() * 0.3)
        process.kill()
        process.communicate()

    text, _ = start(tmp_path).communicate(timeout=120)

    assert final(text) == uninterrupted


def told(where, folder, *steps):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CONFIG")}
    env |= {"REPLICAX_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    program = [sys.executable, "-m", "tests.multi_process.told", where, str(folder)]
    return subprocess.Popen(
        [*program, *map(str, steps)], env=env, stdout=subprocess.PIPE, text=True
    )


def saved_at(folder):
    path = rx.train.latest_checkpoint(folder)
    if path is None:
        return 0
    return int(rx.train.load_checkpoint(path).get_tensor("count/.ATTRIBUTES/VARIABLE_VALUE"))


@pytest.mark.parametrize(
    ("where", "commits"),
    [
        ("compile", [1]),  # the step is finished, and saved
        ("save", None),
        ("input", [3]),  # the step cannot be finished: the last commit before it
        ("input in the program itself", [3]),
    ],
)
def test_the_end_is_bounded_and_what_is_saved_is_whole(tmp_path, where, commits):
    process = told(where, tmp_path)
    assert any(line == "now\n" for line in process.stdout)
    process.send_signal(signal.SIGUSR2)  # as submitit
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # twice is once

    process.communicate(timeout=120)

    assert process.returncode == 143
    found = saved_at(tmp_path)
    assert found >= 3 if commits is None else found in commits
    text, _ = told(where, tmp_path, found + 4).communicate(timeout=120)
    steps = found + 4
    assert f"final {steps} {sum(range(steps))} {steps} {steps}" in text  # every step once


@pytest.mark.multi_process
def test_workers_whose_input_does_not_come_end_in_bounded_time(tmp_path):
    folder = tmp_path / "run"
    with Gang(tmp_path, 2, REPLICAX_STEP_TIMEOUT="60") as gang:
        for index in range(2):
            gang.start(index, "input of workers", folder, program="told")
        deadline = time.monotonic() + 120
        while "now" not in gang.workers[1].text and time.monotonic() < deadline:
            time.sleep(0.05)
        gang.workers[1].process.send_signal(signal.SIGTERM)
        codes = [worker.code for worker in gang.wait(seconds=60)]

    assert codes == [143, 143]
    assert saved_at(folder) == 3


@pytest.mark.multi_process
def test_workers_save_at_one_step_when_one_is_told_to_end(tmp_path):
    def run(folder, *, interrupt):
        # So slowly that the workers can agree on an end before they come to their own.
        with Gang(tmp_path, 2, TRAINEE_PAUSE="0.1") as gang:
            for index in range(2):
                gang.start(index, folder, STEPS, "several", program="trainee")
            if interrupt:
                deadline = time.monotonic() + 60
                while "at 10" not in gang.workers[0].text and time.monotonic() < deadline:
                    time.sleep(0.02)
                gang.workers[1].process.send_signal(signal.SIGUSR1)  # as Slurm's --signal
            return [(w.code, final(w.text)) for w in gang.wait(seconds=120)]

    whole = run(tmp_path / "whole", interrupt=False)
    assert [code for code, _ in whole] == [0, 0]
    assert whole[0] == whole[1]

    stopped = run(tmp_path / "cut", interrupt=True)
    assert [code for code, _ in stopped] == [143, 143]
    assert run(tmp_path / "cut", interrupt=False) == whole


def wait_for(text, path, seconds=60):
    """Wait until ``text`` stands in a file."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text(errors="replace")):
        assert time.monotonic() < deadline, path.read_text(errors="replace")
        time.sleep(0.02)


def step_saved(folder):
    path = rx.train.latest_checkpoint(folder)
    found = path and rx.train.load_checkpoint(path).get_tensor("step/.ATTRIBUTES/VARIABLE_VALUE")
    return 0 if path is None else int(found)


@pytest.mark.multi_process
@pytest.mark.parametrize("how", ["alone", pytest.param("launched", marks=pytest.mark.slow)])
def test_signal_to_all_processes_of_the_job_saves_the_last_step(tmp_path, how):
    # As `scancel` with proctrack/linuxproc, systemd's KillMode=control-group and PBS do.
    mark = f"TEST_JOB={tmp_path}"
    slow = {"TRAINEE_PAUSE": "0.1", "TRAINEE_EVERY": "1000"}
    with Gang(tmp_path, 2, TEST_JOB=str(tmp_path), **slow) as gang:
        gang.start_all(how, tmp_path / "run", 1000, "several", program="trainee")
        wait_for("at 10", gang.workers[0].output)
        job = [pid for pid, _ in left_behind(mark, 0)]
        for pid in job:
            os.kill(pid, signal.SIGTERM)
        codes = {worker.code for worker in gang.wait(seconds=60)}
        assert left_behind(mark) == []

    assert len(job) == {"alone": 4, "launched": 6}[how]  # with hub, keeper; launcher and guard
    assert codes == {143}
    assert step_saved(tmp_path / "run") >= 10


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("fsync", "grace", "ended", "told"),
    [
        # Which of the two it is doing when the grace ends depends on the speed of the machine.
        (
            *(1.0, 60, "launcher"),
            "worker 0 is (saving its last checkpoint|finishing its step before it saves): waiting",
        ),
        pytest.param(1.0, 60, "killed launcher", "", marks=pytest.mark.slow),
        pytest.param(
            *(1e6, 2, "launcher"),
            "was killed by the launcher while it was saving its last checkpoint",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_launcher_waits_for_a_save_within_its_grace(tmp_path, fsync, grace, ended, told):
    mark = f"TEST_JOB={tmp_path}"
    slow = {"TRAINEE_PAUSE": "0.1", "TRAINEE_EVERY": "1000", "REPLICAX_CPU_DEVICES": "2"}
    disk = {"TRAINEE_FSYNC": str(fsync), "TRAINEE_GRACE": str(grace), "TEST_JOB": str(tmp_path)}
    with Gang(tmp_path, 1, **slow, **disk) as gang:
        gang.options = ("--grace", "0.3")
        gang.start_all("launched", tmp_path / "run", 1000, program="trainee")
        launcher = gang.workers[0]
        wait_for("at 10", launcher.output)
        number = signal.SIGKILL if ended == "killed launcher" else signal.SIGTERM
        launcher.process.send_signal(number)
        gang.wait(seconds=60)
        assert left_behind(mark, 30) == []

    assert launcher.code == (-9 if number == signal.SIGKILL else 143)
    assert re.search(told, launcher.text)
    assert (step_saved(tmp_path / "run") >= 10) == (fsync < 10)


OTHERS_HANDLERS = """
    import faulthandler, os, signal
    import replicax as rx

    faulthandler.register(signal.SIGUSR1)  # Python's own table of handlers does not know it
    signal.signal(signal.SIGUSR2, lambda *_: print("mine", flush=True))
    folder = os.environ["FOLDER"]
    step = rx.Variable(0)
    with rx.train.Resumable(folder, every=100, step=step) as run:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
            run.step()
    print("done", flush=True)
"""


def test_signals_that_the_program_handles_stay_its_own(tmp_path):
    done = run_fresh(OTHERS_HANDLERS, FOLDER=str(tmp_path))

    assert done.returncode == 0, done.stderr
    assert done.stdout == "mine\ndone\n"
    assert "most recent call first" in done.stderr  # faulthandler's stacks


@pytest.mark.slow
@pytest.mark.multi_process
def test_launcher_hands_warnings_on_and_does_not_restart(tmp_path):
    slow = {"TRAINEE_PAUSE": "0.1", "TRAINEE_EVERY": "1000"}
    with Gang(tmp_path, 2, **slow) as gang:
        gang.options = ("--max-restarts", "2")
        gang.start_all("launched", tmp_path / "run", 1000, "several", program="trainee")
        launcher = gang.workers[0]
        wait_for("at 10", launcher.output)
        launcher.process.send_signal(signal.SIGUSR1)
        gang.wait(seconds=60)

    assert launcher.code == 143
    assert "restart 1 of" not in launcher.text
    assert step_saved(tmp_path / "run") >= 10


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"REPLICAX_REQUEUE": "yes"}, "REPLICAX_REQUEUE='yes': write 1"),
        ({"REPLICAX_REQUEUE": "1"}, "SLURM_JOB_ID is not set"),
    ],
)
def test_requeue_that_cannot_be_is_refused_at_the_start(given, fault):
    with pytest.raises(rx.errors.ClusterError, match=fault):
        requeue.is_asked(given)


class Table:
    """What the hub does with questions, for workers in one process; answers come late to some."""

    def __init__(self, size):
        self.size, self.offers, self.changed = size, {}, threading.Condition()

    def worker(self, index, delay):
        return Seat(self, index, delay)


class Seat:
    """A worker's side of it: what `Notice` needs of a group."""

    generation = 0  # none is lost

    def __init__(self, table, index, delay):
        self.table, self.index, self.delay = table, index, delay

    def new_ticket(self):
        return 0

    def offer(self, key, value):
        with self.table.changed:
            self.table.offers.setdefault(key, {})[self.index] = value
            self.table.changed.notify_all()

    def exchange(self, key, value, is_cancelled):
        self.offer(key, value)
        offers = self.table.offers[key]
        while not is_cancelled():
            time.sleep(self.delay)
            if len(offers) == self.table.size and not is_cancelled():
                return [offers[i] for i in sorted(offers)]
        if len(offers) < self.table.size:
            self.table.offers[key] = {}  # taken back
        raise group.Cancelled


@pytest.mark.parametrize("delays", [(0.001, 0.05), (0.05, 0.001), (0.05, 0.05)])
@pytest.mark.parametrize("late", [0.0, 0.02, 0.06, 0.2])
def test_a_worker_that_is_through_keeps_no_other_waiting_at_its_last_step(
    monkeypatch, delays, late
):
    table, told = Table(2), threading.Event()
    notices = []
    for index, delay in enumerate(delays):
        monkeypatch.setattr(group, "current", lambda i=index, d=delay: table.worker(i, d))
        notices.append(Notice(told.is_set if index else lambda: False))
    time.sleep(0.3)
    told.set()
    time.sleep(late)
    through = threading.Thread(target=notices[0].close)
    through.start()  # it is past its last step
    answers = []
    last = threading.Thread(
        target=lambda: answers.extend(notices[1].is_due() for _ in range(20)), daemon=True
    )
    time.sleep(0.3)
    last.start()
    last.join(20.0)

    assert len(answers) == 20
    for notice in notices:
        notice.close()
    through.join()


class Handled:
    """A program with TensorFlow's handler; one that is started again if the folder is the same."""

    def __init__(self, folder, **config):
        self.told, self.ended = False, []
        self.count = rx.Variable(0)
        checkpoint = rx.train.Checkpoint(count=self.count)
        self.manager = rx.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        given = {"exit_fn": lambda: self.ended.append(self.handler.total_run_calls), **config}
        watched = rx.train.TerminationConfig(lambda: self.told, **given)
        self.handler = rx.train.PreemptionCheckpointHandler(None, self.manager, None, watched)

    def train(self, steps):
        """As TensorFlow's guide has it: the calls so far say where to begin."""
        for step in range(self.handler.total_run_calls, steps):
            if step == 3 and self.told is False:
                self.told = True
                time.sleep(1.0)  # the handler asks now and then
            self.handler.run(lambda: self.count.assign_add(1))
            if self.ended:
                return


def test_a_handler_counts_on_where_the_run_before_it_was_told_to_end(tmp_path):
    first = Handled(tmp_path)
    first.train(8)
    (saved,) = first.ended
    assert 3 <= saved < 8

    second = Handled(tmp_path)
    assert second.handler.total_run_calls == int(second.count) == saved
    second.told = None  # not again
    second.train(8)
    second.handler.close()

    assert (int(second.count), second.handler.total_run_calls) == (8, 8)
    assert not second.ended


def test_a_checkpoint_that_the_program_saves_knows_the_calls_too(tmp_path):
    first = Handled(tmp_path)
    for _ in range(2):
        first.handler.run(lambda: first.count.assign_add(1))
    with pytest.raises(ZeroDivisionError):
        first.handler.run(lambda: 1 / 0)  # is none
    first.manager.save()
    first.handler.run(lambda: first.count.assign_add(1))
    first.handler.close()  # and is killed here

    second = Handled(tmp_path)
    second.handler.close()
    assert second.handler.total_run_calls == int(second.count) == 2


def test_a_handler_saves_as_it_is_told_to(tmp_path):
    saved = []
    program = Handled(tmp_path, save_fn=lambda *args: saved.append(args))
    program.told = True
    time.sleep(1.0)
    with program.handler.watch_preemption_scope():
        for step in range(3):
            program.handler.save_checkpoint_if_preempted("step", step)
            if program.ended:
                break
    assert len(program.ended) == len(saved) == 1
    assert saved[0][0] == "step"
    assert rx.train.latest_checkpoint(tmp_path) is None


class Full:
    """A manager that cannot write the state for workers that join."""

    def sync(self):
        self.is_synced = True

    def hand_over(self, path):
        raise OSError(28, f"No space left on device: {path}")

    def discard_state(self, path):
        self.discarded = path


class Alone:
    """A group of one worker to which another wants to join."""

    facts = types.SimpleNamespace(index=0, addresses=("127.0.0.1:7000",))
    generation, has_newcomers, holds, least, is_elastic = 0, True, False, 1, True

    def __init__(self):
        self.refusals = []

    def agree(self, what, value):
        return [value]

    def refuse_newcomers(self, why):
        self.refusals.append(why)

    def new_ticket(self):
        return 1

    def exchange(self, key, value, is_cancelled):
        return [value]

    def offer_to_wait(self, *, can_wait):
        pass


def test_newcomer_is_refused_if_the_state_cannot_be_written(monkeypatch, tmp_path):
    alone, manager = Alone(), Full()
    monkeypatch.setattr(group, "_current", [alone])
    monkeypatch.setenv("REPLICAX_LEASES", str(tmp_path))
    monkeypatch.setattr(preemption.start, "regroup", lambda _, __, prepare: prepare() is not None)
    notice = Notice(lambda: False, manager=manager)
    try:
        notice._let_join()  # the run goes on
    finally:
        notice.close()
    assert len(alone.refusals) == 1
    assert "No space left on device" in alone.refusals[0]
    assert manager.is_synced  # a failure of the commit before it is raised
    assert manager.discarded == str(tmp_path / "state-0")
