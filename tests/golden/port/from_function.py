"""Input from a function of the InputContext, elements made by map and filter."""

import json

import numpy as np
import tensorflow as tf

GLOBAL_BATCH = 6


def scale(x):
    x = tf.cast(x, tf.float32) / 10.0
    return tf.stack([x, tf.sin(x), tf.maximum(x, 0.5)])


def main(directory):
    strategy = tf.distribute.MirroredStrategy(devices=["CPU:0", "CPU:1"])

    def dataset_fn(ctx):
        batch_size = ctx.get_per_replica_batch_size(GLOBAL_BATCH)
        dataset = tf.data.Dataset.range(40).filter(lambda i: tf.math.mod(i, 4) != 0)
        dataset = dataset.shard(ctx.num_input_pipelines, ctx.input_pipeline_id)
        dataset = dataset.map(scale, num_parallel_calls=tf.data.AUTOTUNE)
        dataset = dataset.map(lambda x: {"x": x, "y": tf.reduce_sum(x * x)})
        return dataset.batch(batch_size, drop_remainder=True)

    with strategy.scope():
        weights = tf.Variable(tf.ones([3]) * 0.1)
        seen = tf.Variable(
            0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def replica_fn(batch):
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            predicted = tf.tensordot(batch["x"], weights, axes=1)
            loss = tf.reduce_sum(tf.math.squared_difference(predicted, batch["y"])) / GLOBAL_BATCH
        gradient = context.all_reduce("SUM", tape.gradient(loss, weights))
        weights.assign_sub(0.01 * gradient)
        seen.assign_add(tf.shape(batch["y"])[0])
        return loss

    losses = []
    for batch in strategy.distribute_datasets_from_function(dataset_fn):
        per_replica = strategy.run(replica_fn, args=(batch,))
        losses.append(float(strategy.reduce("SUM", per_replica, axis=None)))
        parts = strategy.experimental_local_results(per_replica)
        assert len(parts) == 2
    final = tf.nn.softmax(weights)
    best = int(np.argmax(final.numpy()))
    return {
        "losses": losses,
        "weights": weights.numpy().tolist(),
        "softmax": final.numpy().tolist(),
        "seen": int(seen.read_value()),
        "best": best,
    }


if __name__ == "__main__":
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    print(json.dumps(main(".")))
