"""The examples of the page that need no dataset, with rx for tf; page:line in the comments."""

import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components


def test_a_variable_in_the_scope_prints_its_copies():  # 000:62
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        x = tf.Variable(1.0)

    assert repr(x) == (
        "MirroredVariable:{\n  0: <rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>\n}"
    )


def test_a_variable_made_in_a_function_is_mirrored():  # 000:79
    x = []

    @tf.function
    def create_variable():
        if not x:
            x.append(tf.Variable(1.0))

    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        create_variable()

    assert str(x[0]).startswith("MirroredVariable:{\n  0: <rx.Variable 'Variable:0'")


def test_run_of_a_function_gives_the_tensor():  # 000:852
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    tensor_input = tf.constant(3.0)

    @tf.function
    def replica_fn(input):
        return input * 2.0

    result = strategy.run(replica_fn, args=(tensor_input,))

    assert isinstance(result, tf.Tensor)
    assert float(result) == 6.0


@pytest.mark.parametrize(("count", "expected"), [(1, 2), (2, 4)])
def test_values_from_a_function_run_in_a_function(count, expected):  # 000:865
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])

    @tf.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    result = run()

    assert isinstance(result, tf.Tensor)
    assert int(result) == expected


def test_the_v1_class_has_the_signature_of_the_page():  # 000:44
    ops = tf.distribute.HierarchicalCopyAllReduce()
    strategy = tf.compat.v1.distribute.MirroredStrategy(
        devices=["/cpu:0", "/cpu:1"], cross_device_ops=ops
    )

    assert isinstance(strategy, tf.compat.v1.distribute.Strategy)
    assert strategy.num_replicas_in_sync == 2


def test_reduce_with_and_without_an_axis():  # 000:757 ff.
    strategy = tf.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    parts = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    per_replica = tf.distribute.PerReplica([tf.constant(p) for p in parts])

    assert strategy.reduce("SUM", per_replica).tolist() == [4.0, 6.0, 8.0, 10.0]
    assert float(strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=0)) == 28.0
    assert float(strategy.reduce(tf.distribute.ReduceOp.MEAN, per_replica, axis=0)) == 3.5


def test_scope_is_of_this_thread_and_cross_replica():  # 000:920
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        assert tf.distribute.in_cross_replica_context()
        v = tf.Variable(2.0)

    assert len(strategy.experimental_local_results(v)) == 2
    assert components(strategy.run(lambda: v + 0.0)) == [2.0, 2.0]
