"""Real clients of S3 and Google Cloud Storage against emulators: SIGKILL, 503s, lost answers.

They run by `make test-stores`, which installs the emulators.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import replicax as rx
from tests.multi_process import saver
from tests.multi_process.gang import ROOT, Gang
from tests.stores.proxy import BUSY, DROP, LOSE, SLOWLY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.stores,
    pytest.mark.filterwarnings("ignore:Sending a large body"),  # of aiohttp about gcsfs
]
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
SECONDS = 600  # a hang, not a busy machine; gcsfs waits for seconds before it repeats a request


def wait_for(check, text=lambda: ""):
    deadline = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < deadline, f"waited {SECONDS} s in vain; {text()}"
        time.sleep(0.02)


def numbers(text):
    return [int(n) for n in re.findall(r"^saved (\d+)$", text, re.MULTILINE)]


def check_newest(folder, told):
    """See that the newest checkpoint is whole, and no older than what was said to be saved."""
    newest = rx.train.load_checkpoint(rx.train.latest_checkpoint(folder))
    count = int(newest.get_tensor("n" + SUFFIX))
    assert count >= max(numbers(told), default=0)
    for i in range(4):
        assert (newest.get_tensor(f"v/{i}{SUFFIX}") == count).all()
    return count


def objects(folder):
    return {f"{top}/{name}" for top, _, files in rx.io.gfile.walk(folder) for name in files}


class Saver:
    """A process that saves without end."""

    def __init__(self, folder, tmp_path, **environment):
        self.output = tmp_path / f"saver{time.time_ns()}.txt"
        with self.output.open("wb") as stream:
            path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
            self.process = subprocess.Popen(
                [sys.executable, saver.__file__, folder],
                env={**os.environ, "PYTHONPATH": path, **environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self):
        return self.output.read_text(errors="replace")

    def wait_until_saved(self, count):
        wait_for(
            lambda: len(numbers(self.text)) >= count or self.process.poll() is not None,
            lambda: self.text,
        )
        assert self.process.poll() is None, self.text

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# Where a save is killed: a part of the request, which of those, and what becomes of it.
KILLS = [
    ("checkpoint-index.json", 1, DROP),
    ("claim.json", 1, DROP),
    ("arrays-0", 1, DROP),
    ("arrays-0", 4, LOSE),
    ("/checkpoint.json", 1, DROP),
    ("/checkpoint.json", 1, LOSE),
    ("DELETE", 1, LOSE),
    ("DELETE", 3, DROP),
]


def is_write(method, what):
    return method != "GET" and method != "HEAD" and "&select_type" not in what


def test_a_saver_killed_at_any_request_leaves_the_commit_before_it(emulator, tmp_path):
    folder = emulator.fresh()
    told, last = "", 0
    for part, which, fault in KILLS:
        part = "?delete" if part == "DELETE" and emulator.scheme == "s3" else part
        with Saver(folder, tmp_path) as run:
            run.wait_until_saved(3)  # the third has replaced the first
            passed, is_done = itertools.count(1), []

            def rule(
                method,
                what,
                part=part,
                which=which,
                fault=fault,
                run=run,
                hits=passed,
                is_done=is_done,
            ):
                name = what if part != "DELETE" else method
                if is_done or not is_write(method, what) or part not in name.replace("%2F", "/"):
                    return DROP if is_done else None
                if next(hits) < which:
                    return None
                if fault == DROP:
                    os.killpg(run.process.pid, signal.SIGKILL)
                is_done.append(fault)
                return fault

            emulator.proxy.rule = rule
            wait_for(lambda: is_done, lambda: run.text)  # noqa: B023
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
            told = run.text
        emulator.proxy.rule = lambda method, what: None
        assert numbers(told)[0] > last  # it went on from the one before
        last = check_newest(folder, told)
    with Saver(folder, tmp_path) as run:
        run.wait_until_saved(4)
        os.kill(run.process.pid, signal.SIGSTOP)
        # Two, one that is begun, one that is removed: nothing of all those that were killed.
        names = {name.removeprefix(folder).split("/")[1] for name in objects(folder)}
        assert len(names - {"checkpoint-index.json"}) <= 4


@pytest.mark.parametrize("fault", [BUSY, SLOWLY, LOSE])
def test_a_store_that_answers_badly_now_and_then_loses_nothing(emulator, tmp_path, fault):
    folder, requests = emulator.fresh(), itertools.count()
    emulator.proxy.rule = lambda method, what: None if next(requests) % 7 else fault
    with Saver(folder, tmp_path) as run:
        run.wait_until_saved(4)
    emulator.proxy.rule = lambda method, what: None
    check_newest(folder, run.text)


def test_a_store_that_refuses_the_manifest_keeps_the_commit_before_it(emulator):
    folder = emulator.fresh()
    v = rx.Variable(np.full(5, 1.0, np.float32))
    manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=v), folder, max_to_keep=2)
    first = manager.save()
    v.assign(v * 2)

    def rule(method, what):
        is_put = is_write(method, what) and "/checkpoint.json" in what.replace("%2F", "/")
        return BUSY if is_put else None

    emulator.proxy.rule = rule
    with pytest.raises(OSError, match="could not be written") as caught:
        manager.save()
    emulator.proxy.rule = lambda method, what: None
    assert "hunter2" not in str(caught.value)
    assert rx.train.latest_checkpoint(folder) == first
    last = manager.save()
    fresh = rx.Variable(np.zeros(5, np.float32))
    rx.train.Checkpoint(v=fresh).restore(last).assert_existing_objects_matched()
    assert fresh.numpy().tolist() == [2.0] * 5
    assert rx.train.latest_checkpoint(folder) == last


def test_a_store_that_cannot_be_reached_is_not_an_empty_folder(emulator):
    folder = emulator.fresh()
    rx.train.Checkpoint(v=rx.Variable(1.0)).save(f"{folder}/ckpt")
    emulator.proxy.rule = lambda method, what: BUSY
    with pytest.raises(OSError):  # noqa: PT011 - the words are the library's
        rx.train.latest_checkpoint(folder)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_while_all_save_harms_no_checkpoint(emulator, tmp_path, victim):
    folder, last = emulator.fresh(), 0
    part = "/checkpoint.json" if victim == 0 else "arrays-1"
    for fault in (DROP, LOSE):
        with Gang(tmp_path, 2) as gang:
            for index in range(2):
                gang.start(index, folder, "several", program="saver")
            first = gang.workers[0]
            wait_for(
                lambda: len(numbers(first.text)) >= 2 or first.process.poll() is not None,  # noqa: B023
                lambda: first.text,  # noqa: B023
            )
            is_done = []

            def rule(method, what, fault=fault, is_done=is_done, gang=gang):
                name = what.replace("%2F", "/")
                if is_done or not is_write(method, what) or part not in name:
                    return None
                is_done.append(1)
                gang.workers[victim].process.kill()
                return fault

            emulator.proxy.rule = rule
            workers = gang.wait(seconds=SECONDS)
        emulator.proxy.rule = lambda method, what: None
        assert is_done
        assert "WorkerLostError" in workers[1 - victim].text
        assert numbers(workers[0].text)[0] > last
        last = check_newest(folder, workers[0].text)


def test_datasets_and_gfile_with_real_clients(emulator):
    folder = emulator.fresh()
    with rx.io.TFRecordWriter(f"{folder}/a/1.tfrecord") as writer:
        for i in range(1000):
            writer.write(b"%d" % i * 1000)
    rx.io.write_file(f"{folder}/a/b.txt", "one\ntwo")
    names = rx.data.Dataset.list_files(f"{folder}/a/*.tfrecord")
    assert len(list(rx.data.TFRecordDataset(names))) == 1000
    assert list(rx.data.TextLineDataset(f"{folder}/a/b.txt")) == [b"one", b"two"]
    assert sorted(rx.io.gfile.listdir(f"{folder}/a")) == ["1.tfrecord", "b.txt"]
    assert rx.io.gfile.isdir(f"{folder}/a")
    assert not rx.io.gfile.exists(f"{folder}/no")
    rx.io.gfile.rename(f"{folder}/a/b.txt", f"{folder}/c.txt")
    assert rx.io.gfile.stat(f"{folder}/c.txt").length == 7
    data = rx.data.Dataset.range(5)
    assert [int(x) for x in data.cache(f"{folder}/cache")] == [0, 1, 2, 3, 4]
    assert rx.io.gfile.exists(f"{folder}/cache")
    data.save(f"{folder}/saved")
    assert len(list(rx.data.Dataset.load(f"{folder}/saved"))) == 5
    with rx.summary.create_file_writer(f"{folder}/logs").as_default(step=1) as writer:
        rx.summary.scalar("loss", 1.0)
    writer.close()
    assert len(rx.io.gfile.glob(f"{folder}/logs/events*")) == 1
    rx.io.gfile.rmtree(f"{folder}/a")
    assert not rx.io.gfile.exists(f"{folder}/a")


PROGRAM = """
import replicax as rx
writer = rx.summary.create_file_writer("{folder}/logs")
with writer.as_default(step=1):
    rx.summary.scalar("loss", 1.0)
rx.train.Checkpoint(v=rx.Variable(1.0)).save("{folder}/ckpt", block=False)
"""


def test_the_end_of_a_program_sends_what_is_left(emulator):
    folder = emulator.fresh()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert rx.train.latest_checkpoint(folder) == f"{folder}/ckpt-1"
    (events,) = rx.io.gfile.glob(f"{folder}/logs/*")
    assert len(list(rx.data.TFRecordDataset(events))) == 2
