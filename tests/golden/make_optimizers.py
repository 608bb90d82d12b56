"""Ask TensorFlow's Keras what the optimizers of docs/porting.md do, and record what it answers.

Needs TensorFlow (the recorded answers are of 2.21 with Keras 3.15):

    python tests/golden/make_optimizers.py
"""

import json
import os
import re
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ["KERAS_BACKEND"] = "tensorflow"

import tensorflow as tf

DOCS = Path(__file__).parents[2] / "docs" / "porting.md"
START, GRADIENT, STEPS = [1.0, -2.0, 3.0], [0.1, -0.001, 1e-5], 5


def values(optimizer):
    """A variable after each step, with gradients that grow, one of them nearly as small as eps."""
    variable = tf.Variable(START)
    seen = []
    for step in range(STEPS):
        optimizer.apply_gradients([(tf.constant(GRADIENT) * (step + 1), variable)])
        seen.append(variable.numpy().tolist())
    return seen


if __name__ == "__main__":
    calls = re.findall(r"^\| `(\w+\([^`]*\))` \| `optax", DOCS.read_text(), re.MULTILINE)
    made = {call: eval(f"tf.keras.optimizers.{call}") for call in calls}
    rows = ",\n".join(f"{json.dumps(c)}: {json.dumps(values(o))}" for c, o in made.items())
    Path(__file__).with_name("optimizers.json").write_text(f"{{\n{rows}\n}}\n")
