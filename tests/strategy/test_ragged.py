"""Compiled steps on replicas that hold different shapes; one device is the oracle."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import per_replica

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


def test_a_function_that_makes_variables_is_compiled_also_if_its_first_batch_is_short(strategy):
    batch, x = ragged(strategy, 5)
    made, runs = [], []

    def fn(part):
        runs.append(1)
        if not made:
            made.append(rx.Variable(1.0, aggregation=SUM))
        made[0].assign_add(jnp.sum(part))

    step = rx.function(lambda b: strategy.run(fn, args=(b,)))
    with strategy.scope():
        step(batch)
    count = len(runs)
    step(batch)

    assert len(runs) == count  # op by op, Python would run again
    assert float(made[0]) == pytest.approx(1 + 2 * x.sum())


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


def test_independent_collectives_do_not_swap(strategy):
    batch, x = ragged(strategy, 5)

    def fn(part):
        context = rx.distribute.get_replica_context()
        total = context.all_reduce("SUM", jnp.sum(part))
        rows = context.all_reduce("SUM", jnp.float32(len(part)))
        return jnp.stack([total, rows, *(context.all_reduce("MEAN", k * rows) for k in range(4))])

    found = rx.function(lambda b: strategy.run(fn, args=(b,)))(batch)

    for part in found.values:
        np.testing.assert_allclose(part, [x.sum(), 5, 0, 5, 10, 15], rtol=1e-6)


def test_collectives_that_shapes_decide_on_are_refused_with_advice(strategy):
    batch, _ = ragged(strategy, 1)

    def fn(part):
        context = rx.distribute.get_replica_context()
        return context.all_reduce("SUM", jnp.sum(part)) if len(part) else jnp.float32(0)

    with pytest.raises(rx.errors.ReplicaError, match=r"shapes decide.*replica 0 all_reduce.*none"):
        rx.function(lambda b: strategy.run(fn, args=(b,)))(batch)


@pytest.mark.parametrize("first_is_empty", [False, True])
def test_a_metric_that_only_replicas_with_rows_write_is_kept(first_is_empty, mode):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        n = rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM)
    sizes = (0, 2) if first_is_empty else (2, 0)
    batch = per_replica(strategy, [np.ones((k, 1), np.float32) for k in sizes])

    def fn(part):
        if len(part):
            n.assign_add(jnp.float32(len(part)))

    mode(lambda b: strategy.run(fn, args=(b,)))(batch)

    assert [float(c) for c in n.components] == list(map(float, sizes))


@pytest.mark.parametrize("sizes", [(2, 0), (0, 2)])
def test_a_mirrored_variable_that_only_some_write_is_refused(sizes, mode):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        n = rx.Variable(0.0, name="count")
    batch = per_replica(strategy, [np.ones((k, 1), np.float32) for k in sizes])

    def fn(part):
        if len(part):
            n.assign(jnp.float32(0) + 1)

    with pytest.raises(rx.errors.ReplicaError, match="count"):
        mode(lambda b: strategy.run(fn, args=(b,)))(batch)
    assert [float(c) for c in n.components] == [0.0, 0.0]


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 3.0), (MEAN, 1.5), (None, None)])
def test_numbers_of_pythons_that_shapes_made_differ_are_combined(aggregation, expected, mode):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batch = per_replica(strategy, [np.ones((k, 1), np.float32) for k in (2, 1)])
    with strategy.scope():
        v = rx.Variable(0.0, aggregation=aggregation or rx.VariableAggregation.NONE)
    plain = rx.Variable(0.0)

    def fn(part):
        plain.assign_add(len(part))
        v.assign_add(len(part))

    run = mode(lambda b: strategy.run(fn, args=(b,)))
    if aggregation is None:
        with pytest.raises(rx.errors.DivergenceError):
            run(batch)
        assert float(v) == 0.0
    else:
        run(batch)
        assert [float(v), float(plain)] == [expected, 3.0]


def test_merge_call_looks_at_each_component(mode):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batch = per_replica(strategy, [np.ones((k, 1), np.float32) for k in (2, 1)])

    def fn(part):
        return rx.distribute.get_replica_context().merge_call(
            lambda s, v: v.values[0] - 10 * v.values[1], (jnp.sum(part),)
        )

    found = mode(lambda b: strategy.run(fn, args=(b,)))(batch)

    assert [float(x) for x in found.values] == [-8.0, -8.0]
