"""The examples of the page, with rx for tf, and with their slips mended."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as tf  # as a program that was moved would have it
from tests.replicas import components
from tests.spec.pages import dataset_fn, numbers


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


def test_reduce_needs_its_axis(strategy):  # 004: reduce(reduce_op, value, axis)
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)))


# With datasets.


def test_batches_of_records_are_run(record_files, strategy):  # 004:225
    dist_dataset = strategy.experimental_distribute_dataset(numbers(record_files).batch(4))

    def train_step(inputs):
        return inputs.sum()

    results = [components(strategy.run(train_step, args=(x,))) for x in dist_dataset]

    assert results == [[1.0, 5.0], [9.0, 13.0]]


def test_the_element_spec_is_an_input_signature(record_files, strategy):  # 004:276
    dist_dataset = strategy.experimental_distribute_dataset(numbers(record_files).batch(4))

    @tf.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        return inputs.max()

    results = [components(strategy.run(train_step, args=(x,))) for x in dist_dataset]

    assert results == [[1.0, 3.0], [5.0, 7.0]]


def test_datasets_from_a_function(strategy):  # 004:360
    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)

    def replica_fn(batch):
        return batch.sum()

    for steps, batch in enumerate(inputs):
        assert components(strategy.run(replica_fn, args=(batch,))) == [4.0, 4.0]
        if steps == 2:
            break


def test_the_element_spec_of_an_iterator_is_an_input_signature():  # 004:383
    strategy = tf.distribute.experimental.TPUStrategy()
    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
    traced = []

    @tf.function(input_signature=[iterator.element_spec])
    def replica_fn_with_signature(inputs):
        traced.append(inputs.shape)
        return inputs.sum()

    for _ in range(3):
        result = strategy.run(replica_fn_with_signature, args=(next(iterator),))

    assert components(result) == [1.0] * 8
    assert traced == [(1, 1, 1)]


@pytest.mark.parametrize("make", [tf.distribute.TPUStrategy, tf.distribute.MirroredStrategy])
def test_a_dataset_of_an_array_is_made_and_distributed(make):  # 004:618
    strategy = make()
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(10))

    (batch,) = dist_dataset
    assert float(strategy.reduce("SUM", batch, axis=0)) == 10.0


# With TPUs, simulated: `//` is no comment of Python, and where the page says `inputs` it means
# `images`.


def system(computation_shape, num_replicas):
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = tf.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=computation_shape, num_replicas=num_replicas
    )
    return tf.distribute.experimental.TPUStrategy(resolver, device_assignment=device_assignment)


def model(images):
    return jnp.tanh(images).sum((1, 2))


def loss_fn(labels, output):
    return ((output - labels) ** 2).mean()


IMAGES = np.random.default_rng(0).normal(size=(4, 4, 8, 3)).astype(np.float32)
LABELS = np.ones((4, 3), np.float32)


def test_an_output_is_assigned_to_a_logical_device():  # 004:126
    strategy = system([1, 1, 2], 4)
    dataset = tf.data.Dataset.range(8).map(np.float32).batch(8)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function()
    def step_fn(inputs):
        output = tf.add(inputs, inputs)

        # The add is executed on logical device 0.
        return strategy.experimental_assign_to_logical_device(output, 0)

    result = strategy.run(step_fn, args=(next(iterator),))

    assert components(result) == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0], [12.0, 14.0]]
    with pytest.raises(ValueError, match="logical device"):
        strategy.experimental_assign_to_logical_device(tf.constant(1.0), 2)


def test_values_placed_on_simulated_tpus_first():  # 004:529, with the slips of 537 and 539 mended
    strategy = tf.distribute.TPUStrategy()
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with tf.device(worker_devices[i]):
            multiple_values.append(tf.constant(1.0))

    def value_fn(ctx):
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

    assert [n.split("device:")[1] for n in worker_devices] == [f"TPU:{i}" for i in range(8)]
    assert [v.device for v in distributed_values.values] == jax.devices()  # which stand in
    assert components(strategy.run(lambda x: x + 1, args=(distributed_values,))) == [2.0] * 8


def test_labels_and_logits_are_shared_by_the_logical_devices():  # 004:673
    strategy = system([2, 2, 2], 1)  # the page builds [1, 1, 2], which cannot be split 8 ways
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function()
    def step_fn(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 4, 1])

        # The model is executed on 8 logical devices, with `images` split 2 * 4 ways.
        output = model(images)

        # For the loss, all logical devices share the same logits and labels.
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return loss_fn(labels, output)

    loss = strategy.run(step_fn, args=(next(iterator),))

    np.testing.assert_allclose(float(loss), loss_fn(LABELS, model(IMAGES)), rtol=1e-5)


def test_the_system_of_the_page_cannot_be_split_eight_ways():  # 004:679, 004:690
    strategy = system([1, 1, 2], 4)

    with pytest.raises(ValueError, match=r"8 parts.*2 logical device"):
        strategy.run(
            lambda x: strategy.experimental_split_to_logical_devices(x, [1, 2, 4, 1]),
            args=(tf.constant(IMAGES),),
        )


def test_images_are_split_over_the_logical_devices():  # 004:750
    strategy = system([2, 2, 2], 1)
    dataset = tf.data.Dataset.from_tensor_slices(IMAGES).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function()
    def step_fn(inputs):
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])

        # The model is executed on 8 logical devices, with `inputs` split 2 * 4 ways.
        return model(inputs)

    output = strategy.run(step_fn, args=(next(iterator),))

    np.testing.assert_allclose(np.asarray(output), model(IMAGES), rtol=1e-5)
    whole = tf.function(lambda x: strategy.run(step_fn, args=(x,)))
    text = whole.get_concrete_function(tf.constant(IMAGES)).as_text()
    assert re.search(r"f32\[(1,)?4,2,2,3\]", text)  # a part of 4 x 4 x 8 x 3
    assert not re.search(r"f32\[(1,)?4,4,8,3\]\S* tanh\(", text)


def test_the_scope_makes_variables_of_the_strategy():  # 004:919
    strategy = tf.distribute.TPUStrategy()

    with strategy.scope():
        variable = tf.Variable(1.0)

    assert variable.distribute_strategy is strategy
    assert tf.distribute.get_strategy() is not strategy
