"""Metrics against what TensorFlow's Keras answered, on one device and on uneven replicas."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import mirrored

CASES = json.loads((Path(__file__).parents[1] / "golden" / "metrics.json").read_text())
BATCHES = (slice(0, 4), slice(4, 7))


def named(case):
    return f"{case['name']}{case['options'] or ''}{'' if case['weights'] is None else '-weighted'}"


def made(case):
    return getattr(rx.metrics, case["name"])(**case["options"])


def batches(case):
    """The arguments of update_state, for each batch."""
    arguments = [np.asarray(a, np.int32 if _ints(a) else np.float32) for a in case["arguments"]]
    weights = [] if case["weights"] is None else [np.asarray(case["weights"], np.float32)]
    return [tuple(a[batch] for a in arguments + weights) for batch in BATCHES]


def _ints(a):
    return np.asarray(a).dtype.kind == "i"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_results_are_those_of_keras(case):
    metric, results = made(case), []
    for arguments in batches(case):
        metric.update_state(*arguments)
        results.append(float(metric.result()))

    np.testing.assert_allclose(results, case["results"], rtol=2e-5, atol=1e-6)


ONE_OF_EACH = list({c["name"]: c for c in CASES if c["weights"] is not None}.values())


@pytest.mark.parametrize("case", ONE_OF_EACH, ids=named)
def test_replicas_with_different_numbers_of_rows_count_every_row_once(case):
    strategy = mirrored(3)
    with strategy.scope():
        metric = made(case)

    for arguments, cuts in zip(batches(case), ([1, 3], [1, 1]), strict=True):
        parts = [rx.distribute.PerReplica(np.split(a, cuts)) for a in arguments]
        strategy.run(metric.update_state, args=tuple(parts))

    np.testing.assert_allclose(metric.result(), case["results"][-1], rtol=2e-5, atol=1e-6)
    metric.reset_states()
    assert float(metric.result()) == 0.0


def test_a_label_that_does_not_exist_is_not_among_the_best():
    metric = rx.metrics.SparseTopKCategoricalAccuracy(k=3)

    assert float(metric([-1, 5, 1], [[0.1, 0.2, 0.3]] * 3)) == pytest.approx(1 / 3)


def test_errors_of_rows_without_axes_count_each_row():
    metric = rx.metrics.MeanSquaredError()
    metric.update_state(jnp.zeros(3), jnp.ones(3))
    metric.update_state(jnp.zeros(1), jnp.ones(1) * 3)

    assert float(metric.result()) == 3.0  # Keras counts each batch as one: 5.0


BAD = {
    "sizes": (rx.metrics.MeanSquaredError, [1.0, 2.0], [1.0, 2.0, 3.0], "must be the same"),
    "an outer product": (rx.metrics.MeanAbsoluteError, [[1.0, 2.0]], [[1.0], [2.0]], "same"),
    "one-hot for numbers": (
        rx.metrics.SparseCategoricalAccuracy,
        [[0.0, 1.0]],
        [[0.5, 0.5]],
        "without `Sparse`",
    ),
}


@pytest.mark.parametrize(("kind", "true", "pred", "words"), BAD.values(), ids=BAD)
def test_what_cannot_be_compared_is_refused_with_the_shapes(kind, true, pred, words):
    with pytest.raises(rx.errors.InvalidArgumentError, match=words):
        kind().update_state(true, pred)
