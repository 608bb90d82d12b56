"""The tutorials' Keras programs give TensorFlow's losses, by a change of the import alone."""

import json
from pathlib import Path

import numpy as np
import pytest

import replicax as rx
from replicax.testing import run_in_processes
from tests.golden import keras_cases

ANSWERS = json.loads((Path(__file__).parents[1] / "golden" / "keras.json").read_text())
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def assert_as_tensorflow(result, name):
    assert result.keys() == ANSWERS[name].keys()
    for key, values in ANSWERS[name].items():
        np.testing.assert_allclose(result[key], values, **TOLERANCE, err_msg=key)


@pytest.mark.parametrize(
    "program",
    [keras_cases.fit, keras_cases.loop, keras_cases.loop_workers],
    ids=lambda p: p.__name__,
)
def test_two_replicas_give_tensorflows_losses(program, two):
    assert_as_tensorflow(program(rx, two), program.__name__)


def as_worker():
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    return {
        program.__name__: {
            name: [float(v) for v in values] for name, values in program(rx, strategy).items()
        }
        for program in (keras_cases.fit, keras_cases.loop_workers)
    }


@pytest.mark.multi_process
def test_two_workers_give_tensorflows_losses():
    for results in run_in_processes(as_worker, 2, 1):
        for name, result in results.items():
            assert_as_tensorflow(result, name)
