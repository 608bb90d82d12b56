"""What the r2.0 page says that needs no dataset, with rx for tf."""

import inspect

import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
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
