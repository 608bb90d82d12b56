"""Ask TensorFlow what its datasets give in the programs of `pipeline_cases`, and record it.

Needs TensorFlow (the recorded answers are of 2.21), and NumPy:

    python tests/golden/make_pipelines.py
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from pipeline_cases import ORDERS, Library, orders

ANSWERS = Path(__file__).with_name("pipelines.json")


def main() -> None:
    library = Library(tf.data, tf.random.set_seed)
    answers = {
        f"{name}, global {seed}": orders(library, name, seed)
        for name in ORDERS
        for seed in (None, 7)
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
