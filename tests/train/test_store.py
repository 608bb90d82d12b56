"""What can go wrong with checkpoints on disk: each time an error that says so, and no harm."""

import errno
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest

import replicax as rx
from replicax._src.base import fault_points
from replicax._src.train import store
from replicax._src.workers.watchdog import disk
from tests.multi_process import saver
from tests.multi_process.gang import Gang
from tests.multi_process.hosts import LOOPBACK, can_make_hosts

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def saved(path, value=1.0, size=5):
    v = rx.Variable(jnp.full(size, value))
    return v, rx.train.Checkpoint(v=v).write(path)


def value_at(path):
    return float(rx.train.load_checkpoint(path).get_tensor("v" + SUFFIX)[-1])


def mounted(folder, options):
    """A file system of memory at ``folder``, if this process may make one."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"may not mount a file system: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    mounted(folder, "size=2m")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_a_full_disk_is_told_and_the_checkpoint_before_stays(small_disk):
    saved(small_disk / "ckpt-1")
    before = sorted(small_disk.rglob("*"))
    with pytest.raises(OSError, match=r"No space left.*as they were.*Make room") as caught:
        saved(small_disk / "ckpt-2", 2.0, size=1_000_000)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):  # nor in the place of the first
        saved(small_disk / "ckpt-1", 3.0, size=1_000_000)

    assert sorted(small_disk.rglob("*")) == before
    assert value_at(small_disk) == 1.0
    saved(small_disk / "ckpt-2", 4.0)  # goes on when there is room
    assert value_at(small_disk) == 4.0


def test_a_disk_that_cannot_be_written_is_reported(tmp_path):
    folder = tmp_path / "disk"
    mounted(folder, "ro")
    try:
        with pytest.raises(OSError, match="Read-only file system") as caught:
            saved(folder / "ckpt")
        assert caught.value.errno == errno.EROFS
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_a_file_in_the_place_of_a_folder_is_reported(tmp_path):
    (tmp_path / "run").write_text("notes")
    with pytest.raises(NotADirectoryError, match=r"run/ckpt' could not be written"):
        saved(tmp_path / "run" / "ckpt")
    with pytest.raises(NotADirectoryError, match=r"run' could not be written"):
        saved(tmp_path / "run")
    m = rx.train.CheckpointManager(rx.train.Checkpoint(v=rx.Variable(0)), tmp_path / "run", 1)
    with pytest.raises(OSError, match="could not be written"):
        m.save()
    assert (tmp_path / "run").read_text() == "notes"


def test_a_write_that_fails_in_the_middle_leaves_nothing(tmp_path):
    saved(tmp_path / "ckpt-1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        with pytest.raises(OSError, match=r"File too large.*as they were"):
            saved(tmp_path / "ckpt-2", size=1 << 21)
        with pytest.raises(OSError, match="File too large"):  # what is large has its own file
            saved(tmp_path / "ckpt-1", 2.0, size=1 << 23)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-1"]
    assert value_at(tmp_path / "ckpt-1") == 1.0


def test_a_commit_that_cannot_be_told_is_not_undone(tmp_path, monkeypatch):
    """After the one step that makes a checkpoint whole, nothing may take its arrays away."""
    path = tmp_path / "ckpt"
    saved(path)
    calls = []

    def fails(folder):
        calls.append(folder)
        raise OSError(errno.EIO, "the disk does not answer")

    monkeypatch.setattr(store.checkpoint_files, "sync_folder", fails)
    monkeypatch.setattr(store.checkpoint_files, "sync_tree", lambda place: None)
    with pytest.raises(OSError, match="does not answer"):
        saved(path, 2.0)
    assert calls
    assert value_at(path) == 2.0


FILES = {
    "the manifest": "checkpoint.json",
    "a large array": "data-*/arrays-0/a*/0",
    "its description": "data-*/arrays-0/a*/.zarray",
    "small arrays": "data-*/arrays-0/small/0",
    "what Orbax says": "data-*/arrays-0/_METADATA",
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "ckpt"
    v = rx.Variable(jnp.arange(5 << 20, dtype=jnp.float32))
    rx.train.Checkpoint(v=v, w=rx.Variable(jnp.arange(5.0))).write(path)
    return path


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "longer", "flipped", "zeros"])
@pytest.mark.parametrize("which", FILES)
def test_damage_of_every_kind_of_file_is_named(tmp_path, large, which, how):
    path = tmp_path / "ckpt"
    shutil.copytree(large, path)
    (file,) = path.glob(FILES[which])
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    if how == "missing":
        file.unlink()
    elif how == "flipped":
        data[middle] ^= 4
        file.write_bytes(data)
    else:
        new = {
            "empty": b"",
            "cut": data[:middle],
            "longer": data + b"\0",
            "zeros": bytes(len(data)),
        }
        file.write_bytes(new[how])
    v, w = rx.Variable(jnp.zeros(5 << 20)), rx.Variable(jnp.zeros(5))

    # What Orbax says is for Orbax: we read it not, and notice only if it is not there.
    if "array" not in which and which != "the manifest" and how in ("flipped", "zeros"):
        rx.train.Checkpoint(v=v, w=w).read(path).assert_existing_objects_matched()
        assert w.numpy().tolist() == [0, 1, 2, 3, 4]
        return
    if "array" in which or which == "the manifest":
        known = rx.errors.DataLossError, rx.errors.NotFoundError
        with pytest.raises(known, match="ckpt" if which == "the manifest" else file.parent.name):
            rx.train.Checkpoint(v=v, w=w).read(path)
        assert not v.numpy().any()
        assert not w.numpy().any()
    if how in ("flipped", "zeros") and which != "the manifest":
        return  # seen only by who reads it
    assert rx.train.latest_checkpoint(tmp_path) is None


def rewritten(path, change):
    """Change a manifest as somebody would who means harm: its checksum is right."""
    name = path / "checkpoint.json"
    body = json.loads(json.loads(name.read_text())["content"])
    change(body)
    text = json.dumps(body)
    digest = hashlib.sha256(text.encode()).hexdigest()
    name.write_text(json.dumps({"sha256": digest, "content": text}))


def outside(body):
    entry = body["arrays"]["v" + SUFFIX]
    old = entry["pieces"][0][2]
    entry["pieces"][0][2] = "../../secret"
    body["files"]["../../secret"] = body["files"][old]


def as_objects(body):
    body["arrays"]["v" + SUFFIX]["dtype"] = "object"


def huge(body):
    body["arrays"]["v" + SUFFIX]["shape"] = [1 << 60]


def negative(body):
    body["arrays"]["v" + SUFFIX]["pieces"][0][3] = -4


def elsewhere(body):
    body["folder"] = "../data-0123456789abcdef"


def newer(body):
    body["format"] = 4


@pytest.mark.parametrize("change", [outside, as_objects, huge, negative, elsewhere, newer])
def test_a_manifest_that_means_harm_is_refused(tmp_path, change):
    (tmp_path / "secret").write_bytes(bytes(20))
    _, path = saved(tmp_path / "ckpt")
    rewritten(pathlib.Path(path), change)
    with pytest.raises(rx.errors.DataLossError, match=r"checkpoint\.json' is damaged"):
        value_at(path)


@pytest.mark.parametrize("what", ["data-*", "data-*/arrays-0", "data-*/arrays-0/small/0"])
def test_no_link_is_followed_wherever_it_is(tmp_path, what):
    _, path = saved(tmp_path / "ckpt")
    (inner,) = pathlib.Path(path).glob(what)
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(rx.errors.DataLossError, match="link"):
        value_at(path)
    saved(path, 2.0)  # replaces what is ours, and not what a link leads to
    assert value_at(path) == 2.0
    assert (tmp_path / "elsewhere").exists()


def test_a_pipe_in_the_place_of_a_file_does_not_make_anyone_wait(tmp_path):
    _, path = saved(tmp_path / "ckpt")
    (inner,) = pathlib.Path(path).glob("data-*/arrays-0/small/0")
    inner.unlink()
    os.mkfifo(inner)
    with pytest.raises(rx.errors.DataLossError, match="not a file"):
        value_at(path)


def test_folders_that_are_no_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_bytes(b"x")
    (tmp_path / "ckpt-7").mkdir()  # the name alone makes none
    (tmp_path / "checkpoint").write_text("my own notes")
    assert rx.train.latest_checkpoint(tmp_path) is None
    with pytest.raises(rx.errors.NotFoundError, match="There is no checkpoint"):
        rx.train.Checkpoint(v=rx.Variable(0)).restore(f"{tmp_path}/photos")
    m = rx.train.CheckpointManager(rx.train.Checkpoint(v=rx.Variable(0)), tmp_path, 1)
    assert m.restore_or_initialize() is None
    m.save()
    m.save()
    names = ["checkpoint", "ckpt-2", "ckpt-7", "photos"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert (tmp_path / "photos" / "1.jpg").read_bytes() == b"x"


OTHER_RUN = """
import sys
import replicax as rx
v = rx.Variable([float(sys.argv[2])] * 5)
checkpoint = rx.train.Checkpoint(v=v)
manager = rx.train.CheckpointManager(checkpoint, sys.argv[1], 2)
try:
    manager.save()
