"""Datasets of other libraries, with the real libraries; each is skipped where it is not installed.

Run by `make test-foreign`, which installs them.
"""

import os

import numpy as np
import pytest

import replicax as rx

pytestmark = pytest.mark.foreign

ROWS = 10
X = np.arange(ROWS * 2, dtype=np.float32).reshape(ROWS, 2)
Y = np.arange(ROWS, dtype=np.int32)


@pytest.fixture(scope="module")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def torch_loader():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_size=4)


def torch_dataset_of_batches():
    torch = pytest.importorskip("torch")

    class Batches(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            if i >= 3:
                raise IndexError(i)
            return torch.from_numpy(X[4 * i : 4 * i + 4]), torch.from_numpy(Y[4 * i : 4 * i + 4])

    return Batches()


def grain_map_dataset():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(X, Y, strict=True))).batch(4)


def grain_iter_dataset():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(X, Y, strict=True))).to_iter_dataset().batch(4)


def grain_loader():
    grain = pytest.importorskip("grain")
    return grain.DataLoader(
        data_source=list(zip(X, Y, strict=True)),
        sampler=grain.samplers.IndexSampler(ROWS, num_epochs=1, shuffle=False, seed=0),
        operations=[grain.transforms.Batch(batch_size=4)],
        worker_count=0,
    )


def hugging_face_dataset():
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its thread would outlive the test
    whole = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()}).with_format("numpy")
    return whole.batch(4)


def tensorflow_dataset():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def keras_dataset():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")

    class Batches(keras.utils.PyDataset):
        @property
        def num_batches(self):
            return 3

        def __getitem__(self, i):
            return X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]

    return Batches()


MAKERS = [
    torch_loader,
    torch_dataset_of_batches,
    grain_map_dataset,
    grain_iter_dataset,
    grain_loader,
    hugging_face_dataset,
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
