"""The TPU guide's loop: several steps inside one function, on a TPU if there is one."""

import json
import sys

import numpy as np
import tensorflow as tf

BATCH = 8
STEPS = 4


def make_strategy(tpu):
    if not tpu:
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def main(directory, tpu=""):
    strategy = make_strategy(tpu)
    per_replica_batch = BATCH // strategy.num_replicas_in_sync

    def dataset_fn(context):
        rng = np.random.default_rng(7)
        x = rng.normal(size=(64, 4)).astype(np.float32)
        y = tf.cast(x[:, :1] * x[:, 1:2] > 0, tf.float32)
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(per_replica_batch).repeat()

    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input(shape=(4,)),
                tf.keras.layers.Dense(8, activation="gelu"),
                tf.keras.layers.Dense(1),
            ]
        )
        rng = np.random.default_rng(8)
        model.set_weights([0.4 * rng.normal(size=w.shape) for w in model.get_weights()])
        optimizer = tf.keras.optimizers.RMSprop(0.01)
        optimizer.build(model.trainable_variables)
        training_loss = tf.keras.metrics.Mean("training_loss", dtype=tf.float32)
        training_accuracy = tf.keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)

    train_dataset = strategy.distribute_datasets_from_function(dataset_fn)
    train_iterator = iter(train_dataset)

    @tf.function
    def train_multiple_steps(iterator, steps):
        def step_fn(inputs):
            features, labels = inputs
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                losses = tf.math.softplus(logits) - labels * logits
                loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(list(zip(gradients, model.trainable_variables)))
            training_loss.update_state(loss * strategy.num_replicas_in_sync)
            training_accuracy.update_state(labels, logits)

        for _ in tf.range(steps):
            strategy.run(step_fn, args=(next(iterator),))

    results = []
    for _ in range(3):
        train_multiple_steps(train_iterator, STEPS)
        results.append([float(training_loss.result()), float(training_accuracy.result())])
        training_loss.reset_state()
        training_accuracy.reset_state()
    return {"results": results, "iterations": int(optimizer.iterations.numpy())}


if __name__ == "__main__":
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    print(json.dumps(main(".", *sys.argv[1:])))
