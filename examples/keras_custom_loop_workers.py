"""Multi-worker training with a custom training loop, which goes on where it was interrupted.

TensorFlow's tutorial of that name, with the digits of scikit-learn:

    pip install 'replicax[keras,demo,checkpoint]'
    replicax launch --workers 2 examples/keras_custom_loop_workers.py

Every worker runs this program. After each epoch all of them save, and a run that is started again
with the same `--directory` begins with the epoch that it had not finished.
"""

import argparse
import os
import shutil
import tempfile
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import replicax as rx

keras: Any = rx.keras
BATCH_PER_REPLICA = 32
ROWS = 1500  # to train with


def main() -> None:
    """Train on all workers; what a finished run saved is not needed any more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of each epoch; all by default")
    place = os.path.join(tempfile.gettempdir(), "keras_custom_loop_workers")
    parser.add_argument("--directory", default=place, help="of checkpoints; all workers see it")
    options = parser.parse_args()

    strategy = rx.distribute.MultiWorkerMirroredStrategy()  # first of all: the workers meet here
    train(strategy, options.directory, options.epochs, options.steps)
    if strategy.is_chief:
        shutil.rmtree(options.directory)


def train(strategy: Any, directory: str, epochs: int, at_most: int | None) -> Any:
    """Train until so many epochs are done, counted over all runs; returns the model."""
    global_batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync
    steps: int = at_most or ROWS // global_batch
    with strategy.scope():
        batches = strategy.distribute_datasets_from_function(
            lambda context: make_dataset(global_batch, context)
        )
        model = make_model()
        optimizer = keras.optimizers.Adam(learning_rate=0.002)
        train_accuracy = keras.metrics.SparseCategoricalAccuracy(name="train_accuracy")
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step_fn(images: Any, labels: Any) -> Any:
        with rx.GradientTape() as tape:
            predictions = model(images, training=True)
            per_example = loss_object(labels, predictions)
            loss = rx.nn.mean_loss(per_example)
            if model.losses:
                loss += rx.nn.scale_regularization_loss(sum(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_accuracy.update_state(labels, predictions)
        return loss

    @rx.function
    def train_step(iterator: Any) -> Any:
        per_replica = strategy.run(step_fn, args=next(iterator))
        return strategy.reduce(rx.distribute.ReduceOp.SUM, per_replica, axis=None)

    epoch = rx.Variable(0, name="epoch")
    step_in_epoch = rx.Variable(0, name="step_in_epoch")
    checkpoint = rx.train.Checkpoint(
        model=model, optimizer=optimizer, epoch=epoch, step_in_epoch=step_in_epoch
    )
    # The first worker writes for all. Programs for TensorFlow name a folder for each of the others,
    # and remove it after every save; they run as they are.
    mine = write_path(directory, strategy)
    manager = rx.train.CheckpointManager(checkpoint, directory=mine, max_to_keep=1)
    latest = rx.train.latest_checkpoint(directory)
    if latest:
        checkpoint.restore(latest)
        say(strategy, f"Goes on after epoch {epoch.numpy()}, from {latest}")

    while epoch.numpy() < epochs:
        iterator, total = iter(batches), 0.0
        while step_in_epoch.numpy() < steps:
            total += float(train_step(iterator))
            step_in_epoch.assign_add(1)
        accuracy = float(train_accuracy.result())  # adds up all workers: all of them read it
        epoch.assign_add(1)
        say(strategy, f"Epoch {epoch.numpy()}: loss {total / steps:.4f}, accuracy {accuracy:.1%}")
        train_accuracy.reset_state()
        step_in_epoch.assign(0)
        manager.save()
        if mine != directory:
            shutil.rmtree(mine, ignore_errors=True)
    rx.debug.check_in_sync(model.variables)
    return model


def write_path(directory: str, strategy: Any) -> str:
    """Where a worker writes: in the folder that stays if it is the first, else beside it."""
    if strategy.is_chief:
        return directory
    return os.path.join(directory, f"workertemp_{strategy.cluster_resolver.task_id}")


def say(strategy: Any, text: str) -> None:
    """Have one of the workers print."""
    if strategy.is_chief:
        print(text, flush=True)


def make_model() -> Any:
    """A small convolutional network with a regularizer."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-5)),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def make_dataset(global_batch: int, context: Any) -> Any:
    """What one worker reads: its share of the rows, in batches for one replica."""
    digits: Any = load_digits()
    images = (digits.images[:ROWS] / 16.0).astype(np.float32)[..., None]
    labels = digits.target[:ROWS].astype(np.int32)
    dataset = rx.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    batch = context.get_per_replica_batch_size(global_batch)
    return dataset.shuffle(ROWS, seed=1).repeat().batch(batch)


if __name__ == "__main__":
    main()
