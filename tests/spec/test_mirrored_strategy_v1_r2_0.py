"""What the r2.0 page says, with rx for tf."""

import inspect

import numpy as np
import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components
from tests.spec.pages import dataset_fn, numbers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_run_has_its_older_name_without_options():  # 002:51, 002:89
    strategy = tf.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def train_step(x):
        return x * 2

    result = strategy.experimental_run_v2(train_step, args=(tf.constant(3.0),))

    assert components(result) == [6.0, 6.0]
    assert list(inspect.signature(strategy.experimental_run_v2).parameters) == [
        "fn",
        "args",
        "kwargs",
    ]


def test_reduce_has_a_default_axis():  # 002:235
    strategy = tf.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    total = strategy.reduce(
        reduce_op=tf.distribute.ReduceOp.SUM, value=strategy.run(lambda: tf.constant(1.0))
    )

    assert float(total) == 2.0


@pytest.fixture
def strategy():
    return tf.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def replica_fn(batch):
    return batch.sum()


def test_batches_of_records_are_run(record_files, strategy):  # 002:40
    dist_dataset = strategy.experimental_distribute_dataset(numbers(record_files).batch(4))

    results = [
        components(strategy.experimental_run_v2(replica_fn, args=(x,))) for x in dist_dataset
    ]

    assert results == [[1.0, 5.0], [9.0, 13.0]]


@pytest.mark.parametrize(("auto_shard", "policy"), [(True, "AUTO"), (False, "OFF")])
def test_auto_shard_is_the_older_name_of_two_policies(strategy, auto_shard, policy):  # 002:56
    options = tf.data.Options()
    options.experimental_distribute.auto_shard = auto_shard
    dataset = tf.data.Dataset.range(4).batch(4).with_options(options)

    batches = [components(x) for x in strategy.experimental_distribute_dataset(dataset)]

    assert options.experimental_distribute.auto_shard_policy.name == policy
    assert batches == [[[0, 1], [2, 3]]]


def test_datasets_from_a_function(strategy):  # 002:80
    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    for steps, batch in enumerate(inputs):
        replica_results = strategy.experimental_run_v2(replica_fn, args=(batch,))
        assert components(replica_results) == [4.0, 4.0]
        if steps == 2:
            break


def test_a_dataset_of_an_array_is_made_and_distributed(strategy):  # 002:126
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input, session=None)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(10))

    assert [components(x) for x in dist_dataset] == [[[1.0] * 5, [1.0] * 5]]


def test_an_iterator_of_a_dataset_feeds_experimental_run(strategy):  # 002:146, 002:192
    iterator = strategy.make_dataset_iterator(tf.data.Dataset.range(4).batch(2))
    iterator.initialize()

    results = [components(strategy.experimental_run(replica_fn, iterator)) for _ in range(2)]

    assert results == [[0, 1], [2, 3]]


def test_an_iterator_of_an_input_function_feeds_experimental_run(strategy):  # 002:214
    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(dataset_fn)
        replica_results = strategy.experimental_run(replica_fn, iterator)

    assert components(replica_results) == [4.0, 4.0]
