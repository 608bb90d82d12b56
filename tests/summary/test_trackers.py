"""`rx.train.track` and `log`: the first worker writes, and a restart continues its run."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.summary import trackers
from replicax.testing import run_in_processes


@pytest.fixture(autouse=True)
def _end(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_started", None)
    yield
    rx.train.track(folder=tmp_path)


def test_log_gives_numbers(tmp_path):
    seen = []
    rx.train.track(lambda *row: seen.append(row), folder=tmp_path)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(2.0)
    total = strategy.reduce("SUM", strategy.run(v.read_value), axis=None)

    rx.train.log({"a": jnp.bfloat16(0.5), "b": np.ones((1, 1)), "c": v, "d": total}, rx.Variable(3))

    assert seen == [({"a": 0.5, "b": 1.0, "c": 2.0, "d": 4.0}, 3)]
    different = strategy.experimental_distribute_values_from_function(lambda context: 1.0)
    with pytest.raises(TypeError, match=r"one value for each replica.*strategy.reduce"):
        rx.train.log({"x": different}, 1)
    with pytest.raises(TypeError, match=r"'x' must be one number, got float32 of shape \(2,\)"):
        rx.train.log({"x": jnp.ones(2)}, 1)
    with pytest.raises(rx.errors.TracingError, match="Return them from the function"):
        rx.function(lambda x: rx.train.log({"x": x}, 1))(jnp.ones(()))
    assert len(seen) == 1


def test_log_needs_track_and_track_needs_a_known_name(tmp_path):
    with pytest.raises(rx.errors.ScopeError, match=r"rx\.train\.track\(\"tensorboard\""):
        rx.train.log({"x": 1}, 1)
    with pytest.raises(ValueError, match="no tracker 'tensorbord': name 'tensorboard', 'wandb'"):
        rx.train.track("tensorbord", folder=tmp_path)


def test_tensorboard_files(tmp_path):
    rx.train.track("tensorboard", folder=tmp_path)
    for step in range(3):
        rx.train.log({"loss": 1.0 / (step + 1)}, step)

    (file,) = tmp_path.glob("events.out.tfevents.*")
    records = list(rx.data.TFRecordDataset(str(file)))
    assert sum(b"loss" in bytes(record) for record in records) == 3


def test_the_id_of_a_run_is_kept(tmp_path):
    kept = [
        trackers._stored_run_id(str(tmp_path), "wandb_run_id", made)
        for made in (lambda: "a1", None)
    ]

    assert kept == ["a1", "a1"]
    (tmp_path / "wandb_run_id").write_text("../x")
    with pytest.raises(ValueError, match="must contain the id of a run"):
        trackers._stored_run_id(str(tmp_path), "wandb_run_id", None)


def logged(folder):
    rx.distribute.MultiWorkerMirroredStrategy()
    seen = []
    rx.train.track("tensorboard", lambda *row: seen.append(row), folder=folder)
    rx.train.log({"loss": 1.0}, 1)
    return len(seen)


@pytest.mark.slow
@pytest.mark.multi_process
def test_the_first_worker_logs(tmp_path):
    assert run_in_processes(logged, 2, args=(str(tmp_path),)) == [1, 0]
    assert len(list(tmp_path.glob("events.*"))) == 1
