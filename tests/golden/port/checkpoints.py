"""Checkpoints: a run that stops, and a second one that goes on where it was."""

import json
import os

import numpy as np
import tensorflow as tf

BATCH = 10


def data():
    rng = np.random.default_rng(13)
    x = rng.uniform(-1, 1, size=(40, 2)).astype(np.float32)
    y = np.float32(0.5) * x[:, 0] - x[:, 1] ** 2
    return x, y


def train(directory, steps):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
        model.set_weights([np.full((2, 1), 0.25, np.float32), np.zeros(1, np.float32)])
        optimizer = tf.keras.optimizers.Adam(0.05)
        optimizer.build(model.trainable_variables)
        step = tf.Variable(0, trainable=False)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    status = checkpoint.restore(manager.latest_checkpoint)
    if manager.latest_checkpoint:
        status.expect_partial()

    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def train_step(batch):
        def replica_step(features, labels):
            with tf.GradientTape() as tape:
                predicted = tf.squeeze(model(features), axis=1)
                losses = tf.abs(predicted - labels) + tf.pow(predicted - labels, 2)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply_gradients(zip(gradients, model.trainable_weights))
            return loss

        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    losses = []
    for _ in range(steps):
        losses.append(train_step(next(iterator)).numpy().item())
        step.assign_add(1)
    manager.save()
    kept = [os.path.basename(path) for path in manager.checkpoints]
    return losses, int(step.numpy()), kept, model.get_weights()


def main(directory):
    where = os.path.join(directory, "ckpt")
    first = train(where, 4)
    second = train(where, 4)
    third = train(where, 4)
    return {
        "losses": [first[0], second[0], third[0]],
        "steps": [first[1], second[1], third[1]],
        "kept": third[2],
        "weights": [w.tolist() for w in third[3]],
        "step_in_file": int(tf.train.load_variable(where, "step/.ATTRIBUTES/VARIABLE_VALUE")),
    }


if __name__ == "__main__":
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    print(json.dumps(main("/tmp")))
