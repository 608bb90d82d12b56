"""Have TensorFlow write the summaries of `summary_cases`, and record the bytes of its events.

Needs TensorFlow (the recorded answers are of 2.21) and TensorBoard:

    python tests/golden/make_summary.py
"""

import base64
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from summary_cases import write

ANSWERS = Path(__file__).with_name("summary.json")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)
        with writer.as_default():
            write(tf)
        writer.close()
        (path,) = Path(folder).iterdir()
        records = [r.numpy() for r in tf.data.TFRecordDataset(str(path))]
    # Each begins with the time, which is another every time: a tag and eight bytes.
    told = [base64.b64encode(record[9:]).decode() for record in records]
    pixels = {}
    for record in records:
        for value in tf.compat.v1.Event.FromString(record).summary.value:
            if value.metadata.plugin_data.plugin_name == "images":
                images = value.tensor.string_val[2:]
                pixels[value.tag] = [tf.io.decode_png(image).numpy().tolist() for image in images]
    ANSWERS.write_text(json.dumps({"events": told, "pixels": pixels}, indent=0) + "\n")


if __name__ == "__main__":
    main()
