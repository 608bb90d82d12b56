"""Ask TensorFlow what its datasets give in the programs of `pipeline_cases`, and record it.

Needs TensorFlow (the recorded answers are of 2.21), and NumPy:

    python tests/golden/make_pipelines.py
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf
from pipeline_cases import ERRORS, ORDERS, Library, errors, orders

ANSWERS = Path(__file__).with_name("pipelines.json")


def main() -> None:
    number = tf.TensorSpec([], tf.int64)
    library = Library(
        tf.data,
        tf.io,
        tf.random.set_seed,
        lambda *at: lambda x: _called(_fails, at, x, tf.int64),
        lambda *at: lambda x: _called(_asks, at, x, tf.bool),
        number,
    )
    answers = {
        f"{name}, global {seed}": orders(library, name, seed)
        for name in ORDERS
        for seed in (None, 7)
    }
    answers |= {name: errors(library, name) for name in ERRORS}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _called(function, at, x, dtype):
    return tf.ensure_shape(tf.numpy_function(lambda v: function(at, v), [x], dtype), [])


def _fails(at, x):
    if int(x) in at:
        raise ValueError(int(x))
    return x


def _asks(at, x):
    return np.bool_(_fails(at, x) == x)


if __name__ == "__main__":
    main()
