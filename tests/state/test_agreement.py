"""What replicas write to one mirrored variable, in every mode; NumPy is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.base.errors import DivergenceError
from tests.replicas import WAYS, context, mirrored, per_replica

MODES = ["eager", "compiled", "short"]


def batch_of(strategy, mode, sizes=None):
    """Rows for each replica: as many for all, or another number for the last."""
    count = strategy.num_replicas_in_sync
    sizes = sizes or [3] * (count - 1) + [2 if mode == "short" else 3]
    return per_replica(strategy, [np.zeros((n, 1), np.float32) for n in sizes])


def run(strategy, mode, step, batch):
    way = WAYS[0] if mode == "eager" else WAYS[1]
    return way(strategy, step, batch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", [(0.0, -0.0), (-0.0, 0.0), (np.nan, np.nan), (2.0, 2.0)])
def test_equal_numbers_agree_and_all_copies_hold_one_to_the_bit(mode, values, two):
    with two.scope():
        v = rx.Variable(1.0)
    given_values = per_replica(two, [np.float32(x) for x in values])

    def step(_, value):
        v.assign(value)

    way = WAYS[0] if mode == "eager" else WAYS[1]
    way(two, step, batch_of(two, mode), given_values)

    np.testing.assert_array_equal(v.numpy(), np.float32(values[0]))
    rx.debug.check_in_sync([v])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("values", [(0.0, 1.0), (np.nan, 1.0), (1.0, np.nan)])
def test_different_numbers_are_refused_and_nothing_is_written(mode, values, two):
    with two.scope():
        v = rx.Variable(5.0, name="weight")
    given_values = per_replica(two, [np.float32(x) for x in values])

    def step(_, value):
        v.assign(value)

    way = WAYS[0] if mode == "eager" else WAYS[1]
    with pytest.raises(DivergenceError, match="weight"):
        way(two, step, batch_of(two, mode), given_values)
    assert [float(c) for c in v.components] == [5.0, 5.0]


@settings(max_examples=12)
@given(
    st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3),
    st.sampled_from(MODES),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_a_cell_that_averages_takes_the_mean_where_replicas_differ(values, mode, dtype):
    strategy = mirrored(3)
    with strategy.scope():
        v = rx.Variable(1.0, dtype=dtype)
    v.cell.averages = True
    given_values = per_replica(strategy, [np.asarray(x, dtype) for x in values])

    def step(_, value):
        v.assign(value)

    way = WAYS[0] if mode == "eager" else WAYS[1]
    way(strategy, step, batch_of(strategy, mode), given_values)

    written = [np.asarray(x, dtype) for x in values]
    alike = all(w == written[0] for w in written)
    expected = written[0] if alike else np.mean([w.astype(np.float32) for w in written])
    np.testing.assert_allclose(
        np.float32(v.numpy()), np.float32(np.asarray(expected, dtype)), rtol=1e-2, atol=1e-6
    )
    rx.debug.check_in_sync([v])


@pytest.mark.parametrize("way", WAYS)
def test_replicas_without_rows_take_no_part_in_the_mean(way, four):
    with four.scope():
        mean = rx.Variable(jnp.zeros(1))
    mean.cell.averages = True
    rows = [np.full((n, 1), k + 1.0, np.float32) for k, n in enumerate((2, 1, 0, 0))]

    def step(x):
        mean.assign(0.5 * mean + 0.5 * x.mean(0))  # of no rows: NaN

    way(four, step, per_replica(four, rows))

    assert [float(c.read_value()[0]) for c in mean.components] == [0.75] * 4


@pytest.mark.parametrize("mode", MODES)
def test_statistics_that_depend_on_the_weights_are_kept_by_value_and_grad(mode, two):
    with two.scope():
        w, mean, calls = rx.Variable(2.0), rx.Variable(0.0), rx.Variable(0.0)
    mean.cell.averages = True

    def step(x):
        def loss():
            calls.assign_add(1.0)
            mean.assign((w * x).mean())
            return (w * x).sum() + 0 * calls.value()

        return rx.value_and_grad(loss, w)()[1]

    sizes = [3, 2 if mode == "short" else 3]
    rows = [np.full((n, 1), k + 1.0, np.float32) for k, n in enumerate(sizes)]
    gradients = run(two, mode, step, per_replica(two, rows))

    assert [float(g) for g in gradients.values] == [sizes[0] * 1.0, sizes[1] * 2.0]
    assert (float(mean), float(calls)) == (3.0, 1.0)
    rx.debug.check_in_sync([mean, calls])


@pytest.mark.parametrize("mode", MODES)
def test_different_values_written_in_value_and_grad_are_refused(mode, two):
    with two.scope():
        w, kept = rx.Variable(2.0), rx.Variable(7.0, name="kept")

    def step(x):
        def loss():
            kept.assign((w * x).sum())
            return w * 1.0

        rx.value_and_grad(loss, w)()

    sizes = [3, 2 if mode == "short" else 3]
    rows = [np.full((n, 1), k + 1.0, np.float32) for k, n in enumerate(sizes)]
    with pytest.raises(DivergenceError, match="kept"):
        run(two, mode, step, per_replica(two, rows))
    assert [float(c) for c in kept.components] == [7.0, 7.0]


@pytest.mark.parametrize("mode", MODES)
def test_what_value_and_grad_wrote_is_seen_by_the_next_write_in_it(mode, two):
    with two.scope():
        w, v = rx.Variable(2.0), rx.Variable(0.0)

    def step(_):
        def loss():
            v.assign(w * 3.0)
            v.assign_add(1.0)  # a plain number, after one that exists in the gradient only
            w.assign(5.0)
            return w * v

        return rx.value_and_grad(loss, w)()

    value, gradient = run(two, mode, step, batch_of(two, mode))

    assert [float(x) for x in value.values] == [35.0, 35.0]
    assert [float(x) for x in gradient.values] == [15.0, 15.0]
    assert (float(v), float(w)) == (7.0, 5.0)


@pytest.mark.parametrize("mode", MODES)
def test_merge_call_is_differentiated(mode, two):
    with two.scope():
        w = rx.Variable(2.0)

    def step(x):
        def loss():
            mine = w * x.sum()
            total = context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None), (mine,))
            return total * total

        return rx.grad(loss, w)()

    sizes = [3, 2 if mode == "short" else 3]
    rows = [np.full((n, 1), k + 1.0, np.float32) for k, n in enumerate(sizes)]
    gradients = run(two, mode, step, per_replica(two, rows))

    total = sum(r.sum() for r in rows)
    # The gradient of an all-reduced value is all-reduced: both losses depend on both parts.
    expected = [float(2 * (2 * 2 * total) * r.sum()) for r in rows]
    assert [float(g) for g in gradients.values] == pytest.approx(expected)


def test_a_variable_is_made_once_inside_an_eager_gradient(two):
    with two.scope():
        w = rx.Variable(2.0)
    made = []

    def step(x):
        def loss():
            v = rx.Variable(3.0)
            made.append(v)
            return w * v * x.sum()

        return rx.grad(loss, w)()

    two.run(step, args=(jax.numpy.ones(2),))

    assert len(made) == 2
    assert made[0] is made[1]
