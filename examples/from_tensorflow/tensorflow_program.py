"""A program for TensorFlow: a custom training loop on two devices, with a tape and a checkpoint."""

import argparse
import os
import tempfile

import numpy as np
import tensorflow as tf

BATCH = 64


def make_dataset():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1024, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True))

    def noisy(row, target):
        return tf.concat([row, tf.square(row[:2])], axis=0), tf.cast(target, tf.float32)

    return tf.data.Dataset.from_tensor_slices((x, y)).map(noisy).repeat().batch(BATCH)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--logs", default=tempfile.mkdtemp())
    options = parser.parse_args()

    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((10,)),
                tf.keras.layers.Dense(32, activation=tf.nn.tanh),
                tf.keras.layers.Dense(1),
            ]
        )
        optimizer = tf.keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        mean_error = tf.keras.metrics.Mean()
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            error = tf.squeeze(model(x, training=True) - y, axis=1)
            loss = tf.nn.compute_average_loss(tf.square(error), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        mean_error.update_state(tf.reduce_mean(tf.abs(0.5 * error)))
        return loss

    @tf.function
    def train_step(batch):
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    batches = iter(strategy.experimental_distribute_dataset(make_dataset()))
    writer = tf.summary.create_file_writer(options.logs)
    with writer.as_default():
        for step in range(options.steps):
            loss = train_step(next(batches))
            if step % 20 == 0 or step == options.steps - 1:
                tf.summary.scalar("loss", loss, step=step)
                print(f"step {step}: loss {loss.numpy():.4f}, error {mean_error.result():.4f}")
    path = checkpoint.save(os.path.join(options.logs, "model"))
    print(f"saved as {path}")


if __name__ == "__main__":
    main()
