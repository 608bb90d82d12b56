"""`keras.callbacks.TensorBoard` writes its files where TensorFlow is not installed."""

import re
from importlib.util import find_spec

import numpy as np
import pytest

import replicax as rx
from tests.replicas import mirrored

keras = rx.keras

pytestmark = pytest.mark.skipif(
    find_spec("tensorflow") is not None, reason="the callback writes with TensorFlow"
)

X = np.ones((8, 3), "float32")


def records(folder):
    """Return all records of the event files in a folder, joined."""
    files = sorted(str(path) for path in folder.glob("events.out.tfevents.*"))
    return b"".join(rx.data.TFRecordDataset(files).as_numpy_iterator())


@pytest.mark.parametrize("frequency", ["epoch", 1])
def test_fit_writes_scalars_histograms_images_and_the_model(tmp_path, frequency):
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="inner")])
        model.compile("sgd", "mse")
    board = keras.callbacks.TensorBoard(
        str(tmp_path), histogram_freq=1, write_images=True, update_freq=frequency
    )
    data = (X, np.ones((8, 2)))

    model.fit(*data, batch_size=4, epochs=2, verbose=0, validation_data=data, callbacks=[board])

    train, validation = records(tmp_path / "train"), records(tmp_path / "validation")
    assert train.count(b"epoch_loss") == 2
    assert validation.count(b"epoch_loss") == 2
    assert b"evaluation_loss_vs_iterations" in validation
    assert train.count(b"/inner/kernel/histogram") == 2
    assert b"\x89PNG" in train
    assert b"graph_keras_model" in train
    assert re.search(rb'"class_name": "Sequential"', train)
    assert train.count(b"batch_loss") == (4 if frequency == 1 else 0)
