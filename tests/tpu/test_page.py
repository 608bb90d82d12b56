"""Every example of the page of TPUStrategy, with its slips mended."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx


def system(computation_shape, num_replicas):
    resolver = rx.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    rx.config.experimental_connect_to_cluster(resolver)
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    device_assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=computation_shape, num_replicas=num_replicas
    )
    return rx.distribute.experimental.TPUStrategy(resolver, device_assignment=device_assignment)


def test_assign_to_a_logical_device():
    strategy = system([1, 1, 2], num_replicas=4)
    inputs = strategy.experimental_distribute_dataset(rx.data.Dataset.range(8).batch(8))
    iterator = iter(inputs)

    @rx.function()
    def step_fn(inputs):
        output = rx.add(inputs, inputs)
        # The addition is executed on logical device 0.
        output = strategy.experimental_assign_to_logical_device(output, 0)
        return output  # noqa: RET504 - as the page has it

    result = strategy.run(step_fn, args=(next(iterator),))

    parts = strategy.experimental_local_results(result)
    assert np.concatenate(parts).tolist() == [2 * i for i in range(8)]


def test_split_images_over_eight_logical_devices():
    strategy = system([2, 2, 2], num_replicas=1)
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
    dataset = rx.data.Dataset.from_tensor_slices(images).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    model = jnp.tanh

    @rx.function()
    def step_fn(inputs):
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])
        # The model runs on 8 logical devices, with the inputs split 2 x 4 ways.
        output = model(inputs)
        return output  # noqa: RET504 - as the page has it

    result = strategy.run(step_fn, args=(next(iterator),))

    (output,) = strategy.experimental_local_results(result)
    np.testing.assert_allclose(output, np.tanh(images), rtol=1e-5)


def test_replicate_outputs_and_labels_for_the_loss():
    strategy = system([2, 2, 2], num_replicas=1)
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype(np.float32)
    labels = np.arange(4, dtype=np.float32)
    dataset = rx.data.Dataset.from_tensor_slices((images, labels)).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    def model(images):
        return jnp.tanh(images).mean((1, 2, 3))

    def loss_fn(labels, output):
        return jnp.square(labels - output).mean()

    @rx.function()
    def step_fn(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2, 4, 1])
        output = model(images)
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return loss_fn(labels, output)

    loss = strategy.reduce("SUM", strategy.run(step_fn, args=(next(iterator),)), axis=None)

    assert float(loss) == pytest.approx(float(loss_fn(labels, model(images))), rel=1e-5)


def test_train_on_a_distributed_dataset():
    strategy = rx.distribute.TPUStrategy()
    dataset = rx.data.Dataset.range(32).batch(16, drop_remainder=True)
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

    @rx.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        return inputs.sum()

    totals = [
        int(strategy.reduce("SUM", strategy.run(train_step, args=(x,)), axis=None))
        for x in dist_dataset
    ]

    assert totals == [sum(range(16)), sum(range(16, 32))]


def test_datasets_from_a_function():
    strategy = rx.distribute.TPUStrategy()
    global_batch_size = 16

    def dataset_fn(input_context):
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        d = rx.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
        return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)

    inputs = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    iterator = iter(inputs)

    @rx.function(input_signature=[iterator.element_spec])
    def replica_fn_with_signature(inputs):
        return inputs.sum()

    for _ in range(3):
        sums = strategy.run(replica_fn_with_signature, args=(next(iterator),))
    assert float(strategy.reduce("SUM", sums, axis=None)) == global_batch_size


def test_values_for_each_replica():
    strategy = rx.distribute.TPUStrategy()
    array_value = np.array([3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0])
    make = strategy.experimental_distribute_values_from_function

    constant = make(lambda ctx: rx.constant(1.0))
    by_id = make(lambda ctx: array_value[ctx.replica_id_in_sync_group])
    count = make(lambda ctx: ctx.num_replicas_in_sync)

    results = strategy.experimental_local_results
    assert [float(x) for x in results(constant)] == [1.0] * 8
    assert list(results(by_id)) == array_value.tolist()
    assert results(count) == (8,) * 8


def test_values_placed_on_devices_first():
    strategy = rx.distribute.TPUStrategy()
    worker_devices = strategy.extended.worker_devices
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with rx.device(worker_devices[i]):
            multiple_values.append(rx.constant(1.0))

    def value_fn(ctx):
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

    total = strategy.reduce("SUM", distributed_values, axis=None)
    assert float(total) == strategy.num_replicas_in_sync


def test_a_numpy_dataset():
    strategy = rx.distribute.TPUStrategy()
    numpy_input = np.ones([16], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(16))

    (batch,) = dist_dataset

    assert [len(x) for x in strategy.experimental_local_results(batch)] == [2] * 8


def test_the_scope_makes_variables_of_the_strategy():
    strategy = rx.distribute.TPUStrategy()

    with strategy.scope():
        variable = rx.Variable(1.0)

    assert variable.distribute_strategy is strategy
    assert rx.distribute.get_strategy() is not strategy
