"""The examples of the page, with rx for tf; page:line in the comments."""

import numpy as np
import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components, local
from tests.spec.pages import dataset_fn, numbers, run_values_from_a_function


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

    result = run_values_from_a_function(strategy)

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


EPOCHS = 2


def floats(record):
    return tf.io.decode_raw(record, np.float32)[0]


@pytest.fixture(params=[1, 2], ids=["one replica", "two replicas"])
def strategy(request):
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


@pytest.fixture
def v1():
    return tf.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_an_epoch_over_a_dataset_in_a_function(strategy):  # 000:103
    my_strategy = strategy
    dataset = tf.data.Dataset.range(10).map(np.float32).batch(4)
    with my_strategy.scope():
        seen = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

        @tf.function
        def distribute_train_epoch(dataset):
            def replica_fn(input):
                result = input.sum()
                seen.assign_add(result)
                return result

            total_result = 0
            for x in dataset:
                per_replica_result = my_strategy.run(replica_fn, args=(x,))
                total_result += my_strategy.reduce(
                    tf.distribute.ReduceOp.SUM, per_replica_result, axis=None
                )
            return total_result

        dist_dataset = my_strategy.experimental_distribute_dataset(dataset)
        for epoch in range(EPOCHS):
            train_result = distribute_train_epoch(dist_dataset)

            assert isinstance(train_result, tf.Tensor)
            assert float(train_result) == 45.0
            assert float(seen) == 45.0 * (epoch + 1)


def test_records_of_files_reach_the_replica(record_files):  # 000:199
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    dataset = tf.data.TFRecordDataset(record_files)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    trained = []

    def train_step(record):
        trained.append(float(floats(record)))

    for x in dist_dataset:
        strategy.run(train_step, args=(x,))

    assert trained == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_batches_of_records_are_split_over_the_replicas(record_files, v1):  # 000:199, 000:214
    dataset = numbers(record_files).batch(4)
    dist_dataset = v1.experimental_distribute_dataset(dataset)

    def train_step(inputs):
        return inputs * 10

    results = [components(v1.run(train_step, args=(x,))) for x in dist_dataset]

    assert results == [[[0.0, 10.0], [20.0, 30.0]], [[40.0, 50.0], [60.0, 70.0]]]


@pytest.mark.parametrize("policy", ["AUTO", "FILE", "DATA", "OFF"])
def test_the_auto_shard_policy_leaves_one_worker_all_its_data(record_files, v1, policy):  # 000:234
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    dataset = numbers(record_files).batch(4).with_options(options)

    batches = [components(x) for x in v1.experimental_distribute_dataset(dataset)]

    assert batches == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]


def test_the_element_spec_of_strings_is_an_input_signature(record_files):  # 000:250
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    dataset = tf.data.TFRecordDataset(record_files)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    trained = []

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        trained.append(float(floats(inputs.item())))

    for x in dist_dataset:
        strategy.run(train_step, args=(x,))

    assert trained == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert train_step.experimental_get_tracing_count() == 0  # no device holds strings


def test_the_element_spec_of_batches_of_strings_is_one_too(record_files, v1):  # 000:250
    dataset = tf.data.TFRecordDataset(record_files).batch(4)
    dist_dataset = v1.experimental_distribute_dataset(dataset)

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        return tf.constant(sum(float(floats(x)) for x in inputs))

    results = [components(v1.run(train_step, args=(x,))) for x in dist_dataset]

    assert results == [[1.0, 5.0], [9.0, 13.0]]


def test_the_element_spec_of_numbers_is_an_input_signature(record_files, strategy):  # 000:250
    dataset = numbers(record_files).batch(4)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    traced = []

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        traced.append(inputs.shape)
        return inputs.sum()

    results = [local(strategy, strategy.run(train_step, args=(x,))) for x in dist_dataset]

    assert [sum(parts) for parts in results] == [6.0, 22.0]
    assert traced == [(4 // strategy.num_replicas_in_sync,)]
    with pytest.raises(TypeError, match="input_signature"):
        strategy.run(train_step, args=(tf.constant([[1.0]]),))


def test_datasets_from_a_function(v1):  # 000:334
    inputs = v1.experimental_distribute_datasets_from_function(dataset_fn)

    def replica_fn(batch):
        return batch.sum()

    results = []
    for batch in inputs:
        results.append(v1.run(replica_fn, args=(batch,)))
        if len(results) == 3:
            break

    assert [x.shape for x in batch.values] == [(4, 1, 1)] * 2
    assert [components(r) for r in results] == [[4.0, 4.0]] * 3


def test_the_element_spec_of_an_iterator_is_an_input_signature(v1):  # 000:357
    inputs = v1.experimental_distribute_datasets_from_function(dataset_fn)
    iterator = iter(inputs)
    traced = []

    @tf.function(input_signature=[iterator.element_spec])
    def replica_fn_with_signature(inputs):
        traced.append(inputs.shape)
        return inputs.sum()

    for _ in range(3):
        result = v1.run(replica_fn_with_signature, args=(next(iterator),))

    assert components(result) == [4.0, 4.0]
    assert traced == [(4, 1, 1)]


def test_a_dataset_of_an_array_is_made_and_distributed(v1):  # 000:479
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = v1.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = v1.experimental_distribute_dataset(dataset)

    assert isinstance(dist_dataset, tf.distribute.DistributedDataset)
    with pytest.raises(ValueError, match="batch"):  # as written it has no batches to split
        next(iter(dist_dataset))
    batched = v1.experimental_distribute_dataset(dataset.batch(4))
    totals = [v1.reduce("SUM", x, axis=0) for x in batched]
    assert [float(t) for t in totals] == [4.0, 4.0, 2.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_iterator_of_a_dataset_feeds_experimental_run(v1):  # 000:535, 000:607
    iterator = v1.make_dataset_iterator(tf.data.Dataset.range(4).map(np.float32).batch(2))
    iterator.initialize()

    def fn(x):
        return x + 10.0 * tf.distribute.get_replica_context().replica_id_in_sync_group

    first = v1.experimental_run(fn, iterator)
    second = v1.extended.call_for_each_replica(fn, args=(iterator.get_next(),))

    assert isinstance(iterator, tf.distribute.InputIterator)
    assert components(first) == [[0.0], [11.0]]
    assert components(second) == [[2.0], [13.0]]
    with pytest.raises(tf.errors.OutOfRangeError):
        v1.experimental_run(fn, iterator)
    iterator.initialize()
    assert components(iterator.get_next()) == [[0.0], [1.0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_iterator_of_an_input_function_feeds_experimental_run(v1):  # 000:673
    contexts = []

    def input_fn(input_context):
        contexts.append(input_context)
        return dataset_fn(input_context)

    def replica_fn(batch):
        return batch.sum()

    with v1.scope():
        iterator = v1.make_input_fn_iterator(input_fn)
        replica_results = v1.experimental_run(replica_fn, iterator)

    assert components(replica_results) == [4.0, 4.0]
    assert len(contexts) == 1
    assert contexts[0].num_replicas_in_sync == 2
