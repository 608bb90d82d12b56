"""The older verbs: strategies of compat.v1, their iterators, and experimental_run."""

import json

import numpy as np
import tensorflow as tf


def main(directory):
    strategy = tf.compat.v1.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(11)
    rows = rng.normal(size=(20, 2)).astype(np.float32)

    with strategy.scope():
        center = tf.Variable([2.0, -2.0], aggregation=tf.VariableAggregation.MEAN)

    def step(inputs):
        with tf.GradientTape() as tape:
            distance = tf.reduce_sum(tf.abs(inputs - center), axis=-1)
            loss = tf.reduce_max(distance) + tf.reduce_sum(tf.sigmoid(distance))
        gradient = tape.gradient(loss, center)
        center.assign_add(-0.05 * gradient)
        return loss

    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    iterator = strategy.make_dataset_iterator(dataset)
    iterator.initialize()
    first = []
    for _ in range(5):
        losses = strategy.experimental_run(step, iterator)
        first.append(float(strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)))

    def input_fn(context):
        size = context.get_per_replica_batch_size(4)
        return tf.data.Dataset.from_tensor_slices(rows[::-1].copy()).batch(size)

    iterator = strategy.make_input_fn_iterator(input_fn)
    iterator.initialize()
    second = []
    try:
        while True:
            losses = strategy.experimental_run(step, iterator)
            local = strategy.experimental_local_results(losses)
            second.append([loss.numpy().item() for loss in local])
    except tf.errors.OutOfRangeError:
        pass
    return {"first": first, "second": second, "center": center.numpy().tolist()}


if __name__ == "__main__":
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    print(json.dumps(main(".")))
