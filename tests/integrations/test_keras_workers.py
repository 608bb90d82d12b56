"""Keras under several workers: one model, one progress bar, every row once."""

import os

import numpy as np
import pytest

from replicax.testing import run_in_processes
from tests.integrations import keras_workers
from tests.integrations.keras_loops import alone, batches, weights
from tests.integrations.test_keras import clipped_momentum_with_regularizer
from tests.integrations.test_keras_trainer import ARRAYS, BATCH, TOLERANCE, X, Y, stock_fit

pytestmark = pytest.mark.multi_process


def assert_as_stock(report):
    model, history = stock_fit()
    for a, b in zip(report["weights"], weights(model), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
    for name, values in history.history.items():
        np.testing.assert_allclose(report["history"][name], values, **TOLERANCE)


def test_workers_fit_evaluate_and_predict_as_one(tmp_path):
    results = run_in_processes(keras_workers.train, 2, 2, args=(str(tmp_path),))

    stock, _ = stock_fit()
    expected = stock.predict(X, verbose=0)
    for report in results:
        assert_as_stock(report["arrays"])
        assert_as_stock(report["dataset"])
        np.testing.assert_allclose(
            report["evaluate"], stock.evaluate(X, Y, BATCH, verbose=0), **TOLERANCE
        )
        for name in ("predict", "predict dataset", "predict distributed"):
            np.testing.assert_allclose(report[name], expected, **TOLERANCE)
        np.testing.assert_allclose(report["eager"], expected[:3], **TOLERANCE)
    assert [report["shown"] > 0 for report in results] == [True, False]
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]


def test_predictions_are_one_devices_whatever_rows_they_have():
    alone = keras_workers.Places()
    expected = [alone.predict(rows, BATCH, verbose=0) for rows in (X, X, X[: 4 * BATCH])]

    for report in run_in_processes(keras_workers.predict_places, 2, 2):
        for got, wanted in zip(report, expected, strict=True):
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a, b, **TOLERANCE)


def test_stock_callbacks_do_on_workers_what_they_do_on_one_device(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    stock = keras_workers.averaged_net()
    callbacks = keras_workers.stock_callbacks(alone)
    history = stock.fit(**ARRAYS, epochs=5, verbose=0, callbacks=callbacks)

    for report in run_in_processes(keras_workers.callbacks, 2, 2, args=(str(tmp_path),)):
        assert report["history"].keys() == history.history.keys()
        for name, values in history.history.items():
            np.testing.assert_allclose(report["history"][name], values, **TOLERANCE)
        for a, b in zip(report["weights"], weights(stock), strict=True):
            np.testing.assert_allclose(a, b, **TOLERANCE)
    files = [sorted(os.listdir(tmp_path / name)) for name in ("alone", "0", "1")]
    assert files[0] == ["01.keras", "02.keras", "all.weights.h5", "log.csv"]
    assert files[1:] == [files[0], []]


def test_every_policy_lets_fit_and_predict_meet_the_rows_that_it_should(tmp_path):
    rows = sum(keras_workers.FILES)
    numbers = iter(range(rows))
    for k, size in enumerate(keras_workers.FILES):
        lines = [f"{next(numbers)}\n" for _ in range(size)]
        (tmp_path / f"{k}.txt").write_text("".join(lines))

    for report in run_in_processes(keras_workers.policies, 2, 1, args=(str(tmp_path),)):
        for name, times in (("FILE", 1), ("OFF", 2), ("OFF, sharded by hand", 1)):
            assert report[name] == [times] * rows
            assert report[f"{name}, predicted"] == sorted([*range(rows)] * times)


@pytest.mark.slow
def test_workers_run_eagerly_with_the_same_numbers():
    stock, _ = stock_fit()
    for report in run_in_processes(keras_workers.eager, 2, 2):
        assert_as_stock(report)
        evaluated = stock.evaluate(X, Y, BATCH, verbose=0)
        np.testing.assert_allclose(report["evaluate"], evaluated, **TOLERANCE)
        for name in ("predict", "predict dataset"):
            np.testing.assert_allclose(report[name], stock.predict(X, verbose=0), **TOLERANCE)


@pytest.mark.slow
def test_workers_shuffle_alike_whatever_their_seeds():
    a, b = run_in_processes(keras_workers.shuffle, 2, 2)

    assert a == b


@pytest.mark.slow
def test_workers_step_together_in_a_custom_loop():
    losses, expected, steps, error = alone(clipped_momentum_with_regularizer, batches())

    for report in run_in_processes(keras_workers.loop, 2, 1):
        np.testing.assert_allclose(report["losses"], losses, **TOLERANCE)
        for a, b in zip(report["weights"], expected, strict=True):
            np.testing.assert_allclose(a, b, **TOLERANCE)
        assert report["steps"] == steps
        np.testing.assert_allclose(report["error"], error, **TOLERANCE)


@pytest.mark.slow
def test_workers_continue_with_a_custom_loop_where_it_was_interrupted(tmp_path):
    chief, other = run_in_processes(keras_workers.resumed, 2, 1, args=(str(tmp_path),))

    told = [[line[:13] for line in run["told"].splitlines()] for run in chief]
    assert told == [["Epoch 1: loss"], ["Goes on after"], ["Goes on after", "Epoch 2: loss"]]
    assert [run["told"] for run in other] == ["", "", ""]
    for a, b in zip(chief, other, strict=True):
        np.testing.assert_equal(a["weights"], b["weights"])
    first, again, second = (run["weights"] for run in chief)
    np.testing.assert_equal(again, first)
    assert (second[0] != first[0]).any()
    assert os.listdir(tmp_path) == ["ckpt-2"]
