"""Numbers marked TF were given by tf.nn of TensorFlow 2.21."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import WAYS, components, mirrored, per_replica

average = rx.nn.compute_average_loss
LOSSES = [1.0, 3.0]
MATRIX = [[1.0, 3.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        (LOSSES, {}, 2.0),
        (LOSSES, {"global_batch_size": 8}, 0.5),
        (LOSSES, {"global_batch_size": np.int64(8)}, 0.5),
        ([1, 3], {}, 2.0),
        (LOSSES, {"sample_weight": [1.0, 0.0]}, 0.5),
        (LOSSES, {"sample_weight": 2.0}, 4.0),
        (LOSSES, {"sample_weight": [[1.0], [0.5]]}, 1.25),
        (LOSSES, {"sample_weight": [1, 0]}, 0.5),
        (MATRIX, {}, 4.0),
        (MATRIX, {"sample_weight": [1.0, 0.5]}, 3.0),
        (MATRIX, {"sample_weight": [[1.0], [0.5]]}, 3.0),
        (MATRIX, {"sample_weight": [[1.0, 0.0], [0.5, 1.0]]}, 2.0),
        (np.zeros(0), {}, 0.0),
        (np.zeros(0), {"global_batch_size": 4}, 0.0),
        (LOSSES, {"global_batch_size": 0}, 0.0),
    ],
)
def test_the_default_strategy_gives_tensorflows_numbers(losses, options, expected):
    result = average(jnp.asarray(losses), **options)

    assert float(result) == expected  # TF
    assert float(jax.jit(lambda x: average(x, **options))(jnp.asarray(losses))) == expected


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_dtype_of_the_losses_is_kept(dtype):
    assert average(jnp.asarray(LOSSES, dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("losses", "options", "error", "words"),
    [
        (1.0, {}, ValueError, "per_example_loss is a scalar"),
        (1.0, {"global_batch_size": 2}, ValueError, "per_example_loss is a scalar"),
        (LOSSES, {"global_batch_size": 8.0}, TypeError, "must be an integer, got 8.0"),
        (LOSSES, {"global_batch_size": -1}, ValueError, "must not be negative, got -1"),
        (LOSSES, {"global_batch_size": [2]}, ValueError, r"must be a scalar, got shape \(1,\)"),
        (LOSSES, {"sample_weight": [1.0, 2.0, 3.0]}, ValueError, "one weight for each example"),
        (LOSSES, {"sample_weight": [[1.0, 2.0]]}, ValueError, "one weight for each example"),
    ],
)
def test_what_makes_no_sense_is_refused(losses, options, error, words):
    with pytest.raises(error, match=words):
        average(jnp.asarray(losses), **options)


@pytest.mark.parametrize("way", WAYS)
def test_the_shares_of_all_replicas_add_up_to_the_mean(way):
    strategy = mirrored(4)
    own = per_replica(strategy, list(jnp.arange(8.0).reshape(4, 2)))

    shares = way(strategy, average, own)

    assert float(strategy.reduce("SUM", shares, axis=None)) == 3.5


@settings(max_examples=10)
@given(sizes=st.lists(st.integers(0, 4), min_size=2, max_size=2).filter(any))
def test_with_a_batch_size_uneven_replicas_add_up_to_the_mean(sizes):
    strategy = mirrored(2)
    numbers = np.arange(sum(sizes), dtype=np.float32) + 1
    parts = np.split(numbers, [sizes[0]])
    value = rx.distribute.PerReplica([jnp.asarray(p) for p in parts])

    shares = strategy.run(lambda x: average(x, global_batch_size=len(numbers)), args=(value,))

    total = float(strategy.reduce("SUM", shares, axis=None))
    assert total == pytest.approx(float(numbers.mean()), rel=1e-6)


def test_summed_gradients_are_the_gradient_of_the_mean():
    strategy = mirrored(2)
    own = per_replica(strategy, [jnp.asarray([1.0, 2.0]), jnp.asarray([3.0, 4.0])])

    gradient = strategy.run(lambda x: jax.grad(lambda w: average(w * x))(1.0), args=(own,))

    assert float(strategy.reduce("SUM", gradient, axis=None)) == 2.5


def test_a_share_needs_a_replica():
    with mirrored(2).scope():
        with pytest.raises(RuntimeError, match="belongs in the replica function"):
            average(jnp.asarray(LOSSES))
        assert float(average(jnp.asarray(LOSSES), global_batch_size=2)) == 2.0
        with pytest.raises(RuntimeError, match="scale_regularization_loss belongs"):
            rx.nn.scale_regularization_loss(jnp.ones(2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("loss", "expected"), [([2.0, 4.0], 3.0), (3, 1.5), (3.0, 1.5)])
def test_a_regularization_loss_is_divided_by_the_replicas(way, loss, expected):
    result = way(mirrored(2), lambda: rx.nn.scale_regularization_loss(loss))

    assert components(result) == [expected] * 2  # TF


def test_outside_of_strategies_a_regularization_loss_is_summed():
    assert float(rx.nn.scale_regularization_loss(jnp.asarray([2.0, 4.0]))) == 6.0


# The mean over the global batch.


def _share(x, weights):
    return rx.nn.mean_loss(x, weights)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8, deadline=None)
@given(
    rows=st.lists(st.integers(0, 3), min_size=2, max_size=2).filter(any), seed=st.integers(0, 99)
)
def test_mean_loss_shares_add_up_to_the_mean_of_all_rows(way, rows, seed):
    draw = np.random.default_rng(seed)
    losses = [draw.normal(size=(n, 2)).astype("float32") for n in rows]
    weights = [draw.integers(0, 3, size=(n, 1)).astype("float32") for n in rows]
    strategy = mirrored(2)
    together = np.concatenate(losses)
    mean = together.mean() if len(together) else 0.0

    share = way(strategy, _share, per_replica(strategy, losses), None)
    weighted = way(strategy, _share, per_replica(strategy, losses), per_replica(strategy, weights))

    total = strategy.reduce("SUM", share, axis=None)
    np.testing.assert_allclose(float(total), mean, rtol=1e-5, atol=1e-6)
    every = np.concatenate(weights) * np.ones_like(together)
    expected = (together * every).sum() / every.sum() if every.sum() else 0.0
    total = strategy.reduce("SUM", weighted, axis=None)
    np.testing.assert_allclose(float(total), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient", ["rx", "jax"])
@pytest.mark.parametrize("rows", [(4, 4), (4, 3), (5, 0)])
def test_mean_loss_gradients_sum_to_the_gradient_on_one_device(rows, gradient):
    x = np.random.default_rng(0).normal(size=(sum(rows), 3)).astype("float32")
    strategy = mirrored(2)
    with strategy.scope():
        w = rx.Variable(jnp.ones(3))

    def step(x):
        if gradient == "rx":
            [g] = rx.grad(lambda: rx.nn.mean_loss(jnp.square(x @ w)), [w])()
        else:
            g = jax.grad(lambda v: rx.nn.mean_loss(jnp.square(x @ v)))(w.read_value())
        return rx.distribute.get_replica_context().all_reduce("SUM", g)

    parts = per_replica(strategy, np.split(x, [rows[0]]))
    summed = components(rx.function(lambda x: strategy.run(step, args=(x,)))(parts))

    expected = jax.grad(lambda v: jnp.mean(jnp.square(x @ v)))(jnp.ones(3))
    np.testing.assert_allclose(summed[0], expected, rtol=1e-5)


def test_mean_loss_counts_exactly_in_half_precision():
    mean = rx.nn.mean_loss(jnp.ones(257 * 3, jnp.bfloat16))
    assert mean.dtype == jnp.bfloat16
    assert float(mean) == 1.0


def test_mean_loss_refuses_a_scalar_and_cross_replica_context():
    with pytest.raises(ValueError, match="let mean_loss divide"):
        rx.nn.mean_loss(jnp.float32(1))
    with mirrored(2).scope(), pytest.raises(RuntimeError, match="replica function"):
        rx.nn.mean_loss(jnp.ones(2))
