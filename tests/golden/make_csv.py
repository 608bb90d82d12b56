"""Ask TensorFlow what it reads from the files of `csv_cases`, and record it.

Needs TensorFlow (the recorded answers are of 2.21):

    python tests/golden/make_csv.py
"""

import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from csv_cases import cases, outcome

ANSWERS = Path(__file__).with_name("csv.json")


def main() -> None:
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        for case in cases():
            path.write_bytes(case.text.encode())
            defaults = case.defaults(tf.int32, tf.float32, tf.string)
            dataset = tf.data.experimental.CsvDataset(str(path), defaults, **case.options)
            answers.append(_read(dataset))
            assert _read(dataset.ignore_errors()) == [x for x in answers[-1] if x != "error"]
    lines = [json.dumps(answer) for answer in answers]
    ANSWERS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def _read(dataset: tf.data.Dataset) -> object:
    return outcome(iter(dataset), tf.errors.OpError, lambda row: [x.numpy() for x in row])


if __name__ == "__main__":
    main()
