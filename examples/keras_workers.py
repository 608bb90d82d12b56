"""Multi-worker training with Keras: one `fit` on several workers.

TensorFlow's tutorial of that name, with the digits of scikit-learn:

    pip install 'replicax[keras,demo]'
    replicax launch --workers 2 examples/keras_workers.py

Every worker runs this program. The first shows the progress and writes the files.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

keras: Any = rx.keras
BATCH_PER_WORKER = 64


def main() -> None:
    """Train on all workers; a run that was interrupted goes on from its last epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of each epoch; all by default")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="all workers see it")
    options = parser.parse_args()

    strategy = rx.distribute.MultiWorkerMirroredStrategy()  # first of all: the workers meet here
    batch = BATCH_PER_WORKER * strategy.num_replicas_in_sync
    dataset = make_dataset(batch, options.steps)

    with strategy.scope():
        model = make_model()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(learning_rate=0.1),
            metrics=["accuracy"],
        )

    backup = keras.callbacks.BackupAndRestore(Path(options.directory) / "keras_workers_backup")
    shown = 2 if strategy.is_chief else 0
    history = model.fit(dataset, epochs=options.epochs, callbacks=[backup], verbose=shown)
    rx.debug.check_in_sync(model.variables)
    if strategy.is_chief:
        path = Path(options.directory) / "keras_workers.keras"
        model.save(path)
        print(f"accuracy {history.history['accuracy'][-1]:.1%}; the model is in {path}")


def make_model() -> Any:
    """A small convolutional network for images of 8 x 8."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_dataset(batch: int, steps: int | None) -> Any:
    """Batches of all workers together; each keeps its part."""
    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    dataset = rx.data.Dataset.from_tensor_slices((images, digits.target.astype(np.int32)))
    dataset = dataset.shuffle(len(images), seed=1).batch(batch)
    return dataset.take(steps) if steps else dataset


if __name__ == "__main__":
    main()
