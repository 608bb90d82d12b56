"""The examples of the page that need no dataset, with rx for tf and CPU for GPU."""

import threading

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components

TWO = ["CPU:0", "CPU:1"]


def test_the_class_example_sums_to_90():  # 003:63
    tf.enable_eager_execution()
    strategy = tf.distribute.OneDeviceStrategy(device="/cpu:0")

    with strategy.scope():
        v = tf.Variable(1.0)

    def step_fn(x):
        return x * 2

    result = 0
    for i in range(10):
        result += strategy.run(step_fn, args=(i,))

    assert v.device == "/job:localhost/replica:0/task:0/device:CPU:0"
    assert result == 90


def test_reduce_adds_the_replica_ids():  # 003:789
    strategy = tf.distribute.MirroredStrategy(TWO)

    def step_fn():
        i = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.identity(i)

    per_replica_result = strategy.run(step_fn)
    total = strategy.reduce("SUM", per_replica_result, axis=None)

    assert int(total) == 1
    assert total.dtype == "int32"


def test_results_lie_on_their_devices_and_the_total_on_the_host():  # 003:804
    strategy = tf.distribute.MirroredStrategy(devices=["CPU:4", "CPU:5"])

    def step_fn():
        i = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.identity(i)

    per_replica_result = strategy.run(step_fn)
    local = strategy.experimental_local_results(per_replica_result)
    total = strategy.reduce("SUM", per_replica_result, axis=None)

    assert tf.device_name(local[0]) == "/job:localhost/replica:0/task:0/device:CPU:4"
    assert tf.device_name(local[1]) == "/job:localhost/replica:0/task:0/device:CPU:5"
    assert tf.device_name(total) == "/job:localhost/replica:0/task:0/device:CPU:0"


def test_reduce_of_a_batch_with_and_without_an_axis():  # 003:857, 003:865
    strategy = tf.distribute.MirroredStrategy(TWO)
    per_replica_result = tf.distribute.PerReplica(
        [tf.constant([0, 1, 2, 3]), tf.constant([4, 5, 6, 7])]
    )

    assert strategy.reduce("sum", per_replica_result, axis=None).tolist() == [4, 6, 8, 10]
    assert int(strategy.reduce("sum", per_replica_result, axis=0)) == 28


def test_the_mean_over_an_axis_counts_every_entry():  # 003:880
    strategy = tf.distribute.MirroredStrategy(TWO)
    short = tf.distribute.PerReplica([tf.constant([0.0, 1.0, 2.0, 3.0]), tf.constant([4.0, 5.0])])

    assert float(strategy.reduce("MEAN", short, axis=0)) == 2.5
    means = strategy.run(lambda x: x.mean(), args=(short,))
    assert float(strategy.reduce("MEAN", means, axis=None)) == 3.0  # not the same


def test_run_of_a_function_prints_per_replica():  # 003:980
    strategy = tf.distribute.MirroredStrategy(TWO)
    tensor_input = tf.constant(3.0)

    @tf.function
    def replica_fn(input):
        return input * 2.0

    result = strategy.run(replica_fn, args=(tensor_input,))

    assert repr(result).startswith("PerReplica:{\n  0: Array(6., dtype=float32")
    assert components(result) == [6.0, 6.0]


def test_values_from_a_function_run_in_a_function():  # 003:996
    strategy = tf.distribute.MirroredStrategy(TWO)

    @tf.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    assert int(run()) == 4


def test_all_reduce_in_run():  # 003:1015
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

    @tf.function
    def run():
        def value_fn(value_context):
            return tf.constant(value_context.replica_id_in_sync_group)

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn(input):
            return tf.distribute.get_replica_context().all_reduce("sum", input)

        return strategy.run(replica_fn, args=(distributed_values,))

    assert components(run()) == [1, 1]


def test_variables_in_and_out_of_the_scope():  # 003:1105
    strategy = tf.distribute.MirroredStrategy(TWO)
    with strategy.scope():
        mirrored_variable = tf.Variable(1.0)
    regular_variable = tf.Variable(1.0)

    assert repr(mirrored_variable) == (
        "MirroredVariable:{\n"
        "  0: <rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>,\n"
        "  1: <rx.Variable 'Variable/replica_1:0' shape=() dtype=float32, numpy=1.0>\n"
        "}"
    )
    assert repr(regular_variable) == (
        "<rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"
    )


def test_what_entering_a_scope_does():  # 003:1120 ff.
    strategy = tf.distribute.MirroredStrategy(TWO)
    seen = []

    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.get_replica_context() is None
        thread = threading.Thread(target=lambda: seen.append(tf.distribute.has_strategy()))
        thread.start()
        thread.join()
        alone = tf.constant(1.0) + 1.0  # a scope distributes nothing by itself

    assert seen == [False]
    assert isinstance(alone, tf.Tensor)


def test_single_worker_strategies_have_no_cluster():  # 003:104
    assert tf.distribute.OneDeviceStrategy("CPU:0").cluster_resolver is None
    assert tf.compat.v1.distribute.OneDeviceStrategy("CPU:0").cluster_resolver is None
