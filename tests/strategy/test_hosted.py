"""Runs in functions that Python drives."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax.strategy._run import LatestUsed


@pytest.fixture(scope="module")
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def dist(strategy):
    x = np.arange(12, dtype=np.float32)
    return strategy.experimental_distribute_dataset(rx.data.Dataset.from_tensor_slices(x).batch(4))


def test_a_python_number_that_changes_is_not_kept_from_the_step_before(strategy, dist):
    totals = []

    @rx.function
    def epoch(dataset):
        for i, batch in enumerate(dataset):
            per_replica = strategy.run(lambda x: jnp.sum(x) + i, args=(batch,))  # noqa: B023
            totals.append(float(strategy.reduce("SUM", per_replica, axis=None)))

    epoch(dist)

    assert totals == [6 + 0, 22 + 2, 38 + 4]


def test_a_method_is_run_as_well_as_a_function(strategy, dist):
    class Model:
        def __init__(self):
            with strategy.scope():
                self.total = rx.Variable(0.0, aggregation=rx.VariableAggregation.SUM)

        def step(self, x):
            self.total.assign_add(jnp.sum(x))

        @rx.function
        def epoch(self, dataset):
            for batch in dataset:
                strategy.run(self.step, args=(batch,))

    model = Model()
    model.epoch(dist)

    assert float(model.total) == sum(range(12))


def test_default_arguments_that_change_are_seen(strategy, dist):
    totals = []

    @rx.function
    def epoch(dataset):
        for i, batch in enumerate(dataset):

            def fn(x, scale=i):
                return jnp.sum(x) * scale

            totals.append(float(strategy.reduce("SUM", strategy.run(fn, args=(batch,)), axis=None)))

    epoch(dist)

    assert totals == [0, 22, 76]


def test_the_body_runs_again_on_every_call_and_its_result_is_returned(strategy, dist):
    calls = []

    @rx.function
    def count(dataset):
        calls.append(1)
        return sum(1 for _ in dataset)

    assert [count(dist), count(dist)] == [3, 3]


def test_the_latest_used_things_are_kept():
    things = LatestUsed()
    first = things.find("first", object)
    for i in range(300):
        things.find(i, object)
        assert things.find("first", object) is first
    kept = things.find(299, object)

    assert things.find(299, object) is kept
    assert len(things._things) <= 256


@pytest.mark.parametrize(
    "make",
    [
        lambda: rx.distribute.MirroredStrategy(["CPU:0"]),
        lambda: rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        rx.distribute.TPUStrategy,
    ],
    ids=["one replica", "two replicas", "tpu"],
)
def test_functions_take_strings_beside_numbers(make):
    strategy = make()
    words = [b"a", b"bb", b"ccc", b"dddd", b"e"]
    dataset = rx.data.Dataset.from_tensor_slices((words, np.arange(5.0, dtype=np.float32)))
    dist = strategy.experimental_distribute_dataset(dataset.batch(4))  # the last is short

    def replica_fn(batch):
        words, x = batch
        return x.sum() + sum(map(len, words))

    def summed(value):
        return float(strategy.reduce("SUM", value, axis=None))

    outer = rx.function(lambda batch: strategy.run(replica_fn, args=(batch,)))
    inner = rx.function(replica_fn)
    pulling = rx.function(lambda it: strategy.run(replica_fn, args=(next(it),)))
    iterator = iter(dist)

    assert [summed(outer(x)) for x in dist] == [16.0, 5.0]
    assert [summed(strategy.run(inner, args=(x,))) for x in dist] == [16.0, 5.0]
    assert [summed(pulling(iterator)) for _ in range(2)] == [16.0, 5.0]
