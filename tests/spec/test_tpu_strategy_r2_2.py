"""The examples of the page that need no dataset and no TPU, with rx for tf."""

import numpy as np
import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_a_constant_for_every_replica(strategy):  # 004:486
    def value_fn(ctx):
        return tf.constant(1.0)

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)

    assert isinstance(local_result, tuple)
    assert [float(x) for x in local_result] == [1.0, 1.0]


def test_a_part_of_an_array_for_every_replica(strategy):  # 004:500
    array_value = np.array([3.0, 2.0, 1.0])

    def value_fn(ctx):
        return array_value[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)

    assert local_result == (3.0, 2.0)


def test_the_number_of_replicas_for_every_replica(strategy):  # 004:515
    def value_fn(ctx):
        return ctx.num_replicas_in_sync

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)

    assert local_result == (2, 2)


def test_values_placed_on_their_devices_first(strategy):  # 004:529, on CPU devices
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with tf.device(worker_devices[i]):
            multiple_values.append(tf.constant(1.0))

    def value_fn(ctx):
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

    assert [tf.device_name(v) for v in distributed_values.values] == list(worker_devices)
    assert components(strategy.run(lambda x: x + 1, args=(distributed_values,))) == [2.0, 2.0]


def test_reduce_needs_its_axis(strategy):  # 004: reduce(reduce_op, value, axis)
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)))
