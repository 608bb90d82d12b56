"""Checkpoints behind a URL: a commit is visible only when it is whole, whatever happens."""

import json
import re
from contextlib import ExitStack

import numpy as np
import pytest

import replicax as rx
from replicax._src.train import object_store
from tests.object_store import Killed, Store, faulty, new_process, store

__all__ = ["store"]
FOLDER = "memory://bucket/run"


class Run:
    """One process of a run: a value that is the number of its step, and a manager."""

    def __init__(self, keep=2):
        self.v = rx.Variable(np.zeros(3, np.float32))
        self.manager = rx.train.CheckpointManager(rx.train.Checkpoint(v=self.v), FOLDER, keep)
        self.restored = self.manager.restore_or_initialize()

    def step(self, number):
        self.v.assign(np.full(3, number, np.float32))
        return self.manager.save(checkpoint_number=number)


def kill_at(when):
    def act(number, work):
        if number >= when:
            raise Killed
        return work()

    return act


def fail_at(when):
    """One request is refused, as with a 503 that was retried in vain."""

    def act(number, work):
        if number == when:
            raise OSError("503 Slow Down")
        return work()

    return act


def lose_answer_at(when):
    """One request is carried out, and its answer is lost."""

    def act(number, work):
        result = work()
        if number == when:
            raise OSError("the connection was reset")
        return result

    return act


def whole_steps():
    """The steps whose checkpoints can be restored, each to its own value."""
    state = rx.train.get_checkpoint_state(FOLDER)
    found = []
    for path in [] if state is None else state.all_model_checkpoint_paths:
        v = rx.Variable(np.zeros(3, np.float32))
        rx.train.Checkpoint(v=v).restore(path).assert_existing_objects_matched()
        step = int(path.rpartition("-")[2])
        assert v.numpy().tolist() == [step] * 3
        found.append(step)
    return found


def unreachable(names):
    """Objects that no manifest leads to, besides the index and the claims."""
    reached = {"/bucket/run/checkpoint-index.json"}
    for name in names:
        if name.endswith("/checkpoint.json"):
            top = name.removesuffix("/checkpoint.json")
            body = json.loads(json.loads(Store.store[name].getvalue())["content"])
            reached |= {name, f"{top}/claim.json"}
            reached |= {f"{top}/{body['folder']}/{file}" for file in body["files"]}
    return names - reached


def writes_of_a_step(store):
    """How many requests the third step makes, which also removes the first checkpoint."""
    run = Run()
    run.step(1), run.step(2)
    with faulty(store, lambda number, work: work()):
        run.step(3)
    count = len(store.requests)
    store.store.clear(), store.pseudo_dirs.clear()
    new_process()
    return count


@pytest.mark.parametrize("act", [kill_at, fail_at, lose_answer_at])
def test_a_save_that_breaks_off_at_any_request_leaves_the_commit_before_it(store, act):
    seen = set()
    for when in range(1, writes_of_a_step(store) + 1):
        run = Run()
        run.step(1), run.step(2)
        with faulty(store, act(when)):
            try:
                run.step(3)
            except (Killed, OSError):
                is_saved = False
            else:
                is_saved = True
        newest = whole_steps()[-1]
        assert newest == 3 if is_saved else newest in (2, 3)
        seen.add(newest)

        new_process()
        again = Run()
        assert again.restored == f"{FOLDER}/ckpt-{newest}"
        assert again.v.numpy().tolist() == [newest] * 3
        again.step(4)
        assert whole_steps() == [newest, 4]
        assert unreachable(store.names()) == set()
        store.store.clear(), store.pseudo_dirs.clear()
        new_process()

    assert seen == {2, 3}


def train(until, ledger):
    """Train restartably with commits in the store; what each step gave goes into ``ledger``."""
    step, w = rx.Variable(0), rx.Variable(np.ones(3, np.float32))
    batches = iter(rx.data.Dataset.range(100).shuffle(100, seed=1).batch(4).repeat())
    with rx.train.Resumable(FOLDER, every=2, step=step, w=w, batches=batches) as run:
        while int(step) < until:
            w.assign(w * 0.9 + float(next(batches).sum()))
            step.assign_add(1)
            ledger.setdefault(int(step), set()).add(w.numpy().tobytes())
            run.step()


