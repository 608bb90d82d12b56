import pathlib
import time

import pytest

import replicax as rx
from replicax._src.base.fault_points import arm
from replicax._src.train import checkpoint_files


def manager(folder, v, **options):
    return rx.train.CheckpointManager(rx.train.Checkpoint(v=v), str(folder), **options)


def names(paths):
    return [pathlib.Path(p).name for p in paths]


def test_only_the_newest_are_kept_also_from_earlier_runs(tmp_path):
    v = rx.Variable(0)
    first = manager(tmp_path, v, max_to_keep=3)
    for _ in range(2):
        first.save()
    second = manager(tmp_path, v, max_to_keep=3)
    second.restore_or_initialize()
    for _ in range(3):
        second.save()

    assert names(second.checkpoints) == ["ckpt-3", "ckpt-4", "ckpt-5"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt-3", "ckpt-4", "ckpt-5"]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_back_makes_no_checkpoint_old(tmp_path, monkeypatch, hours):
    v, now = rx.Variable(0), time.time_ns
    for run in range(3):  # the second has another clock than the others
        wrong = hours * 3600 * 10**9 if run == 1 else 0
        monkeypatch.setattr(time, "time_ns", lambda wrong=wrong: now() + wrong)
        monkeypatch.setattr(checkpoint_files, "_newest", {})  # as in a new process
        mine = manager(tmp_path, v, max_to_keep=3)
        assert mine.restore_or_initialize() == (f"{tmp_path}/ckpt-{2 * run}" if run else None)
        assert int(v) == 2 * run
        for _ in range(2):
            v.assign_add(1)
            mine.save()

    assert rx.train.latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-6"


def test_steps_between_two_saves_are_counted(tmp_path):
    step = rx.Variable(0)
    m = manager(tmp_path, step, max_to_keep=None, step_counter=step, checkpoint_interval=3)
    saved = []
    for _ in range(8):
        step.assign_add(1)
        saved.append(m.save() is not None)
    assert saved == [True, False, False, True, False, False, True, False]
    assert m.save(check_interval=False) is not None


def test_one_is_kept_forever_every_so_many_hours(tmp_path):
    m = manager(tmp_path, rx.Variable(0), max_to_keep=1, keep_checkpoint_every_n_hours=0)
    for _ in range(3):
        m.save()
    assert len(list(tmp_path.iterdir())) == 3
    assert names(m.checkpoints) == ["ckpt-3"]


def test_a_number_can_be_given(tmp_path):
    m = manager(tmp_path, rx.Variable(0), max_to_keep=2, checkpoint_name="model")
    assert m.save(checkpoint_number=70) == f"{tmp_path}/model-70"
    assert m.latest_checkpoint == f"{tmp_path}/model-70"


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_restored(tmp_path, caplog):
    v = rx.Variable(1)
    m = manager(tmp_path, v, max_to_keep=None)
    m.save()
    v.assign(2)
    m.save()
    inside = next(p for p in (tmp_path / "ckpt-2").rglob("*") if p.name == "0")
    inside.write_bytes(bytes(inside.stat().st_size))

    v.assign(0)
    assert manager(tmp_path, v, max_to_keep=None).restore_or_initialize() == f"{tmp_path}/ckpt-1"

    assert int(v) == 1
    assert "ckpt-2" in caplog.text


def test_a_save_that_was_cut_short_is_not_a_checkpoint(tmp_path):
    v = rx.Variable(1)
    m = manager(tmp_path, v, max_to_keep=None)
    m.save()
    v.assign(2)
    path = pathlib.Path(m.save())
    (path / "checkpoint.json").unlink()  # what comes last did not come

    assert rx.train.latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-1"
    again = manager(tmp_path, v, max_to_keep=None)
    again.restore_or_initialize()
    assert int(v) == 1
    assert again.save() == f"{tmp_path}/ckpt-2"  # in its place
    assert rx.train.latest_checkpoint(tmp_path) == f"{tmp_path}/ckpt-2"


def test_without_a_checkpoint_the_initial_function_is_called(tmp_path):
    v = rx.Variable(0)
    m = manager(tmp_path, v, max_to_keep=1, init_fn=lambda: v.assign(5))
    assert m.restore_or_initialize() is None
    assert int(v) == 5


def test_nothing_is_removed_before_its_successor_is_on_disk(tmp_path):
    v = rx.Variable(0)
    m = manager(tmp_path, v, max_to_keep=1)
    for i in range(4):
        v.assign(i)
        m.save(block=False)
        found = rx.train.latest_checkpoint(tmp_path)
        assert i == 0 or found is not None
    m.sync()
    assert names(m.checkpoints) == ["ckpt-4"]
    assert [p.name for p in tmp_path.iterdir()] == ["ckpt-4"]


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("point", ["commit-begin", "commit-write", "commit-manifest"])
def test_a_save_that_failed_takes_nobody_s_place(tmp_path, block, point):
    def in_folder():
        return sorted(p.name for p in tmp_path.iterdir())

    v = rx.Variable(0)
    m = manager(tmp_path, v, max_to_keep=2)
    for _ in range(2):
        m.save()
    arm(f"{point}:full@1")
    try:
        with pytest.raises(OSError, match="could not be written"):
            m.save(block=block), m.sync()
    finally:
        arm("")
    m.sync()

    assert names(m.checkpoints) == in_folder() == ["ckpt-1", "ckpt-2"]

    m.save(block=block)
    m.sync()
    assert names(m.checkpoints) == in_folder() == ["ckpt-2", "ckpt-4"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_to_keep": 0}, "max_to_keep"),
        ({"max_to_keep": 1, "checkpoint_interval": 2}, "step_counter"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        manager(tmp_path, rx.Variable(0), **options)