except rx.errors.FailedPreconditionError as error:
    print("refused:", error, flush=True)
else:
    print("saved", flush=True)
sys.stdin.read()
"""


def other_run(folder, value):
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN, str(folder), str(value)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline()


def test_a_second_run_in_one_directory_is_refused_while_the_first_is_there(tmp_path):
    first, told = other_run(tmp_path, 1)
    assert told == "saved\n"
    v = rx.Variable([2.0] * 5)
    m = rx.train.CheckpointManager(rx.train.Checkpoint(v=v), tmp_path, 1)
    with pytest.raises(rx.errors.FailedPreconditionError, match=f"process {first.pid}") as caught:
        m.save()
    assert "a directory of its own" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-1"]
    assert value_at(tmp_path) == 1.0
    assert m.restore_or_initialize() == f"{tmp_path}/ckpt-1"  # who only reads may

    first.kill()
    first.communicate()
    assert m.save() == f"{tmp_path}/ckpt-2"  # the lock died with its owner


def test_a_directory_is_free_again_when_its_managers_are_gone(tmp_path):
    checkpoint = rx.train.Checkpoint(v=rx.Variable([2.0] * 5))
    managers = [rx.train.CheckpointManager(checkpoint, tmp_path, 2) for _ in range(2)]
    for m in managers:  # of one run
        m.save()
    del managers[0], m
    process, told = other_run(tmp_path, 1)
    process.communicate("")
    assert told.startswith("refused: ")
    managers.clear()
    process, told = other_run(tmp_path, 1)
    process.communicate("")
    assert told == "saved\n"


def test_a_save_that_another_one_is_busy_with_is_not_swept_away(tmp_path):
    path = str(tmp_path / "ckpt")
    with store.ExitStack() as stack:
        folder = store.place_of(path).begin(stack)  # another thread or process, in the middle of it
        saved(path)
        assert os.path.isdir(os.path.join(path, folder))
    saved(path, 2.0)  # it has given up
    assert not os.path.isdir(os.path.join(path, folder))
    assert value_at(path) == 2.0


def test_a_run_removes_what_killed_saves_have_left(tmp_path):
    def manager():
        checkpoint = rx.train.Checkpoint(v=rx.Variable([1.0] * 5))
        return rx.train.CheckpointManager(checkpoint, tmp_path, 1)

    run = manager()
    run.save(10)
    fault_points.arm("prune:raise")  # as if killed: nothing is done after it
    try:
        with pytest.raises(ValueError, match="REPLICAX_FAULT"):
            run.save(20)
    finally:
        fault_points.arm("")
    with store.ExitStack() as stack:
        store.place_of(str(tmp_path / "ckpt-30")).begin(stack)
    for name in ("ckpt-1", "ckpt-2", "best-1"):  # not ours, or of another name
        (tmp_path / name).mkdir()
    (tmp_path / "ckpt-2" / "notes").write_text("mine")
    shutil.copytree(tmp_path / "ckpt-30", tmp_path / "best-2")
    with store.ExitStack() as stack:  # somebody is writing it
        folder = store.place_of(str(tmp_path / "ckpt-40")).begin(stack)
        del run
        manager().save(50)
        assert (tmp_path / "ckpt-40" / folder).is_dir()

    names = ["best-1", "best-2", "ckpt-1", "ckpt-2", "ckpt-40", "ckpt-50"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert (tmp_path / "ckpt-2" / "notes").read_text() == "mine"


def test_a_checkpoint_of_another_run_that_is_replaced_is_named(tmp_path, caplog):
    process, _ = other_run(tmp_path, 1)
    process.communicate("")
    saved(tmp_path / "ckpt-1", 2.0)
    assert "ckpt-1', which another run saved at 20" in caplog.text
    caplog.clear()
    saved(tmp_path / "ckpt-1", 3.0)
    assert not caplog.text
    assert value_at(tmp_path) == 3.0


def test_a_checkpoint_that_was_removed_does_no_harm(tmp_path):
    m = rx.train.CheckpointManager(rx.train.Checkpoint(v=rx.Variable(0)), tmp_path, 1)
    m.save()
    shutil.rmtree(tmp_path / "ckpt-1")
    m.save()
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-2"]


def check_newest(folder, told):
    """See that the newest checkpoint is whole, and no older than what was said to be saved."""
    newest = rx.train.load_checkpoint(folder)
    count = int(newest.get_tensor("n" + SUFFIX))
    assert count >= max(map(int, re.findall(r"^saved (\d+)$", told, re.MULTILINE)))
    for i in range(4):
        assert (newest.get_tensor(f"v/{i}{SUFFIX}") == count).all()
    # Two, one that was to go, one that was not whole.
    assert len(list(folder.iterdir())) <= 4


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_save_that_is_killed_harms_no_checkpoint(tmp_path, kills):
    chance = random.Random(3)
    for _ in range(kills):
        command = [sys.executable, saver.__file__, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        told = process.stdout.readline()
        time.sleep(chance.random() * 0.1)
        process.kill()
        check_newest(tmp_path, told + process.communicate()[0])


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.parametrize("kills", [6])
def test_a_worker_that_is_killed_while_all_save_harms_no_checkpoint(tmp_path, kills):
    chance, folder = random.Random(5), tmp_path / "run"
    for number in range(kills):
        with Gang(tmp_path, 2) as gang:
            for index in range(2):
                gang.start(index, folder, "several", program="saver")
            deadline = time.monotonic() + 60
            while "saved" not in gang.workers[0].text and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(chance.random() * 0.2)
            gang.workers[number % 2].process.kill()
            workers = gang.wait(seconds=60)
        check_newest(folder, workers[0].text)
        assert "WorkerLostError" in workers[1 - number % 2].text


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("point", "who", "what"),
    [
        ("commit-write", 1, "writing checkpoint '{folder}/ckpt-2'"),
        pytest.param(
            "prune", 0, "removing the old checkpoint '{folder}/ckpt-", marks=pytest.mark.slow
        ),
    ],
)
def test_a_disk_that_hangs_in_a_save_is_found_and_named(tmp_path, point, who, what):
    folder = tmp_path / "run"
    with Gang(tmp_path, 2, REPLICAX_DISK_TIMEOUT="6", REPLICAX_STEP_TIMEOUT="60") as gang:
        for index in range(2):
            fault = {"REPLICAX_FAULT": f"{point}:hang@2"} if index == who else {}
            gang.start(index, folder, "several", program="saver", **fault)
        workers = gang.wait(seconds=90)

        assert [w.code for w in workers] == [1, 1]
        assert workers[1 - who].error.startswith(f"WorkerLostError: Worker {who} (")
        assert f"it is {what.format(folder=folder)}" in workers[1 - who].error
        assert "and has made no progress for 6 s" in workers[1 - who].error
        assert "and has made no progress for 6 s" in workers[who].text
        assert "time.sleep(10**6)" in workers[who].text  # where it hangs
        if point == "commit-write":
            assert "This worker was waiting for all others to save" in workers[0].text
        assert gang.is_gone()
    check_newest(folder, workers[0].text)


def test_a_disk_that_hangs_under_one_process_is_found_and_does_not_keep_it(tmp_path):
    command = [sys.executable, saver.__file__, str(tmp_path)]
    environment = {"REPLICAX_FAULT": "commit-write:hang@3", "REPLICAX_DISK_TIMEOUT": "6"}
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 1
    assert f"TimeoutError: This process is writing checkpoint '{tmp_path}/ckpt-3'" in done.stderr
    check_newest(tmp_path, done.stdout)


def test_a_save_that_waits_for_the_devices_is_not_taken_for_a_disk_that_hangs(
    tmp_path, monkeypatch
):
    doing, packed = [], store.packed

    def patiently(*arguments):  # as where a step of half an hour is still being computed
        doing.append(disk.status()[0])
        disk.moved_at -= 2_000
        time.sleep(1.5)
        return packed(*arguments)

    monkeypatch.setattr(store, "packed", patiently)
    _, path = saved(tmp_path / "c", 7.0)

    assert value_at(path) == 7.0
    assert doing == [""]


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("then", "why"),
    [
        pytest.param(signal.SIGKILL, "it was killed, or crashed", id="killed"),
        pytest.param(0, "it had not answered for 4 s", id="stopped", marks=pytest.mark.slow),
    ],
)
def test_workers_that_save_when_jax_s_service_ends_say_so_and_end(tmp_path, then, why):
    with Gang(tmp_path, 2) as gang:
        for index in range(2):
            gang.start(index, tmp_path / "run", "several", program="saver")
        deadline = time.monotonic() + 60
        while "saved" not in gang.workers[0].text and time.monotonic() < deadline:
            time.sleep(0.01)
        (hub,) = children(gang.workers[0].process.pid)
        (keeper,) = children(hub)
        os.kill(keeper, signal.SIGSTOP)  # so that both are in a save when it ends
        time.sleep(1.0)
        os.kill(keeper, then)

        for worker in gang.wait(seconds=60):
            assert worker.code == 1
            assert "WorkerLostError: The process that runs JAX's coordination" in worker.text
            assert why in worker.text
        assert gang.is_gone()


def children(pid):
    lists = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for found in lists for child in found.read_text().split()]


@pytest.mark.parametrize(
    ("version", "file"), [(1, "data-*/arrays/a0/0.0"), (2, "data-*/arrays-0/small/0")]
)
def test_checkpoints_of_earlier_formats_are_read(tmp_path, version, file):
    w, b = rx.Variable(jnp.zeros((2, 3))), rx.Variable(jnp.zeros(2, jnp.bfloat16))
    n, key = rx.Variable(0), rx.Variable(jax.random.key(0))
    objects = {"w": w, "b": b, "n": n, "key": key, "empty": rx.Variable(jnp.zeros((0, 2)))}
    folder = tmp_path / "old"
    shutil.copytree(GOLDEN / f"checkpoint_format_{version}", folder)
    rx.train.Checkpoint(**objects).restore(folder).assert_consumed()
    assert w.numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert b.numpy().tolist() == [1.5, -2.0]
    assert int(n) == 7
    assert jax.random.uniform(key.read_value()) == jax.random.uniform(jax.random.key(3))

    (file,) = folder.glob(file)
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(rx.errors.DataLossError, match="damaged"):
        rx.train.load_checkpoint(folder).get_tensor("w" + SUFFIX)


def test_orbax_reads_what_it_wrote(large):
    (place,) = large.glob("data-*/arrays-0")
    found = orbax.checkpoint.PyTreeCheckpointer().restore(place)
    (array,) = [x for name, x in found.items() if name != "small"]
    np.testing.assert_array_equal(array, np.arange(5 << 20, dtype="f4"))
    assert np.arange(5.0, dtype="f4").tobytes() in np.asarray(found["small"]).tobytes()


@pytest.mark.slow
@pytest.mark.multi_process
@pytest.mark.skipif(not can_make_hosts(), reason="namespaces cannot be made here")
def test_folder_that_a_worker_does_not_see_is_told_at_the_first_save(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    mount = f'mount -t tmpfs none {folder} && exec "$@"'
    elsewhere = replace(LOOPBACK, enter=["unshare", "--mount", "sh", "-c", mount, "sh"])
    with Gang(tmp_path, 2, hosts=[LOOPBACK, elsewhere], TRAINEE_EVERY="1") as gang:
        for index in range(2):
            gang.start(index, folder, 3, "several", program="trainee")
        workers = gang.wait(seconds=120)

    assert [worker.code for worker in workers] == [0, 0]
    for worker in workers:
        assert worker.text.count("does not see that folder, and cannot restore") == 1
