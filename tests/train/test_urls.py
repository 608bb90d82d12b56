"""Runs that resume, saved models and summaries behind URLs."""

import keras
import numpy as np
import pytest

import replicax as rx
from tests.object_store import new_process, store

__all__ = ["store"]


class StopError(Exception):
    """The machine is taken away."""


def train(folder, stop=None):
    """Sum the numbers of a dataset, which goes on where an earlier call was stopped."""
    total, seen = rx.Variable(0), []
    data = iter(rx.data.Dataset.range(10))
    with rx.train.Resumable(folder, every=2, total=total, data=data) as run:
        for x in data:
            total.assign_add(int(x))
            seen.append(int(x))
            run.step()
            if len(seen) == stop:
                raise StopError
    return int(total), seen


def test_resumable_continues_from_a_url(store):
    with pytest.raises(StopError):
        train("memory://bucket/run", stop=5)
    new_process()
    total, seen = train("memory://bucket/run")
    assert (total, seen[0]) == (45, 4)
    assert rx.train.latest_checkpoint("memory://bucket/run")


def fit(folder, stop_after=None):
    """Train for three epochs, or until the machine is taken away; the weights, and the epochs."""
    keras.utils.set_random_seed(1)
    strategy = rx.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    seen = []

    class Interruption(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.append(epoch)
            if epoch == stop_after:
                raise StopError

    x = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
    backup = keras.callbacks.BackupAndRestore(folder)
    model.fit(x, x[:, :1], batch_size=2, epochs=3, verbose=0, callbacks=[backup, Interruption()])
    return [w.tolist() for w in model.get_weights()], seen


def test_backup_and_restore_continues_from_a_url(store, tmp_path):
    whole, _ = fit(str(tmp_path / "backup"))
    with pytest.raises(StopError):
        fit("memory://bucket/backup", stop_after=2)
    new_process()
    assert rx.train.latest_checkpoint("memory://bucket/backup")
    weights, seen = fit("memory://bucket/backup")
    assert (weights, seen) == (whole, [2])
    assert not rx.io.gfile.exists("memory://bucket/backup")  # as `fit` has ended


def test_checkpoints_iterator_follows_a_url(store):
    checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
    path = checkpoint.save("memory://bucket/run/ckpt")
    found = rx.train.checkpoints_iterator("memory://bucket/run", timeout=0)
    assert list(found) == [path]
    assert rx.train.load_variable("memory://bucket/run", "v/.ATTRIBUTES/VARIABLE_VALUE") == 1.0


def test_saved_model_is_loaded_from_a_url(store):
    class Line:
        def __init__(self):
            self.slope = rx.Variable(3.0)

        @rx.function(input_signature=[rx.TensorSpec([None], "float32")])
        def __call__(self, x):
            return self.slope * x

    rx.saved_model.save(Line(), "memory://bucket/model")
    assert rx.saved_model.contains_saved_model("memory://bucket/model")
    assert not rx.saved_model.contains_saved_model("memory://bucket")
    loaded = rx.saved_model.load("memory://bucket/model")
    np.testing.assert_allclose(loaded(np.arange(3, dtype=np.float32)), [0, 3, 6])


def events(store):
    """The steps in all event files, in their order."""
    names = sorted(n for n in store.names() if "tfevents" in n)
    files = [f"memory://{n.lstrip('/')}" for n in names]
    return [len(list(rx.data.TFRecordDataset(file))) - 1 for file in files]  # without the header


def test_summaries_are_sent_when_they_are_flushed(store):
    writer = rx.summary.create_file_writer("memory://bucket/logs")
    for step in range(30):
        with writer.as_default(step=step):
            rx.summary.scalar("loss", 1.0)
    assert [r for r in store.requests if "tfevents" in r[1]] == []  # not one request a step
    writer.flush()
    assert events(store) == [30]
    with writer.as_default(step=30):
        rx.summary.scalar("loss", 1.0)
    writer.close()
    assert events(store) == [31]


def test_a_long_event_file_is_continued_in_another(store, monkeypatch):
    monkeypatch.setattr("replicax._src.summary.writer._LARGEST_OBJECT", 1000)
    writer = rx.summary.create_file_writer("memory://bucket/logs")
    with writer.as_default():
        for step in range(40):
            rx.summary.scalar("loss", 1.0, step=step)
            writer.flush()
    writer.close()
    assert len(events(store)) > 1
    assert sum(events(store)) == 40
    assert max(len(store.store[n].getvalue()) for n in store.names()) < 1200


def test_late_summaries_are_sent_at_the_end_of_a_block(store):
    writer = rx.summary.create_file_writer("memory://bucket/logs", flush_millis=0)
    with writer.as_default(step=1):
        rx.summary.scalar("loss", 1.0)
    assert events(store) == [1]
