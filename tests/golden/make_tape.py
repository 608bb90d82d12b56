"""Ask TensorFlow for the gradients of every program, and record what it answers.

Needs TensorFlow (the recorded answers are of 2.21), and NumPy:

    python tests/golden/make_tape.py
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from tape_cases import PROGRAMS, variables_of

ANSWERS = Path(__file__).with_name("tape.json")
LIBRARY = SimpleNamespace(
    GradientTape=tf.GradientTape,
    Variable=tf.Variable,
    UnconnectedGradients=tf.UnconnectedGradients,
    constant=tf.constant,
    matmul=tf.matmul,
    reduce_mean=tf.reduce_mean,
    reduce_sum=tf.reduce_sum,
    sin=tf.sin,
    tanh=tf.tanh,
    sigmoid=tf.sigmoid,
    cond=tf.cond,
    cast=tf.cast,
    stop_gradient=tf.stop_gradient,
    complex=lambda a, b: tf.complex(tf.constant(a), tf.constant(b)),
    abs=tf.abs,
    real=tf.math.real,
    parts=lambda z: [tf.math.real(z), tf.math.imag(z)],
)


def main() -> None:
    answers = {}
    for program in PROGRAMS:
        found = tf.nest.map_structure(
            lambda x: None if x is None else x.numpy().tolist(),
            program(LIBRARY, *variables_of(program, LIBRARY)),
        )
        answers[program.__name__] = found
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