@pytest.mark.parametrize("act", [kill_at, fail_at, lose_answer_at])
def test_a_training_whose_store_fails_again_and_again_ends_as_without_faults(store, act):
    """A sample of the store's faults of `make chaos`, at fixed requests of one process."""
    right, made = {}, {}
    train(12, right)
    store.store.clear(), store.pseudo_dirs.clear()
    new_process()

    train(2, made)
    store.listed = store.names()  # listings stay as they were after the first commit
    broken = 0
    for when in (2, 9, 12, 21):
        new_process()
        try:
            with faulty(store, act(when)):
                train(12, made)
        except (Killed, OSError):
            broken += 1
    new_process()
    train(12, made)

    assert broken == 4
    assert made == right
    store.listed = None
    readable = rx.train.get_checkpoint_state(FOLDER).all_model_checkpoint_paths
    manifests = [name for name in store.names() if name.endswith("/checkpoint.json")]
    assert len(readable) == len(manifests) > 0


def test_a_save_over_the_same_name_that_is_killed_leaves_the_old_value(store):
    v = rx.Variable(1.0)
    checkpoint = rx.train.Checkpoint(v=v)
    checkpoint.write(f"{FOLDER}/best")
    v.assign(2.0)
    with faulty(store, lambda number, work: work()):
        checkpoint.write(f"{FOLDER}/best")
    count = len(store.requests)

    for when in range(1, count + 1):
        v.assign(1.0)
        checkpoint.write(f"{FOLDER}/best")
        v.assign(2.0)
        with faulty(store, kill_at(when)), pytest.raises(Killed):
            checkpoint.write(f"{FOLDER}/best")
        new_process()
        fresh = rx.Variable(0.0)
        other = rx.train.Checkpoint(v=fresh)
        other.read(f"{FOLDER}/best").assert_existing_objects_matched()
        assert float(fresh) in (1.0, 2.0)
        other.write(f"{FOLDER}/best")
        assert unreachable(store.names()) == set()


def test_listings_that_are_late_change_nothing(store):
    run = Run()
    run.step(1)
    store.listed = store.names()  # from now on nothing new is listed, and nothing goes away
    run.step(2), run.step(3)

    assert rx.train.latest_checkpoint(FOLDER) == f"{FOLDER}/ckpt-3"
    assert whole_steps() == [2, 3]
    new_process()
    assert Run().restored == f"{FOLDER}/ckpt-3"


def test_a_store_that_does_not_answer_is_not_an_empty_folder(store, monkeypatch):
    Run().step(1)

    def refuse(self, path, **kwargs):
        raise PermissionError(f"403 Forbidden: {path}")

    monkeypatch.setattr(store, "cat_file", refuse)
    with pytest.raises(PermissionError, match="403"):
        rx.train.latest_checkpoint(FOLDER)
    with pytest.raises(PermissionError, match="403"):
        Run()


def test_a_run_whose_directory_was_taken_over_saves_nothing_more(store):
    old = Run()
    old.step(1)
    new_process()
    Run().step(2)
    new = object_store.RUN
    new_process()  # as the old one, which lives on
    object_store._owned.add(FOLDER)
    before = store.names()

    with pytest.raises(OSError, match=f"took over '{FOLDER}'"):
        old.step(3)
    assert store.names() == before
    assert new != object_store.RUN


def test_two_processes_that_save_one_checkpoint_do_not_both_commit(store):
    a, b = rx.train.Checkpoint(v=rx.Variable(1.0)), rx.train.Checkpoint(v=rx.Variable(2.0))

    def act(number, work):
        result = work()
        if store.requests[-1][1].endswith("small/0") and act.left:
            act.left -= 1
            store.fault = None
            b.write(f"{FOLDER}/best")  # begins later, and ends before
            store.fault = staticmethod(act)
        return result

    act.left = 1
    with faulty(store, act), pytest.raises(OSError, match=r"has begun to save|small/0' is missing"):
        a.write(f"{FOLDER}/best")

    v = rx.Variable(0.0)
    rx.train.Checkpoint(v=v).read(f"{FOLDER}/best")
    assert float(v) == 2.0
    assert unreachable(store.names()) == set()


