"""Accumulated gradients: those of the whole batch on one device, kept in shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import context, mirrored

SHAPES = [(128, 64), (3, 64, 64), (64,)]


def _train(strategy, rows, k=None, *, mask=False, eager=False, **options):
    """Return the losses and weights of two steps, and the text of the program."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [rx.Variable(rng.normal(size=s).astype("f4") / 8) for s in SHAPES]
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))

    def loss(x, keep):
        h, _ = jax.lax.scan(layer, x @ weights[0] + weights[2], weights[1].read_value())
        losses = jnp.square(h).sum(-1)
        decay = rx.nn.scale_regularization_loss(jnp.sum(weights[0] ** 2))
        return rx.nn.mean_loss(losses, keep if mask else None) + 1e-3 * decay

    def replica_step(x, keep):
        compute = rx.value_and_grad(loss, weights)
        if k is not None:
            compute = rx.accumulate(compute, k, **options)
        value, gradients = compute(x, keep)
        for w, g in zip(weights, context().all_reduce("SUM", gradients), strict=True):
            w.assign_sub(0.1 * g)
        return value

    def step(x, keep):
        return strategy.reduce("SUM", strategy.run(replica_step, (x, keep)), axis=None)

    call = step if eager else rx.function(step)
    x, keep = rng.normal(size=(rows, 128)).astype("f4"), np.arange(rows) % 3 > 0
    data = rx.data.Dataset.from_tensor_slices((x, keep.astype("f4"))).batch(rows).repeat(2)
    losses = [float(call(*batch)) for batch in strategy.experimental_distribute_dataset(data)]
    is_even = rows % strategy.num_replicas_in_sync == 0 and not eager
    first = next(iter(strategy.experimental_distribute_dataset(data)))
    text = call.get_concrete_function(*first).as_text() if is_even else ""
    return losses, [w.numpy() for w in weights], text


def _assert_equal(one, other):
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for a, b in zip(one[1], other[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "k"),
    [
        pytest.param(32, 4, marks=pytest.mark.slow),
        (24, 4),
        (7, 3),
        pytest.param(2, 3, marks=pytest.mark.slow),
    ],
    ids=["even", "rest", "short", "no rows"],
)
def test_accumulate_equals_the_whole_batch_on_one_device(rows, k):
    found = _train(mirrored(4, variable_policy="sharded"), rows, k)

    _assert_equal(_train(mirrored(1), rows), found)


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5, 100])
def test_accumulate_of_mirrored_variables_equals_the_whole_batch(k, eager):
    _assert_equal(_train(mirrored(1), 16), _train(mirrored(4), 16, k, eager=eager))


def test_accumulate_weights_parts_by_a_function():
    weigh = lambda x, keep: keep.sum()  # noqa: E731

    found = _train(mirrored(2), 12, 3, mask=True, weight=weigh)

    _assert_equal(_train(mirrored(1), 12, mask=True), found)


def test_accumulate_keeps_gradients_in_shards():
    text = _train(mirrored(4, variable_policy="sharded"), 32, 4)[2]

    found = re.findall(r"= \w+\[([\d,]+)\]\S* (reduce-scatter|all-reduce)\(", text)
    assert sorted(s for s, kind in found if kind == "reduce-scatter") == ["16,64", "32,64"]
    assert not [s for s, kind in found if kind == "all-reduce" and s != "64"]
    assert " reduce-scatter(" not in text[text.index("\nENTRY") :]  # but in the loop


