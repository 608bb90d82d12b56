"""BackupAndRestore(save_freq=n) goes on with the next batch, on every strategy, bit for bit."""

import numpy as np
import pytest

import replicax as rx
from replicax.testing import run_in_processes
from tests.multi_process import exact
from tests.multi_process.exact import BATCH, STRATEGIES, Order
from tests.replicas import mirrored

keras = rx.keras
PER_EPOCH, EPOCHS = 3, 3
ROWS, TARGETS = exact.ROWS[: BATCH * PER_EPOCH], exact.TARGETS[: BATCH * PER_EPOCH]


class Stopped(Exception):  # noqa: N818 - the end of a machine, not an error
    """Raised where a run is cut."""


class Written(keras.callbacks.Callback):
    """What every batch found; raises after one of them."""

    def __init__(self, cut=None):
        super().__init__()
        self.found, self.cut, self.epoch = {}, cut, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.found[self.epoch, batch] = {k: np.asarray(v).tolist() for k, v in logs.items()}
        if (self.epoch, batch) == self.cut:
            raise Stopped


def made(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae", Order()])
    return model


def fit(strategy, folder, data, cut=None, seed=1, **options):
    """What every batch found, and the state at the end."""
    rx.random.set_seed(seed)
    keras.utils.set_random_seed(seed)
    model = made(strategy)
    written = Written(cut)
    backup = keras.callbacks.BackupAndRestore(folder, **{"save_freq": 2, **options})
    try:
        model.fit(**data(), epochs=EPOCHS, verbose=0, callbacks=[backup, written])
    except Stopped:
        return written.found, None
    state = [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]
    return written.found, state


def rows():
    return rx.data.Dataset.from_tensor_slices((ROWS, TARGETS)).shuffle(16)


DATA = {
    "arrays": lambda: {"x": ROWS, "y": TARGETS, "batch_size": BATCH},
    "arrays, steps": lambda: {**DATA["arrays"](), "steps_per_epoch": 2},
    "batches shuffled": lambda: {**DATA["arrays"](), "shuffle": "batch"},
    "dataset": lambda: {"x": rows().batch(BATCH)},
    "of unknown length": lambda: {"x": rows().filter(lambda x, y: True).batch(BATCH)},
    "endless": lambda: {"x": rows().repeat().batch(BATCH), "steps_per_epoch": 2},
}


def assert_same(found, whole):
    assert set(found) <= set(whole)
    assert {step: whole[step] for step in found} == found


# After the first save, after the last batch of an epoch, and in the last one.
CUTS = {
    "first": lambda steps: (0, 1) if (0, 2) in steps else (1, 0),
    "between": lambda steps: max(step for step in steps if step[0] == 1),
    "last": lambda steps: (2, 0),
}
QUICK = {
    "arrays, steps": "last",
    "batches shuffled": "first",
    "dataset": "last",
    "of unknown length": "between",
    "endless": "last",
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        pytest.param(kind, cut, marks=() if QUICK.get(kind) == cut else pytest.mark.slow)
        for kind in DATA
        for cut in CUTS
    ],
)
def test_the_next_batch_follows_whatever_the_data(tmp_path, two, kind, cut):
    whole, expected = fit(two, tmp_path / "whole", DATA[kind])
    before, ended = fit(two, tmp_path / "cut", DATA[kind], CUTS[cut](whole))
    after, state = fit(two, tmp_path / "cut", DATA[kind], seed=5)

    assert ended is None
    assert_same(before, whole)
    assert_same(after, whole)
    assert set(before) | set(after) == set(whole)
    assert len(set(before) & set(after)) <= 2
    for a, b in zip(state, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not (tmp_path / "cut").exists()  # as Keras does when all is done


@pytest.mark.parametrize("name", ["one", "tpu"])
def test_every_strategy_continues_with_the_next_batch(tmp_path, name):
    strategy = STRATEGIES[name]()
    whole, expected = fit(strategy, tmp_path / "whole", DATA["dataset"])
    before, _ = fit(strategy, tmp_path / "cut", DATA["dataset"], (1, 0))
    after, state = fit(strategy, tmp_path / "cut", DATA["dataset"], seed=5)

    assert_same({**before, **after}, whole)
    assert min(after) == (1, 1)
    for a, b in zip(state, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def assert_close(found, whole):
    """The same examples in the same order; losses as close as sums in another order are."""
    assert set(found) == set(whole)
    for step, logs in whole.items():
        assert found[step]["order"] == logs["order"], step
        for name in ("loss", "mae"):
            np.testing.assert_allclose(found[step][name], logs[name], rtol=1e-4, err_msg=str(step))


def test_another_number_of_replicas_meets_the_same_examples_in_the_same_order(tmp_path, two):
    whole, _ = fit(two, tmp_path / "whole", DATA["dataset"])
    found, _ = fit(two, tmp_path / "cut", DATA["dataset"], (0, 1))
    more, _ = fit(mirrored(1), tmp_path / "cut", DATA["dataset"], (1, 1), seed=5)
    rest, _ = fit(mirrored(4), tmp_path / "cut", DATA["dataset"], seed=6)

    assert_close({**found, **more, **rest}, whole)


def on_workers(folder):
    """In a worker: a whole run, one that is cut, and one that goes on; the last is left cut."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    whole, expected = fit(strategy, f"{folder}/whole", DATA["dataset"])
    before, _ = fit(strategy, f"{folder}/cut", DATA["dataset"], (0, 1))
    after, state = fit(strategy, f"{folder}/cut", DATA["dataset"], seed=5)
    fit(strategy, f"{folder}/left", DATA["dataset"], (1, 0))
    same = all(map(np.array_equal, state, expected))
    listed = [sorted(found.items()) for found in (whole, before, after)]
    return listed, same


@pytest.mark.multi_process
def test_workers_continue_with_the_next_batch_and_one_machine_with_theirs(tmp_path, two):
    reports = run_in_processes(on_workers, 2, 1, args=(str(tmp_path),))

    wholes = []
    for listed, same in reports:
        whole, before, after = map(dict, listed)
        assert same
        assert_same({**before, **after}, whole)
        assert min(after) == (0, 2)
        wholes.append(whole)
    assert wholes[0] == wholes[1]
    assert not (tmp_path / "cut").exists()

    rest, _ = fit(two, tmp_path / "left", DATA["dataset"], seed=7)
    assert min(rest) == (1, 1)
    assert_close({**wholes[0], **rest}, wholes[0])


def test_a_damaged_newest_backup_gives_way_to_the_one_before_it(tmp_path, two, caplog):
    whole, _ = fit(two, tmp_path / "whole", DATA["arrays"])
    fit(two, tmp_path / "cut", DATA["arrays"], (1, 0), double_checkpoint=True)
    newest = max((tmp_path / "cut").iterdir(), key=lambda p: int(p.name.split("-")[1]))
    for data in newest.rglob("*"):
        if data.is_file() and data.name != "checkpoint.json":
            data.write_bytes(b"\7" * data.stat().st_size)

    after, _ = fit(two, tmp_path / "cut", DATA["arrays"], seed=5)

    assert newest.name in caplog.text
    assert_same(after, whole)
    assert min(after) == (0, 2)


def test_a_second_fit_starts_at_its_own_epoch(tmp_path, two):
    fit(two, tmp_path / "cut", DATA["arrays"], (1, 0))
    model = made(two)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "cut", save_freq=2)
    model.fit(ROWS, TARGETS, BATCH, epochs=2, verbose=0, callbacks=[backup])

    written = Written()
    model.fit(ROWS, TARGETS, BATCH, epochs=1, verbose=0, callbacks=[backup, written])

    assert len(written.found) == PER_EPOCH
