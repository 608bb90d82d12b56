"""Ask TensorFlow for the gradients of random programs, and record what it answers.

Needs TensorFlow (the recorded answers are of 2.21), and NumPy:

    python tests/golden/make_tape_programs.py [how many programs]
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from make_tape import LIBRARY, tf
from tape_programs import Run, made, variables_of

ANSWERS = Path(__file__).with_name("tape_programs.json")
COUNT = 400


def rounded(x):
    """Numbers that are short in a file, and exact enough for single precision."""
    if isinstance(x, list):
        return [rounded(y) for y in x]
    short = float(f"{x:.5g}")
    return int(short) if short.is_integer() and abs(short) < 10**6 else short


def listed(x):
    return None if x is None else rounded(tf.convert_to_tensor(x).numpy().tolist())


def main() -> None:
    lib = SimpleNamespace(
        **vars(LIBRARY),
        negative=tf.negative,
        identity=tf.identity,
        halves=lambda x: tf.split(x, 2),
        joined=lambda a, b: tf.concat([a, b], 0),
        where=tf.where,
        function=tf.function,
    )
    lines = []
    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT):
        found = Run(lib, variables_of(lib)).block(made(seed)).answers
        answers = [one if isinstance(one, str) else [listed(x) for x in one] for one in found]
        lines.append(json.dumps(answers, separators=(",", ":")))
    ANSWERS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
