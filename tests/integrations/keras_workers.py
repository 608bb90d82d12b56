"""What the workers of the Keras tests do; each returns what the test looks at."""

import contextlib
import io
import os
from pathlib import Path

import numpy as np

os.environ["KERAS_BACKEND"] = "jax"

import replicax as rx
from tests.integrations.keras_loops import batches, replicated
from tests.integrations.test_keras import clipped_momentum_with_regularizer
from tests.integrations.test_keras_trainer import ARRAYS, BATCH, X, Y, compiled_net, weights

keras = rx.keras


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
        "eager": np.asarray(model(X[:3])).tolist(),
        "shown": len(shown.getvalue()),
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
