"""TensorFlow Keras under MirroredStrategy, in an interpreter of its own; see `_tensorflow.py`."""

import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["KERAS_BACKEND"] = "tensorflow"
sys.path[0] = str(Path(__file__).parents[1])

import tensorflow as tf  # noqa: E402

from benchmarks._keras_models import (  # noqa: E402
    BATCH,
    STEPS,
    classification,
    data,
    mlp,
    transformer,
)
from benchmarks._timing import block  # noqa: E402

_MODELS = {"MLP": mlp, "transformer": transformer}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints is no answer
    tf.get_logger().setLevel("ERROR")
    [cpu] = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    fits = {}
    print("ready", file=answers)
    for line in sys.stdin:
        name, count = line.split()
        if name not in fits:
            fits[name] = fit(strategy, _MODELS[name])
        print(fits[name](int(count)), file=answers)


def fit(strategy, make):
    """An epoch of `fit`."""
    with strategy.scope():
        model = make(tf.keras)
        model.compile("adam", classification(tf.keras))
    x, y = data(make, BATCH * STEPS)
    return block(lambda: model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False))


if __name__ == "__main__":
    main()
