"""Ask TensorFlow for the losses of the tutorials' Keras programs, and record what it answers.

Needs TensorFlow (the recorded answers are of 2.21 with Keras 3.15), and NumPy. Two logical CPUs
stand for two workers too: Keras 3 on TensorFlow does not fit under several.

    python tests/golden/make_keras.py
"""

import json
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras_cases
import tensorflow as tf

ANSWERS = Path(__file__).with_name("keras.json")


def main() -> None:
    """Run each program on two logical CPUs."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    answers = {p.__name__: p(tf, strategy) for p in (keras_cases.fit, keras_cases.loop)}
    lines = [f"{json.dumps(k)}: {json.dumps(v, default=float)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
