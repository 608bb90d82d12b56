"""Ask TensorFlow what the programs of `names_cases` give, and record it.

Needs TensorFlow (the recorded answers are of 2.21), and NumPy:

    python tests/golden/make_names.py
"""

import base64
import json
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf
from names_cases import ALL, IMAGES_OF, outcome

ANSWERS = Path(__file__).with_name("names.json")
PUBLIC = Path(__file__).with_name("public_names.json")


def main() -> None:
    tf.autograph.set_verbosity(0)
    write_images()
    modules = {"data.experimental": tf.data.experimental, "io": tf.io, "io.gfile": tf.io.gfile}
    public = {key: [n for n in dir(m) if n[0] != "_"] for key, m in modules.items()}
    PUBLIC.write_text(json.dumps(public, indent=0) + "\n")
    answers = {name: outcome(program, tf) for name, program in ALL.items()}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_images() -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (4, 5, 4)).astype(np.uint8)
    numbers[0, 0] = 77
    files = {
        "gray": tf.io.encode_png(numbers[..., :1]),
        "gray and clear": tf.io.encode_png(numbers[..., :2]),
        "colours": tf.io.encode_png(numbers[..., :3]),
        "colours and clear": tf.io.encode_png(numbers),
        "gray of 16 bits": tf.io.encode_png(numbers[..., :1].astype(np.uint16) * 257 + 5),
        "jpeg": tf.io.encode_jpeg(numbers[..., :3], quality=95),
    }
    told = {name: base64.b64encode(data.numpy()).decode() for name, data in files.items()}
    IMAGES_OF.write_text(json.dumps(told, indent=0) + "\n")


if __name__ == "__main__":
    main()
