"""Ask TensorFlow what the programs of `names_cases` give, and record it.

Needs TensorFlow (the recorded answers are of 2.21), NumPy, and Pillow for images:

    python tests/golden/make_names.py
"""

import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from names_cases import ALL, outcome

ANSWERS = Path(__file__).with_name("names.json")


def main() -> None:
    tf.autograph.set_verbosity(0)
    answers = {name: outcome(program, tf) for name, program in ALL.items()}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
