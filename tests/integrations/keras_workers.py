"""What the workers of the Keras tests do; each returns what the test looks at."""

import contextlib
import io
import os
import runpy
from pathlib import Path

import numpy as np

os.environ["KERAS_BACKEND"] = "jax"

import replicax as rx
from tests.integrations.keras_loops import batches, replicated
from tests.integrations.test_keras import clipped_momentum_with_regularizer
from tests.integrations.test_keras_trainer import ARRAYS, BATCH, X, Y, compiled_net, weights

keras = rx.keras
layers = keras.layers


def _report(model, history):
    return {
        "weights": [w.tolist() for w in weights(model)],
        "history": {k: [float(v) for v in values] for k, values in history.history.items()},
    }


def train(directory):
    """fit on arrays and on datasets, evaluate, predict, and write checkpoints."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, other = compiled_net(), compiled_net()
    files = [keras.callbacks.ModelCheckpoint(Path(directory) / "model.keras")]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        history = model.fit(**ARRAYS, callbacks=files)
    rows = rx.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    return {
        "arrays": _report(model, history),
        "dataset": _report(other, other.fit(rows, verbose=0)),
        "evaluate": [float(v) for v in model.evaluate(X, Y, BATCH, verbose=0)],
        "predict": model.predict(X, BATCH, verbose=0).tolist(),
        "predict dataset": model.predict(rows, verbose=0).tolist(),
        "predict distributed": model.predict(
            strategy.experimental_distribute_dataset(rows), verbose=0
        ).tolist(),
        "eager": np.asarray(model(X[:3])).tolist(),
        "shown": len(shown.getvalue()),
    }


class Places(keras.Model):
    """Gives what depends on where rows are in the batch: for each row, for pairs, and twice."""

    def call(self, x):
        first = keras.ops.cumsum(x[:, :1], axis=0)
        return first, first[::2], keras.ops.repeat(first, 2, axis=0)


def predict_places():
    """Predictions of a model that looks at the order of rows, from all kinds of data."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = Places()
    rows = rx.data.Dataset.from_tensor_slices(X).batch(BATCH)
    spread = strategy.experimental_distribute_dataset(rows)
    # Of the first four batches, two have as many rows as there are pairs.
    return [model.predict(data, verbose=0) for data in (rows, spread, rows.take(4))]


def stock_callbacks(directory):
    """Keras's own callbacks that stop, change rates, swap weights and write files."""
    kept = keras.callbacks
    return [
        kept.ModelCheckpoint(directory / "{epoch:02d}.keras", "loss", save_best_only=True),
        kept.ModelCheckpoint(directory / "all.weights.h5", save_weights_only=True, save_freq=2),
        kept.CSVLogger(directory / "log.csv"),
        kept.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best_weights=True),
        kept.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0),
        kept.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        kept.SwapEMAWeights(swap_on_epoch=True),
        kept.TerminateOnNaN(),
    ]


def averaged_net():
    """A model whose optimizer keeps averages of the weights."""
    model = compiled_net()
    rate = keras.optimizers.SGD(0.5, momentum=0.9, use_ema=True, ema_momentum=0.5)
    model.compile(rate, "binary_crossentropy", metrics=["accuracy"])
    return model


def callbacks(directory):
    """fit with the stock callbacks, which get a directory for each worker."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = averaged_net()
    own = Path(directory) / str(strategy.cluster_resolver.task_id)
    own.mkdir()
    history = model.fit(**ARRAYS, epochs=5, verbose=0, callbacks=stock_callbacks(own))
    rx.debug.check_in_sync(model.variables)
    return _report(model, history)


def board(directory):
    """fit with a TensorBoard, which gets a directory for each worker; its files."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled_net(names=("hidden", "out"))
    own = Path(directory) / str(strategy.cluster_resolver.task_id)
    told = keras.callbacks.TensorBoard(own, histogram_freq=1, update_freq=1)
    more = {"epochs": 2, "validation_data": (X, Y), "verbose": 0}
    return _report(model, model.fit(**ARRAYS, **more, callbacks=[told]))


def eager():
    """fit, evaluate and predict, operation by operation, on arrays and on a dataset."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled_net(run_eagerly=True)
    rows = rx.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    history = model.fit(rows, verbose=0)
    rx.debug.check_in_sync(model.variables)
    return {
        **_report(model, history),
        "evaluate": [float(v) for v in model.evaluate(X, Y, BATCH, verbose=0)],
        "predict": model.predict(X, BATCH, verbose=0).tolist(),
        "predict dataset": model.predict(rows, verbose=0).tolist(),
    }


def shuffle():
    """fit on shuffled arrays, with an order that NumPy would give each worker by itself."""
    np.random.seed(int.from_bytes(os.urandom(4), "little"))
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled_net()
    model.fit(X, Y, BATCH, epochs=1, verbose=0)
    rx.debug.check_in_sync(model.variables)
    return [w.tolist() for w in weights(model)]


def loop():
    """A custom loop with a metric, and a batch that is short for some."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    losses, own, steps, error = replicated(strategy, clipped_momentum_with_regularizer, batches())
    return {"losses": losses, "weights": [w.tolist() for w in own], "steps": steps, "error": error}


FILES = (5, 11, 2)  # rows of each; the workers read 7 and 11 of them


class Seen(keras.metrics.Metric):
    """How often each row was met, by its number, which is its target."""

    def __init__(self):
        super().__init__()
        self.counts = self.add_weight(shape=(sum(FILES),), initializer="zeros")

    def update_state(self, y, predictions, sample_weight=None):
        rows = keras.ops.cast(keras.ops.reshape(y, (-1,)), "int32")
        self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(rows, sum(FILES)), axis=0))

    def result(self):
        return keras.ops.sum(self.counts)


def policies(directory):
    """fit and predict on what each policy lets a worker read; how often rows were met."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        identity = layers.Dense(1, kernel_initializer="ones", bias_initializer="zeros")
        model, seen = keras.Sequential([keras.Input((1,)), identity]), Seen()
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[seen])
    me = strategy.cluster_resolver.task_id
    paths = [str(Path(directory) / f"{k}.txt") for k in range(len(FILES))]
    lines = rx.data.TextLineDataset(paths).map(lambda s: np.float32(s))
    policy = rx.data.experimental.AutoShardPolicy
    found = {}
    for name, rows, chosen in (
        ("FILE", lines, policy.FILE),
        ("OFF", lines, policy.OFF),
        ("OFF, sharded by hand", lines.shard(2, me), policy.OFF),
    ):
        options = rx.data.Options()
        options.experimental_distribute.auto_shard_policy = chosen
        pairs = rows.map(lambda x: (x[None], x[None])).batch(4).with_options(options)
        model.fit(pairs, verbose=0)
        found[name] = seen.counts.numpy().tolist()
        found[f"{name}, predicted"] = sorted(model.predict(pairs, verbose=0)[:, 0].tolist())
    return found


def resumed(directory):
    """The example's loop for one epoch; again, with nothing left to do; and for another epoch."""
    path = Path(__file__).parents[2] / "examples" / "keras_custom_loop_workers.py"
    train = runpy.run_path(str(path))["train"]
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    found = []
    for epochs in (1, 1, 2):
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            model = train(strategy, directory, epochs, 2)
        found.append({"weights": weights(model), "told": told.getvalue()})
    return found
