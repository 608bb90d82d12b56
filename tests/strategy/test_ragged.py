"""Compiled steps on replicas that hold different shapes; one device is the oracle."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx

SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN
ON_READ = rx.VariableSynchronization.ON_READ


@pytest.fixture(params=[2, 4], ids=lambda n: f"{n}replicas")
def strategy(request):
    return rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


def ragged(strategy, rows, width=3):
    """``rows`` rows, cut as a short last batch is."""
    x = np.arange(rows * width, dtype=np.float32).reshape(rows, width) / 10
    dataset = rx.data.Dataset.from_tensor_slices(x).batch(rows)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    return batch, x


@settings(max_examples=15)
@given(st.integers(1, 11))
def test_a_training_step_equals_one_device_for_any_number_of_rows(rows):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    batch, x = ragged(strategy, rows)
    with strategy.scope():
        w = rx.Variable(jnp.ones(3))
        seen = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)

    @rx.function
    def train(data):
        def step(part):
            context = rx.distribute.get_replica_context()
            count = context.all_reduce("SUM", jnp.float32(part.shape[0]))
            loss, gradient = rx.value_and_grad(
                lambda: jnp.sum((part @ w.value()) ** 2) / count, w
            )()
            w.assign_sub(0.1 * context.all_reduce("SUM", gradient))
            seen.assign_add(jnp.float32(part.shape[0]))
            return loss

        return strategy.reduce("SUM", strategy.run(step, args=(data,)), axis=None)

    loss = train(batch)

    y = x @ np.ones(3)
    np.testing.assert_allclose(loss, np.mean(y**2), rtol=1e-5)
    np.testing.assert_allclose(w.numpy(), 1 - 0.1 * 2 * x.T @ y / rows, rtol=1e-5)
    assert float(seen) == rows
    rx.debug.check_in_sync([w])


def test_a_replica_without_rows_takes_part(strategy):
    batch, x = ragged(strategy, 1)

    totals = rx.function(
        lambda b: strategy.run(
            lambda p: rx.distribute.get_replica_context().all_reduce("SUM", jnp.sum(p)), args=(b,)
        )
    )(batch)

    assert [float(t) for t in totals.values] == pytest.approx([x.sum()] * len(totals.values))


def test_the_function_is_traced_once_for_each_replica_and_found_again(strategy):
    batch, _ = ragged(strategy, 5)
    traces = []

    @rx.function
    def step(b):
        def fn(part):
            traces.append(part.shape)
            return jnp.sum(part)

        return strategy.run(fn, args=(b,))

    for _ in range(3):
        step(batch)

    assert len(traces) == strategy.num_replicas_in_sync


def test_the_usual_shape_needs_no_new_trace_after_a_ragged_one(strategy):
    n = strategy.num_replicas_in_sync
    even, _ = ragged(strategy, 2 * n)
    uneven, _ = ragged(strategy, 2 * n - 1)
    step = rx.function(lambda b: strategy.run(jnp.sum, args=(b,)))

    step(even)
    step(uneven)
    step(even)

    assert step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("aggregation", [SUM, MEAN, rx.VariableAggregation.ONLY_FIRST_REPLICA])
def test_mirrored_variables_are_written_as_their_aggregation_says(strategy, aggregation):
    batch, _ = ragged(strategy, 5)
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=aggregation)

    rx.function(lambda b: strategy.run(lambda p: v.assign_add(jnp.float32(p.shape[0])), args=(b,)))(
        batch
    )

    rows = [len(p) for p in batch.values]
    expected = {SUM: sum(rows), MEAN: sum(rows) / len(rows)}.get(aggregation, rows[0])
    assert float(v) == pytest.approx(expected)
    rx.debug.check_in_sync([v])


def test_different_writes_without_aggregation_are_refused_and_change_nothing(strategy):
    batch, _ = ragged(strategy, 5)
    with strategy.scope():
        v = rx.Variable(1.0, name="weight")

    with pytest.raises(rx.errors.DivergenceError, match="weight"):
        rx.function(lambda b: strategy.run(lambda p: v.assign(jnp.float32(p.shape[0])), args=(b,)))(
            batch
        )

    assert float(v) == 1.0


def test_python_that_needs_values_runs_op_by_op(strategy):
    batch, x = ragged(strategy, 5)

    def fn(part):
        return jnp.sum(part) if part.size and float(part[0, 0]) >= 0 else jnp.float32(0)

    step = rx.function(lambda b: strategy.reduce("SUM", strategy.run(fn, args=(b,)), axis=None))

    assert float(step(batch)) == pytest.approx(x.sum())
    assert float(step(batch)) == pytest.approx(x.sum())


def test_values_of_different_sizes_are_gathered(strategy):
    batch, x = ragged(strategy, 5)

    rows = rx.function(
        lambda b: strategy.run(
            lambda p: rx.distribute.get_replica_context().all_gather(p, axis=0), args=(b,)
        )
    )(batch)

    for part in rows.values:
        np.testing.assert_array_equal(part, x)


def test_merge_call_sees_all_replicas(strategy):
    batch, _ = ragged(strategy, 5)

    def fn(part):
        return rx.distribute.get_replica_context().merge_call(
            lambda s, n: s.reduce("SUM", n, axis=None), (jnp.float32(part.shape[0]),)
        )

    totals = rx.function(lambda b: strategy.run(fn, args=(b,)))(batch)

    assert [float(t) for t in totals.values] == [5.0] * strategy.num_replicas_in_sync


def test_one_line_in_the_log_names_what_to_change(strategy, caplog):
    batch, _ = ragged(strategy, 5)
    step = rx.function(lambda b: strategy.run(jnp.sum, args=(b,)))

    with caplog.at_level(logging.WARNING, "replicax"):
        step(batch)
        step(batch)

    assert caplog.text.count("drop_remainder=True") == 1


def test_an_exception_names_the_replica_and_leaves_the_strategy_usable(strategy):
    batch, x = ragged(strategy, 5)

    def fails(part):
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside") as caught:
        rx.function(lambda b: strategy.run(fails, args=(b,)))(batch)

    assert "replica 0" in "".join(caught.value.__notes__)
    total = rx.function(
        lambda b: strategy.reduce("SUM", strategy.run(jnp.sum, args=(b,)), axis=None)
    )(batch)
    assert float(total) == pytest.approx(x.sum())
