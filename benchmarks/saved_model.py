"""A saved model: from the start of the process to its first result, against the model's own code.

    python benchmarks/saved_model.py [--quick]

One side loads a Keras model with `rx.saved_model.load` and calls it; the other imports Keras,
builds the model, restores its checkpoint and calls it, compiled. A process for every time, in turn;
half of the pairs begin with the one, half with the other.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

CODE = """
import numpy as np
import replicax as rx
keras = rx.keras
layers = keras.layers

def model():
    parts = [layers.Input((32, 32, 3))]
    for width in (16, 16, 32, 32, 64, 64):
        parts += [layers.Conv2D(width, 3, padding="same", use_bias=False)]
        parts += [layers.BatchNormalization(), layers.ReLU()]
    return keras.Sequential([*parts, layers.GlobalAveragePooling2D(), layers.Dense(10)])
"""
SAVE = """
m = model()
rx.saved_model.save(m, FOLDER + "/model")
rx.train.Checkpoint(model=m).write(FOLDER + "/weights")
"""
RESTORE = """
m = model()
rx.train.Checkpoint(model=m).read(FOLDER + "/weights").assert_existing_objects_matched()
result = rx.function(lambda x: m(x, training=False))(np.ones((8, 32, 32, 3), np.float32))
assert np.asarray(result).shape == (8, 10)
"""
LOAD = """
import numpy as np
import replicax as rx
result = rx.saved_model.load(FOLDER + "/model")(np.ones((8, 32, 32, 3), np.float32))
assert np.asarray(result).shape == (8, 10)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="A saved model against the model's own code.")
    parser.add_argument("--quick", action="store_true", help="three pairs, to try it out")
    pairs = 3 if parser.parse_args().quick else 15
    with tempfile.TemporaryDirectory() as folder:
        given = f"FOLDER = {folder!r}\n"
        _seconds(given + CODE + SAVE)
        sides = {"load": given + LOAD, "restore": given + CODE + RESTORE}
        ratios = []
        for pair in range(pairs):
            order = list(sides) if pair % 2 else list(sides)[::-1]
            took = {name: _seconds(sides[name]) for name in order}
            ratios.append(took["load"] / took["restore"])
    print(
        f"start to first result, loaded / built and restored: {statistics.median(ratios):.2f}"
        f" ({min(ratios):.2f}..{max(ratios):.2f}, {pairs} pairs, target 0.7)"
    )


def _seconds(program: str) -> float:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
