"""The examples of the page that need no dataset and no second worker, with rx for tf."""

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components


def test_run_of_a_function_gives_the_tensor():  # 001:881
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    tensor_input = tf.constant(3.0)

    @tf.function
    def replica_fn(input):
        return input * 2.0

    assert float(strategy.run(replica_fn, args=(tensor_input,))) == 6.0


def test_values_from_a_function_run_in_a_function():  # 001:894
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    @tf.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    assert int(run()) == 2


def test_variables_in_and_out_of_the_scope():  # 001:979
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        mirrored_variable = tf.Variable(1.0)
    regular_variable = tf.Variable(1.0)

    assert repr(mirrored_variable) == (
        "MirroredVariable:{\n  0: <rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>\n}"
    )
    assert repr(regular_variable) == (
        "<rx.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"
    )


def test_a_creator_scope_sees_the_variables_of_a_strategy():  # 001:1006
    names = []

    def noted(next_creator, **kwargs):
        names.append(kwargs.get("name"))
        return next_creator(**kwargs)

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope(), tf.variable_creator_scope(noted):
        v = tf.Variable(1.0, name="w")

    assert names == ["w"]
    assert len(v.components) == 2


def test_entering_a_scope_distributes_no_computation():  # 001:1046
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    calls = []

    @tf.function
    def step():
        calls.append(tf.distribute.in_cross_replica_context())
        return tf.constant(1.0)

    with strategy.scope():
        plain = step()
    spread = strategy.run(step)

    assert float(plain) == 1.0
    assert components(spread) == [1.0, 1.0]
    assert calls == [True, False]
