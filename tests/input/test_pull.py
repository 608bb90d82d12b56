"""Iterators and datasets inside compiled functions."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


@pytest.fixture(scope="module")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def batches(strategy, rows, batch=4):
    x = np.arange(rows, dtype=np.float32)
    return strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices(x).batch(batch)
    )


def summed(strategy, batch):
    return strategy.reduce("SUM", strategy.run(jnp.sum, args=(batch,)), axis=None)


def test_each_next_in_a_function_takes_one_element_on_every_call(strategy):
    traces = []

    @rx.function
    def two_steps(iterator):
        traces.append(1)
        return summed(strategy, next(iterator)), summed(strategy, next(iterator))

    iterator = iter(batches(strategy, 16))
    results = [[float(x) for x in two_steps(iterator)] for _ in range(2)]

    assert results == [[6, 22], [38, 54]]
    assert len(traces) == 1


def test_tracing_looks_at_elements_and_takes_none(strategy):
    iterator = iter(batches(strategy, 8))

    def fails(it):
        next(it)
        raise KeyError("while tracing")

    with pytest.raises(KeyError):
        rx.function(fails)(iterator)

    assert [float(summed(strategy, b)) for b in iterator] == [6, 22]


def test_an_iterator_may_be_closed_over(strategy):
    iterator = iter(batches(strategy, 12))

    step = rx.function(lambda: summed(strategy, next(iterator)))

    assert [float(step()) for _ in range(3)] == [6, 22, 38]


def test_steps_before_the_end_still_happen_and_then_it_stops(strategy):
    with strategy.scope():
        seen = rx.Variable(0.0)
    iterator = iter(batches(strategy, 12))

    @rx.function
    def two_steps(it):
        for _ in range(2):
            seen.assign_add(summed(strategy, next(it)))

    two_steps(iterator)
    for end in (StopIteration, rx.errors.OutOfRangeError):
        with pytest.raises(end):
            two_steps(iterator)

    assert float(seen) == sum(range(12))


def test_a_short_last_batch_is_taken_by_the_same_function(strategy):
    iterator = iter(batches(strategy, 11, batch=4))

    step = rx.function(lambda it: summed(strategy, next(it)))

    assert [float(step(iterator)) for _ in range(3)] == [6, 22, 27]


def test_an_epoch_over_a_dataset_inside_a_function_trains_every_step(strategy):
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)
        steps = rx.Variable(0)
    traces = []

    @rx.function
    def epoch(dataset):
        for batch in dataset:

            def replica_fn(x):
                traces.append(1)
                total.assign_add(jnp.sum(x))

            strategy.run(replica_fn, args=(batch,))
            steps.assign_add(1)

    dist = batches(strategy, 16)
    epoch(dist)
    epoch(dist)

    assert float(total) == 2 * sum(range(16))
    assert int(steps) == 8
    assert len(traces) == 1  # the function defined in the loop is found again


def test_arrays_that_a_function_in_the_loop_closes_over_are_inputs(strategy):
    results = []

    @rx.function
    def epoch(dataset):
        for i, batch in enumerate(dataset):
            scale = jnp.float32(i)
            per_replica = strategy.run(lambda x: jnp.sum(x) * scale, args=(batch,))  # noqa: B023
            results.append(float(strategy.reduce("SUM", per_replica, axis=None)))

    epoch(batches(strategy, 12))

    assert results == [0, 22, 76]


def test_a_dataset_that_is_closed_over_works_like_an_argument(strategy):
    dist = batches(strategy, 8)

    @rx.function
    def epoch():
        return sum(float(summed(strategy, b)) for b in dist)

    assert epoch() == sum(range(8))


def test_an_element_spec_is_an_input_signature(strategy):
    dist = batches(strategy, 8)

    step = rx.function(lambda x: summed(strategy, x), input_signature=[dist.element_spec])

    assert [float(step(b)) for b in dist] == [6, 22]
    with pytest.raises(TypeError, match="input_signature"):
        step(jnp.zeros((2, 2)))
