"""Datasets of other libraries, with the real libraries; each is skipped where it is not installed.

Run by `make test-foreign`, which installs them.
"""

import functools
import os
import re
import warnings

import numpy as np
import pytest

import replicax as rx
from replicax.testing import run_in_processes
from tests.integrations import keras_workers
from tests.integrations import test_keras_trainer as trainer
from tests.integrations.test_keras_trainer import assert_same, compiled_net, in_scope, stock_fit

pytestmark = pytest.mark.foreign

X = np.arange(20, dtype=np.float32).reshape(10, 2)
Y = np.arange(10, dtype=np.int32)


@pytest.fixture(scope="module")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def torch_loader(x=X, y=Y, size=4):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(data, batch_size=size)


def torch_dataset_of_batches(x=X, y=Y, size=4):
    torch = pytest.importorskip("torch")

    class Batches(torch.utils.data.Dataset):
        def __len__(self):
            return -(-len(x) // size)

        def __getitem__(self, i):
            if i >= len(self):
                raise IndexError(i)
            rows = slice(size * i, size * i + size)
            return torch.from_numpy(x[rows]), torch.from_numpy(y[rows])

    return Batches()


def grain_map_dataset(x=X, y=Y, size=4):
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(x, y, strict=True))).batch(size)


def grain_iter_dataset(x=X, y=Y, size=4):
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(x, y, strict=True))).to_iter_dataset().batch(size)


def grain_loader(x=X, y=Y, size=4):
    grain = pytest.importorskip("grain")
    return grain.DataLoader(
        data_source=list(zip(x, y, strict=True)),
        sampler=grain.samplers.IndexSampler(len(x), num_epochs=1, shuffle=False, seed=0),
        operations=[grain.transforms.Batch(batch_size=size)],
        worker_count=0,
    )


def hugging_face_dataset(x=X, y=Y, size=4):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its thread would outlive the test
    whole = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("numpy")
    return whole.batch(size)


def hugging_face_lists(x=X, y=Y, size=4):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0
    return datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).batch(size)


