"""Ask TensorFlow's Keras what its metrics make of some batches, and record what it answers.

Needs TensorFlow (the recorded answers are of 2.21 with Keras 3.15), and NumPy:

    python tests/golden/make_metrics.py
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf

BATCHES = (slice(0, 4), slice(4, 7))


def cases():
    """Name, keyword arguments, the arguments of update_state, weights."""
    rng = np.random.default_rng(0)
    floats = lambda *shape: rng.random(shape, np.float32)  # noqa: E731
    signed = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    probs = floats(7, 3)
    probs /= probs.sum(1, keepdims=True)
    labels, others = rng.integers(0, 3, 7), rng.integers(0, 3, 7)
    one_hot = np.eye(3, dtype=np.float32)[labels]
    bits, chances = rng.integers(0, 2, (7, 2)).astype(np.float32), floats(7, 2)
    x, y, x2, y2, logits = signed(7), signed(7), signed(7, 2), signed(7, 2), signed(7, 3)
    for weights in (None, floats(7)):
        for name in ("Mean", "Sum"):
            yield name, {}, [x], weights
            yield name, {}, [x2], weights
            yield name, {}, [x2], floats(7, 2)
        yield "Accuracy", {}, [labels, others], weights
        yield "SparseCategoricalAccuracy", {}, [labels, probs], weights
        yield "SparseCategoricalAccuracy", {}, [labels[:, None], probs], weights
        yield "CategoricalAccuracy", {}, [one_hot, probs], weights
        yield "BinaryAccuracy", {}, [bits[:, 0], chances[:, 0]], weights
        yield "BinaryAccuracy", {}, [bits[:, :1], chances[:, :1]], weights
        yield "BinaryAccuracy", {"threshold": 0.3}, [bits, chances], weights
        yield "TopKCategoricalAccuracy", {"k": 2}, [one_hot, probs], weights
        yield "SparseTopKCategoricalAccuracy", {"k": 2}, [labels, probs], weights
        for name in ("MeanSquaredError", "MeanAbsoluteError", "RootMeanSquaredError"):
            yield name, {}, [x2, y2], weights
            yield name, {}, [x[:, None], y], weights
        yield "BinaryCrossentropy", {}, [bits, chances], weights
        yield "BinaryCrossentropy", {"from_logits": True}, [bits, x2], weights
        yield "BinaryCrossentropy", {"label_smoothing": 0.2}, [bits, chances], weights
        yield "CategoricalCrossentropy", {}, [one_hot, probs], weights
        yield "CategoricalCrossentropy", {"from_logits": True}, [one_hot, logits], weights
        yield "CategoricalCrossentropy", {"label_smoothing": 0.2}, [one_hot, probs], weights
        yield "SparseCategoricalCrossentropy", {}, [labels, probs], weights
        yield "SparseCategoricalCrossentropy", {"from_logits": True}, [labels, logits], weights


def answered(name, options, arguments, weights):
    """A case, with the result after each batch."""
    metric = getattr(tf.keras.metrics, name)(**options)
    results = []
    for batch in BATCHES:
        weighted = {} if weights is None else {"sample_weight": weights[batch]}
        metric.update_state(*(a[batch] for a in arguments), **weighted)
        results.append(float(metric.result()))
    return {
        "name": name,
        "options": options,
        "arguments": [a.tolist() for a in arguments],
        "weights": None if weights is None else weights.tolist(),
        "results": results,
    }


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(answered(*case)) for case in cases())
    Path(__file__).with_name("metrics.json").write_text(f"[\n{rows}\n]\n")
