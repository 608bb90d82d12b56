"""Train a model in one combination, and go on from its checkpoint in another: for each worker.

combined NAME OTHER FOLDER: names of `tests.combinations.COMBINATIONS`. Worker 0 writes the losses
and the weights to ``found.npz`` in the folder.
"""

import json
import os
import sys

import numpy as np

import replicax as rx
from tests.combinations import COMBINATIONS, Model


def main():
    name, other, folder = sys.argv[1:]
    model = Model(strategy(name))
    losses = model.train()
    path = model.checkpoint().save(f"{folder}/checkpoint")

    again = Model(strategy(other))
    again.checkpoint().restore(path).assert_consumed()
    losses += again.train(seed=2)

    weights = {n.replace("/", "."): x for n, x in again.numbers().items()}
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        np.savez(f"{folder}/found.npz", losses=losses, **weights)


def strategy(name):
    return rx.distribute.MultiWorkerMirroredStrategy(**COMBINATIONS[name])


if __name__ == "__main__":
    main()