def tensorflow_dataset(x=X, y=Y, size=4):
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def keras_dataset(x=X, y=Y, size=4):
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")

    class Batches(keras.utils.PyDataset):
        @property
        def num_batches(self):
            return -(-len(x) // size)

        def __getitem__(self, i):
            return x[size * i :][:size], y[size * i :][:size]

    return Batches()


MAKERS = [
    torch_loader,
    torch_dataset_of_batches,
    grain_map_dataset,
    grain_iter_dataset,
    grain_loader,
    hugging_face_dataset,
    hugging_face_lists,
    tensorflow_dataset,
    keras_dataset,
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("make", MAKERS, ids=lambda m: m.__name__)
def test_every_row_arrives_once_and_in_order_in_each_of_two_epochs(strategy, make):
    dist = strategy.experimental_distribute_dataset(make())
    step = rx.function(lambda x, y: strategy.run(lambda a, b: (a * 2, b), args=(x, y)))

    for _ in range(2):
        xs, ys = [], []
        for batch in dist:
            x, y = batch.values() if isinstance(batch, dict) else batch
            doubled, labels = step(x, y)
            xs.append(strategy.gather(doubled, axis=0))
            ys.append(strategy.gather(labels, axis=0))
        np.testing.assert_array_equal(np.concatenate(xs), 2 * X)
        np.testing.assert_array_equal(np.concatenate(ys), Y)


KERAS_TAKES = [
    torch_loader,
    grain_map_dataset,
    grain_iter_dataset,
    grain_loader,
    tensorflow_dataset,
    keras_dataset,
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("make", KERAS_TAKES, ids=lambda m: m.__name__)
def test_a_model_fits_evaluates_and_predicts_from_it_as_on_one_device(strategy, make):
    data = lambda: make(trainer.X, trainer.Y, trainer.BATCH)  # noqa: E731
    model = in_scope(strategy, compiled_net)

    history = model.fit(data(), shuffle=False, verbose=0)

    stock, expected = stock_fit()
    assert_same(model, history, stock, expected)
    for got, wanted in (
        (model.evaluate(data(), verbose=0), stock.evaluate(trainer.X, trainer.Y, verbose=0)),
        (model.predict(data(), verbose=0), stock.predict(trainer.X, verbose=0)),
    ):
        np.testing.assert_allclose(got, wanted, **trainer.TOLERANCE)


MORE = {"epochs": 2, "validation_data": (trainer.X, trainer.Y), "verbose": 0}


@pytest.mark.filterwarnings("default")
def test_tensorboard_is_told_what_it_is_told_on_one_device(strategy, tmp_path):
    pytest.importorskip("tensorboard")
    make = functools.partial(compiled_net, names=("hidden", "out"))
    for name, model in (("alone", make()), ("both", in_scope(strategy, make))):
        board = rx.keras.callbacks.TensorBoard(tmp_path / name, histogram_freq=1, update_freq=1)
        model.fit(**trainer.ARRAYS, **MORE, callbacks=[board])

    assert_told(told(tmp_path / "both"), told(tmp_path / "alone"))


@pytest.mark.multi_process
@pytest.mark.filterwarnings("default")
def test_of_several_workers_the_first_tells_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    board = rx.keras.callbacks.TensorBoard(tmp_path / "alone", histogram_freq=1, update_freq=1)
    model = compiled_net(names=("hidden", "out"))
    model.fit(**trainer.ARRAYS, **MORE, callbacks=[board])

    run_in_processes(keras_workers.board, 2, 2, args=(str(tmp_path),))

    assert_told(told(tmp_path / "0"), told(tmp_path / "alone"))
    assert [p for p in (tmp_path / "1").rglob("*") if p.is_file()] == []


def assert_told(got, expected):
    assert got.keys() == expected.keys()
    assert any("epoch_loss" in tag for _, tag, _ in expected)
    assert any("batch_loss" in tag for _, tag, _ in expected)
    for tag, value in expected.items():
        np.testing.assert_allclose(got[tag], value, **trainer.TOLERANCE, err_msg=str(tag))


def told(directory):
    """What TensorBoard was told in both of its runs."""
    runs = ("train", "validation")
    return {tag: v for run in runs for tag, v in scalars(directory / run, run)}


def scalars(directory, run):
    """What a log of TensorBoard has: (run, tag, step) and the number or the histogram."""
    tf = pytest.importorskip("tensorflow")
    for path in directory.iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                if "per_second" not in value.tag and "keras" not in value.tag:
                    yield (
                        (run, re.sub(r"_\d+", "", value.tag), event.step),
                        tf.make_ndarray(value.tensor),
                    )


def test_tensorboard_reads_what_rx_summary_writes(tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tensor_util = pytest.importorskip("tensorboard.util.tensor_util")
    writer = rx.summary.create_file_writer(tmp_path)
    with writer.as_default():
        for step in range(3):
            rx.summary.scalar("loss", 0.5**step, step=step)
        rx.summary.histogram("weights", np.arange(100.0), step=2, buckets=4)
        rx.summary.image("image", np.ones((1, 2, 3, 3)), step=2)
    writer.close()

    read = accumulators.EventAccumulator(str(tmp_path)).Reload()
    tensors = {
        tag: [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }

    assert [(step, x.item()) for step, x in tensors["loss"]] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert tensors["weights"][0][1][:, 2].tolist() == [25.0] * 4
    width, height, png = tensors["image"][0][1]
    assert (width, height, png[:4]) == (b"3", b"2", b"\x89PNG")
    plugins = {t: read.SummaryMetadata(t).plugin_data.plugin_name for t in tensors}
    assert plugins == {"loss": "scalars", "weights": "histograms", "image": "images"}


def test_hugging_face_examples_are_refused(strategy):
    datasets = pytest.importorskip("datasets")
    examples = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    with pytest.raises(ValueError, match=r"pass `dataset\.batch"):
        next(iter(strategy.experimental_distribute_dataset(examples)))


@pytest.mark.parametrize("kind", ["map", "iterable"])
def test_single_sequences_of_a_hugging_face_dataset_are_named(strategy, kind):
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0
    rows = {"ids": [[1, 2, 3, 4]] * 4, "mask": [[1, 1, 1, 0]] * 4}
    single = datasets.Dataset.from_dict(rows)
    single = single.to_iterable_dataset() if kind == "iterable" else single

    with pytest.warns(UserWarning, match=r"\(ids, mask\) are lists of values.*dataset.batch"):
        strategy.experimental_distribute_dataset(single)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        (batch,) = strategy.experimental_distribute_dataset(single.batch(4))
    assert strategy.gather(batch["ids"], axis=0).tolist() == rows["ids"]