def test_large_and_small_arrays_are_read_in_parts(store):
    large = rx.Variable(np.arange(6 << 20, dtype=np.float32))
    small = [rx.Variable(np.full(8001, i, np.float32)) for i in range(200)]
    path = rx.train.Checkpoint(large=large, small=small).save(f"{FOLDER}/ckpt")
    fresh = rx.Variable(np.zeros(6 << 20, np.float32))
    others = [rx.Variable(np.zeros(8001, np.float32)) for _ in small]

    rx.train.Checkpoint(large=fresh, small=others).restore(path).assert_consumed()

    np.testing.assert_array_equal(fresh.numpy(), large.numpy())
    for a, b in zip(small, others, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("how", ["missing", "cut off", "changed"])
def test_a_damaged_object_is_named_and_passed_over(store, how, caplog):
    run = Run()
    run.step(1), run.step(2)
    (name,) = (n for n in store.names() if re.search(r"ckpt-2/data-.*small/0$", n))
    data = store.store[name].getvalue()
    if how == "missing":
        del store.store[name]
    else:
        new = data[:-1] if how == "cut off" else data[:-1] + b"?"
        fs = store(skip_instance_cache=True)
        fs.pipe_file(name, new)

    with pytest.raises(rx.errors.DataLossError, match="small/0"):
        rx.train.Checkpoint(v=rx.Variable(np.zeros(3, np.float32))).restore(f"{FOLDER}/ckpt-2")
    assert Run().restored == f"{FOLDER}/ckpt-1"


def test_a_checkpoint_can_be_copied_to_a_local_folder_and_back(store, tmp_path):
    v = rx.Variable([1.0, 2.0])
    path = rx.train.Checkpoint(v=v).write(f"{FOLDER}/best")
    fs = store(skip_instance_cache=True)
    fs.get("/bucket/run/best", str(tmp_path / "best"), recursive=True)
    local = rx.Variable([0.0, 0.0])
    rx.train.Checkpoint(v=local).read(str(tmp_path / "best")).assert_consumed()
    assert local.numpy().tolist() == [1.0, 2.0]

    saved = rx.train.Checkpoint(v=v).write(str(tmp_path / "local"))
    fs.put(saved, "/bucket/other/", recursive=True)
    back = rx.Variable([0.0, 0.0])
    rx.train.Checkpoint(v=back).read("memory://bucket/other/local").assert_consumed()
    assert back.numpy().tolist() == [1.0, 2.0]
    assert rx.train.latest_checkpoint("memory://bucket/other") == "memory://bucket/other/local"
    assert rx.train.list_variables(path)


def test_checkpoints_of_other_places_are_refused(store):
    checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
    with pytest.raises(OSError, match="names a bucket"):
        checkpoint.save("memory://bucket")
    with pytest.raises(OSError, match="not written to the file system 'ftp'"):
        checkpoint.save("ftp://host/run/ckpt")


def test_numbers_of_workers_that_do_not_share_the_store_are_not_mixed(store):
    """What one process claims, a process with another memory does not see."""
    at = object_store.Objects(f"{FOLDER}/ckpt-1")
    folder = at.begin(ExitStack())
    assert at.sees(folder)
    store.store.clear()
    assert not at.sees(folder)


def test_a_save_whose_claim_was_replaced_does_not_commit(store):
    path = f"{FOLDER}/best"
    rx.train.Checkpoint(v=rx.Variable(1.0)).write(path)

    def act(number, work):
        result = work()
        if store.requests[-1][1].endswith("small/0"):
            store.fault = None
            object_store.Objects(path).begin(ExitStack())  # of another process
        return result

    with faulty(store, act), pytest.raises(OSError, match="has begun to save"):
        rx.train.Checkpoint(v=rx.Variable(2.0)).write(path)
    v = rx.Variable(0.0)
    rx.train.Checkpoint(v=v).read(path)
    assert float(v) == 1.0


def test_a_save_in_progress_is_not_removed_by_a_manager_of_the_same_process(store):
    def act(number, work):
        result = work()
        if store.requests[-1][1].endswith("small/0"):
            store.fault = None
            Run().step(2)  # takes the directory
        return result

    with faulty(store, act):
        rx.train.Checkpoint(v=rx.Variable(1.0)).write(f"{FOLDER}/ckpt-1")

    assert rx.train.latest_checkpoint(FOLDER) == f"{FOLDER}/ckpt-1"
    assert unreachable(store.names()) == set()


def test_a_failed_save_removes_what_a_killed_one_before_it_left(store):
    path, checkpoint = f"{FOLDER}/best", rx.train.Checkpoint(v=rx.Variable(1.0))
    with faulty(store, kill_at(4)), pytest.raises(Killed):
        checkpoint.write(path)
    new_process()
    assert any("/best/data-" in name for name in store.names())

    def refuse(number, work):
        if store.requests[-1][1].endswith("small/0"):
            raise PermissionError("403 Forbidden")
        return work()

    with faulty(store, refuse), pytest.raises(OSError, match="403"):
        checkpoint.write(path)
    assert not any("/best/" in name for name in store.names())
