"""Ask TensorFlow for every cell of the table of variables, and record what it answers.

Needs TensorFlow (the recorded answers are of 2.21), and NumPy:

    python tests/golden/make_variables.py
"""

import json
import logging
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from variable_cases import Library, all_cases, outcome

ANSWERS = Path(__file__).with_name("variables.json")


def main() -> None:
    tf.get_logger().setLevel(logging.ERROR)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    library = Library(
        tf,
        # One object for each number of replicas: TensorFlow numbers collectives by object.
        {n: tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)]) for n in (1, 2, 4)}.get,
        lambda x, dtype: tf.constant(x, dtype=dtype),
    )
    answers = {case.name: outcome(library, case) for case in all_cases()}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
