"""The examples of the page that need no second worker, with rx for tf."""

import numpy as np
import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components, local
from tests.spec.pages import dataset_fn, numbers, run_values_from_a_function


def test_run_of_a_function_gives_the_tensor():  # 001:881
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    tensor_input = tf.constant(3.0)

    @tf.function
    def replica_fn(input):
        return input * 2.0

    assert float(strategy.run(replica_fn, args=(tensor_input,))) == 6.0


def test_values_from_a_function_run_in_a_function():  # 001:894
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    assert int(run_values_from_a_function(strategy)) == 2


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


GLOBAL_BATCH_SIZE = 4


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def workers():
    """The strategy of the page, alone: one worker with one device."""
    return tf.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy()


def test_batches_of_records_are_run(record_files, strategy):  # 001:179
    dataset = numbers(record_files).batch(GLOBAL_BATCH_SIZE)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    def replica_fn(inputs):
        return inputs + 1

    results = []
    for x in dist_dataset:
        assert isinstance(x, tf.distribute.DistributedValues)
        results.append(components(strategy.run(replica_fn, args=(x,))))

    assert isinstance(dist_dataset, tf.distribute.DistributedDataset)
    assert results == [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]


@pytest.mark.parametrize("policy", ["AUTO", "FILE", "DATA", "OFF"])
def test_every_auto_shard_policy_gives_a_lone_worker_all(record_files, workers, policy):  # 001:203
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    dataset = numbers(record_files).batch(GLOBAL_BATCH_SIZE).with_options(options)

    batches = [local(workers, x) for x in workers.experimental_distribute_dataset(dataset)]

    assert np.concatenate(batches, axis=None).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_element_spec_is_an_input_signature(record_files, strategy):  # 001:239
    dataset = numbers(record_files).batch(GLOBAL_BATCH_SIZE)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    traced = []

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        traced.append(inputs.shape)
        return inputs.max()

    results = [components(strategy.run(train_step, args=(x,))) for x in dist_dataset]

    assert results == [[1.0, 3.0], [5.0, 7.0]]
    assert traced == [(2,)]


def test_outputs_are_ordered_by_an_index(strategy):  # 001:259
    inputs = np.float32([3, 1, 4, 1, 5, 9, 2, 6])
    dataset = tf.data.Dataset.from_tensor_slices(inputs).enumerate().shuffle(8, seed=1).batch(4)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    @tf.function
    def predict(batch):
        index, x = batch
        return index, x * 10

    outputs, order = np.zeros(8, np.float32), []
    for batch in dist_dataset:
        index, prediction = strategy.run(predict, args=(batch,))
        index = np.asarray(strategy.gather(index, axis=0))
        outputs[index] = np.asarray(strategy.gather(prediction, axis=0))
        order.extend(index.tolist())

    assert sorted(order) == list(range(8))
    assert order != list(range(8))  # they came in another order
    assert outputs.tolist() == [30.0, 10.0, 40.0, 10.0, 50.0, 90.0, 20.0, 60.0]


def test_the_element_spec_of_datasets_from_a_function(strategy):  # 001:344
    ds = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    results = []

    def train(ds):
        @tf.function(input_signature=[ds.element_spec])
        def step_fn(inputs):
            return inputs

        for batch in ds:
            results.append(strategy.run(step_fn, args=(batch,)))
            if len(results) == 3:
                break

    train(ds)

    assert [components(r) for r in results] == [[[[[1.0]]] * 4] * 2] * 3


def test_a_dataset_of_an_array_is_made_and_distributed(workers):  # 001:501
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = workers.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = workers.experimental_distribute_dataset(dataset)

    assert [float(x) for x in dist_dataset] == [1.0] * 10  # one replica: nothing to split


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_iterator_of_a_dataset_feeds_experimental_run(workers):  # 001:557, 001:629
    iterator = workers.make_dataset_iterator(tf.data.Dataset.range(4).batch(2))
    iterator.initialize()

    results = [workers.experimental_run(lambda x: x * 2, iterator) for _ in range(2)]

    assert [local(workers, r) for r in results] == [[[0, 2]], [[4, 6]]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_iterator_of_an_input_function_feeds_experimental_run(workers):  # 001:695
    def replica_fn(batch):
        return batch.sum()

    with workers.scope():
        iterator = workers.make_input_fn_iterator(dataset_fn)
        replica_results = workers.experimental_run(replica_fn, iterator)

    assert local(workers, replica_results) == [8.0]
