"""Custom training: Keras layers, an optimizer and metrics in a training loop of one's own.

TensorFlow's tutorial of that name, with the digits of scikit-learn:

    pip install 'replicax[keras,demo]'
    REPLICAX_CPU_DEVICES=4 python examples/keras_custom_loop.py

`tf` becomes `rx`; what the replicas compute, and how gradients and metrics meet, stays.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "2")  # without accelerators: two virtual devices

import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

keras: Any = rx.keras
BATCH_PER_REPLICA = 32


def main() -> None:
    """Train for some epochs, and say how loss and accuracy go."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each epoch; all by default")
    options = parser.parse_args()

    strategy = rx.distribute.MirroredStrategy()
    print(f"Number of replicas: {strategy.num_replicas_in_sync}")
    global_batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    train, test = make_datasets(global_batch, options.steps)
    train_batches = strategy.experimental_distribute_dataset(train)
    test_batches = strategy.experimental_distribute_dataset(test)

    with strategy.scope():
        # By example: the average is over the global batch, not over a replica's part of it.
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        test_loss = keras.metrics.Mean(name="test_loss")
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
        model = make_model()
        optimizer = keras.optimizers.Adam(learning_rate=0.002)

    def compute_loss(labels: Any, predictions: Any, model_losses: list[Any]) -> Any:
        per_example = loss_object(labels, predictions)
        loss = rx.nn.mean_loss(per_example)
        return loss + rx.nn.scale_regularization_loss(sum(model_losses))

    def train_step(images: Any, labels: Any) -> Any:
        with rx.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    def test_step(images: Any, labels: Any) -> None:
        predictions = model(images, training=False)
        test_loss.update_state(loss_object(labels, predictions))
        test_accuracy.update_state(labels, predictions)

    @rx.function
    def distributed_train_step(batch: Any) -> Any:
        per_replica = strategy.run(train_step, args=batch)
        return strategy.reduce(rx.distribute.ReduceOp.SUM, per_replica, axis=None)

    @rx.function
    def distributed_test_step(batch: Any) -> None:
        strategy.run(test_step, args=batch)

    for epoch in range(options.epochs):
        losses = [float(distributed_train_step(batch)) for batch in train_batches]
        for batch in test_batches:
            distributed_test_step(batch)
        print(
            f"Epoch {epoch + 1}, step {optimizer.iterations.numpy()}:"
            f" loss {np.mean(losses):.4f}, accuracy {float(train_accuracy.result()):.1%},"
            f" test loss {float(test_loss.result()):.4f},"
            f" test accuracy {float(test_accuracy.result()):.1%}"
        )
        test_loss.reset_state()
        train_accuracy.reset_state()
        test_accuracy.reset_state()


def make_model() -> Any:
    """A small convolutional network with a regularizer."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-5)),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_datasets(batch: int, steps: int | None) -> tuple[Any, Any]:
    """Full batches, so that one program serves all steps."""
    digits: Any = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    split = 1500
    train = rx.data.Dataset.from_tensor_slices((images[:split], labels[:split]))
    train = train.shuffle(split, seed=1).batch(batch, drop_remainder=True)
    test = rx.data.Dataset.from_tensor_slices((images[split:], labels[split:]))
    test = test.batch(batch, drop_remainder=True)
    return (train.take(steps) if steps else train), test


if __name__ == "__main__":
    main()
