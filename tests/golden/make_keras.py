"""Ask TensorFlow for the losses of the tutorials' Keras programs, and record what it answers.

Needs TensorFlow (the recorded answers are of 2.21 with Keras 3.15), and NumPy. The custom loop for
workers is run by two of them; for `fit` two logical CPUs stand for two workers too, as Keras 3 on
TensorFlow does not fit under several.

    python tests/golden/make_keras.py
"""

import json
import os
import socket
import subprocess
import sys
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
    answers["loop_workers"] = of_workers(2)
    lines = [f"{json.dumps(k)}: {json.dumps(v, default=float)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def of_workers(count: int) -> dict[str, list[float]]:
    """What the workers say, each a process that runs this file; all say the same."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    addresses = [f"localhost:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    workers = []
    for index in range(count):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        workers.append(
            subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "TF_CONFIG": json.dumps(cluster)},
                stdout=subprocess.PIPE,
            )
        )
    first, *others = [json.loads(w.communicate()[0]) for w in workers]
    if any(other != first for other in others):
        raise SystemExit(f"The workers differ: {first}, {others}")
    return first


if __name__ == "__main__":
    if "TF_CONFIG" in os.environ:
        workers = tf.distribute.MultiWorkerMirroredStrategy()
        sys.stdout.write(json.dumps(keras_cases.loop_workers(tf, workers)))
    else:
        main()
