"""Distributed training with Keras: `compile` and `fit` in the scope of a strategy.

TensorFlow's tutorial of that name, with the digits of scikit-learn:

    pip install 'replicax[keras,demo]'
    REPLICAX_CPU_DEVICES=4 python examples/keras_fit.py

`tf.keras` becomes `rx.keras`, and `tf.distribute` becomes `rx.distribute`; the rest stays.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "2")  # without accelerators: two virtual devices

import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

keras: Any = rx.keras
BATCH_PER_REPLICA = 32


def main() -> None:
    """Train, evaluate, save, and load the model with and without a strategy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, help="of each epoch; all by default")
    options = parser.parse_args()

    strategy = rx.distribute.MirroredStrategy()
    print(f"Number of replicas: {strategy.num_replicas_in_sync}")
    batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    train, test = make_datasets(batch, options.steps)

    with strategy.scope():
        model = make_model()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(),
            metrics=["accuracy"],
        )

    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Path(scratch) / "epoch_{epoch:02d}.weights.h5"
        callbacks = [
            keras.callbacks.ModelCheckpoint(checkpoints, save_weights_only=True),
            keras.callbacks.LearningRateScheduler(decay),
            print_rate(model),
        ]
        model.fit(train, epochs=options.epochs, callbacks=callbacks, verbose=2)

        model.load_weights(max(Path(scratch).glob("*.weights.h5")))
        loss, accuracy = model.evaluate(test, verbose=0)
        print(f"Test: loss {loss:.4f}, accuracy {accuracy:.1%}")

        path = Path(scratch) / "model.keras"
        model.save(path)
        alone = keras.models.load_model(path)
        print(f"Loaded without a strategy: accuracy {alone.evaluate(test, verbose=0)[1]:.1%}")
        with strategy.scope():
            again = keras.models.load_model(path)
        print(f"Loaded with the strategy: accuracy {again.evaluate(test, verbose=0)[1]:.1%}")


def make_model() -> Any:
    """A small convolutional network for images of 8 x 8."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_datasets(batch: int, steps: int | None) -> tuple[Any, Any]:
    """Batches of all replicas together; a strategy divides them."""
    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    split = 1500
    train = rx.data.Dataset.from_tensor_slices((images[:split], labels[:split]))
    train = train.shuffle(split, seed=1).batch(batch)
    test = rx.data.Dataset.from_tensor_slices((images[split:], labels[split:])).batch(batch)
    return (train.take(steps) if steps else train), test


def decay(epoch: int) -> float:
    """A smaller learning rate in later epochs."""
    return 1e-3 if epoch < 4 else 3e-4


def print_rate(model: Any) -> Any:
    """A callback that says the learning rate after each epoch."""

    def after_epoch(epoch: int, logs: Any) -> None:
        rate = float(model.optimizer.learning_rate.numpy())
        print(f"Learning rate for epoch {epoch + 1} was {rate:g}")

    return keras.callbacks.LambdaCallback(on_epoch_end=after_epoch)


if __name__ == "__main__":
    main()
