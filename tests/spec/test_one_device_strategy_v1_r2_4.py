"""The examples of the page, with rx for tf and CPU for GPU."""

import threading

import numpy as np
import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components
from tests.spec.pages import dataset_fn, run_values_from_a_function

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

    assert int(run_values_from_a_function(strategy)) == 4


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


def replica_fn(batch):
    return batch.sum()


@pytest.fixture
def one():
    return tf.compat.v1.distribute.OneDeviceStrategy("CPU:1")


def test_a_distributed_range_doubled():  # 003:313
    global_batch_size = 2
    strategy = tf.distribute.MirroredStrategy(devices=TWO)
    dataset = tf.data.Dataset.range(4).batch(global_batch_size)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def replica_fn(input):
        return input * 2

    result = []
    for x in dist_dataset:
        result.append(strategy.run(replica_fn, args=(x,)))

    assert [components(r) for r in result] == [[[0], [2]], [[4], [6]]]
    assert repr(result[0]).startswith("PerReplica:{\n  0: Array([0], dtype=int")


def test_input_is_fetched_to_the_device(one):  # 003:50
    dataset = tf.data.Dataset.range(4).map(np.float32).batch(2)

    batches = list(one.experimental_distribute_dataset(dataset))

    assert [x.tolist() for x in batches] == [[0.0, 1.0], [2.0, 3.0]]
    assert {tf.device_name(x) for x in batches} == {"/job:localhost/replica:0/task:0/device:CPU:1"}


@pytest.mark.parametrize("name", ["", "experimental_"])
def test_datasets_from_a_function_are_not_batched_again(name):  # 003:190
    strategy = tf.distribute.MirroredStrategy(TWO)
    distribute = getattr(strategy, f"{name}distribute_datasets_from_function")
    contexts = []

    def dataset_fn(input_context):
        contexts.append(input_context)
        return tf.data.Dataset.range(8).batch(input_context.get_per_replica_batch_size(4))

    dist_dataset = distribute(dataset_fn)
    specs = dist_dataset.element_spec.value_specs

    assert [components(x) for x in dist_dataset] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [c.num_input_pipelines for c in contexts] == [1]
    assert [s.shape for s in specs] == [(None,)] * 2


def test_outputs_are_ordered_by_an_index():  # 003:229, 003:386
    strategy = tf.distribute.MirroredStrategy(TWO)
    dataset = tf.data.Dataset.range(10).map(lambda x: x * x).enumerate().batch(4)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    outputs = {}
    for batch in dist_dataset:  # the last is short: 1 and 1
        index, x = strategy.run(lambda batch: (batch[0], batch[1] + 1), args=(batch,))
        index, x = strategy.gather(index, axis=0), strategy.gather(x, axis=0)
        outputs.update(zip(index.tolist(), x.tolist(), strict=True))

    assert [outputs[i] for i in range(10)] == [i * i + 1 for i in range(10)]


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "OFF"])
def test_devices_share_a_batch_under_any_policy(policy):  # 003:351
    strategy = tf.distribute.MirroredStrategy(TWO)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    dataset = tf.data.Dataset.range(4).batch(4).with_options(options)

    batches = [components(x) for x in strategy.experimental_distribute_dataset(dataset)]

    assert batches == [[[0, 1], [2, 3]]]


def test_a_dataset_of_an_array_is_made_and_distributed(one):  # 003:523
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = one.experimental_make_numpy_dataset(numpy_input, session=None)
    dist_dataset = one.experimental_distribute_dataset(dataset)

    assert [float(x) for x in dist_dataset] == [1.0] * 10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_iterator_of_a_dataset_feeds_experimental_run(one):  # 003:579, 003:651
    iterator = one.make_dataset_iterator(tf.data.Dataset.range(4).batch(2))
    iterator.initialize()

    results = [int(one.experimental_run(replica_fn, iterator)) for _ in range(2)]

    assert results == [1, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_iterator_of_an_input_function_feeds_experimental_run(one):  # 003:717
    with one.scope():
        iterator = one.make_input_fn_iterator(dataset_fn)
        replica_results = one.experimental_run(replica_fn, iterator)

    assert float(replica_results) == 8.0


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("OFF", [[8.0, 9.0, 10.0, 11.0], [12.0, 13.0]]),  # as on the page
        ("AUTO", [[8.0, 9.0, 10.0], [11.0, 12.0, 13.0]]),  # as today's TensorFlow
    ],
)
def test_a_short_last_batch_is_averaged_over_its_entries(policy, parts):  # 003:869
    strategy = tf.distribute.MirroredStrategy(TWO)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    dataset = tf.data.Dataset.range(14).map(np.float32).batch(8).with_options(options)

    *_, last = strategy.experimental_distribute_dataset(dataset)

    assert components(last) == parts
    assert float(strategy.reduce("MEAN", last, axis=0)) == 10.5