def test_accumulate_keeps_types_and_assignments():
    w, calls = rx.Variable(jnp.ones(3, jnp.bfloat16)), rx.Variable(0)

    def loss(x):
        calls.assign_add(1)
        return jnp.mean(x @ w.read_value()), {"count": jnp.ones((), jnp.int32)}

    compute = rx.accumulate(rx.value_and_grad(loss, w, has_aux=True), 2)
    (value, aux), gradient = rx.function(compute)(jnp.ones((4, 3), jnp.bfloat16))

    assert (value.dtype, gradient.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert (float(aux["count"]), int(calls.numpy())) == (1.0, 2)
    total = rx.accumulate(lambda x: jnp.ones((), jnp.int32), 3, reduction="sum")(np.ones(3))
    assert (int(total), total.dtype) == (3, jnp.int32)


def test_accumulate_rejects_losses_that_would_differ():
    losses = jnp.ones(4)
    weighted = rx.accumulate(lambda x: rx.nn.mean_loss(x, x), 2)
    global_size = lambda x: rx.nn.compute_average_loss(x, global_batch_size=4)  # noqa: E731

    with pytest.raises(RuntimeError, match="weight=lambda"):
        weighted(losses)
    with pytest.raises(RuntimeError, match='reduction="sum"'):
        rx.accumulate(global_size, 2)(losses)
    with pytest.raises(RuntimeError, match="would be too large"):
        rx.accumulate(rx.nn.mean_loss, 2, reduction="sum")(losses)
    assert float(rx.accumulate(global_size, 2, reduction="sum")(losses)) == 1.0


def test_accumulate_rejects_wrong_arguments():
    with pytest.raises(ValueError, match="positive number of parts, got 0"):
        rx.accumulate(jnp.sum, 0)
    with pytest.raises(ValueError, match="no reduction 'max'"):
        rx.accumulate(jnp.sum, 2, reduction="max")
    with pytest.raises(TypeError, match="close over everything else"):
        rx.accumulate(jnp.sum, 2)(3.0)
    with pytest.raises(ValueError, match="numbers of rows"):
        rx.accumulate(jnp.add, 2)(jnp.ones(2), jnp.ones(3))


@pytest.mark.parametrize(
    ("rows", "eager"),
    [
        (13, False),
        (3, False),  # one replica has no rows
        (9, True),
        *(pytest.param(rows, False, marks=pytest.mark.slow) for rows in (16, 9)),
        *(pytest.param(rows, True, marks=pytest.mark.slow) for rows in (16, 13, 3)),
    ],
)
def test_accumulate_of_plain_means_equals_one_call_on_unequal_replicas(rows, eager):
    """The law: `accumulate` changes no result, whatever mixture of means a function returns."""
    strategy, rng = mirrored(4), np.random.default_rng(1)
    with strategy.scope():
        w = rx.Variable(rng.normal(size=6).astype("f4"))
    x = rng.normal(size=(rows, 6)).astype("f4")
    batches = rx.data.Dataset.from_tensor_slices(x).batch(rows)
    batch = next(iter(strategy.experimental_distribute_dataset(batches)))

    def loss(x):
        plain, share = jnp.square(x @ w), rx.nn.mean_loss(jnp.abs(x @ w))
        decay = rx.nn.scale_regularization_loss(jnp.sum(w**2))
        return jnp.mean(plain) / 4 + share + decay, (jnp.mean(x, axis=0), share)

    def results(k):
        compute = rx.value_and_grad(loss, w, has_aux=True)
        step = lambda x: (compute if k is None else rx.accumulate(compute, k))(x)  # noqa: E731
        call = lambda x: strategy.run(step, (x,))  # noqa: E731
        found = (call if eager else rx.function(call))(batch)
        return [strategy.experimental_local_results(v) for v in jax.tree.leaves(found)]

    expected = results(None)
    for k in (1, 3, 5):
        for one, other in zip(expected, results(k), strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_accumulate_of_weights_that_differ_between_replicas_equals_one_call():
    strategy, rng = mirrored(4), np.random.default_rng(2)
    x = rng.normal(size=(16, 3)).astype("f4")
    keep = (rng.random((16, 3)) < 0.4).astype("f4")
    keep[:4] = 0  # replica 0 has no weight at all
    keep[4:6] = 0
    data = rx.data.Dataset.from_tensor_slices((x, keep)).batch(16)
    batch = next(iter(strategy.experimental_distribute_dataset(data)))

    def means(x, keep):
        local = jnp.sum(x * keep) / jnp.maximum(jnp.sum(keep), 1)
        return local, rx.nn.mean_loss(x, keep), rx.nn.scale_regularization_loss(jnp.float32(3))

    weigh = lambda x, keep: keep.sum()  # noqa: E731
    for k in (1, 2, 3):
        some = lambda x, keep, k=k: rx.accumulate(means, k, weight=weigh)(x, keep)  # noqa: E731
        found = [rx.function(lambda *b, f=f: strategy.run(f, b))(*batch) for f in (means, some)]
        for values in zip(*found, strict=True):
            one, other = map(strategy.experimental_local_results, values)
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eager", [False, True])
def test_accumulate_rejects_collectives_that_replicas_would_weight_differently(eager):
    strategy = mirrored(2)
    data = rx.data.Dataset.from_tensor_slices(np.arange(7.0, dtype="f4")).batch(7)
    (batch,) = strategy.experimental_distribute_dataset(data)
    total = lambda x: context().all_reduce("SUM", jnp.sum(x))  # noqa: E731

    def run(k, **options):
        call = lambda x: strategy.run(rx.accumulate(total, k, **options), (x,))  # noqa: E731
        return (call if eager else rx.function(call))(batch)

    with pytest.raises(RuntimeError, match=r"Reduce the result of rx\.accumulate"):
        run(3)
    for found in (run(1), run(3, reduction="sum")):
        assert [float(x) for x in strategy.experimental_local_results(found)] == [21.0, 21.0]


def test_accumulate_by_weight_rejects_losses_without_weights():
    with pytest.raises(RuntimeError, match="got no weights inside"):
        rx.accumulate(rx.nn.mean_loss, 2, weight=lambda x: x.sum())(jnp.ones(4))
