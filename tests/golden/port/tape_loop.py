"""A custom training loop: a tape, an optimizer, and metrics."""

import json

import numpy as np
import tensorflow as tf

BATCH = 8
EPOCHS = 2


class Net(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = tf.keras.layers.Dense(6)
        self.out = tf.keras.layers.Dense(3)

    def call(self, x):
        x = tf.math.tanh(self.hidden(x))
        x = tf.concat([x, tf.square(x)], axis=-1)
        return self.out(x)


def main(directory):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(3)
    x = rng.normal(size=(32, 5)).astype("float32")
    y = np.argmax(x[:, :3], axis=1)
    train = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    train_dist = strategy.experimental_distribute_dataset(train)

    with strategy.scope():
        loss_object = tf.keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction=None
        )
        train_accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        model = Net()
        model(tf.zeros((1, 5)))
        model.set_weights([0.5 * rng.normal(size=w.shape) for w in model.get_weights()])
        optimizer = tf.keras.optimizers.SGD(learning_rate=0.3, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def compute_loss(labels, predictions):
        per_example = loss_object(labels, predictions)
        loss = tf.nn.compute_average_loss(per_example, global_batch_size=BATCH)
        penalty = tf.add_n([tf.reduce_sum(tf.square(w)) for w in model.trainable_variables])
        return loss + tf.nn.scale_regularization_loss(0.001 * penalty)

    def train_step(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        train_accuracy.update_state(labels, predictions)
        return loss

    @tf.function
    def distributed_train_step(dataset_inputs):
        per_replica_losses = strategy.run(train_step, args=(dataset_inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica_losses, axis=None)

    losses, accuracies = [], []
    for _ in range(EPOCHS):
        total_loss, num_batches = 0.0, 0
        for batch in train_dist:
            total_loss += distributed_train_step(batch)
            num_batches += 1
        losses.append((total_loss / num_batches).numpy().item())
        accuracies.append(train_accuracy.result().numpy().item())
        train_accuracy.reset_state()
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(w**2) for w in model.trainable_variables]))
    return {"losses": losses, "accuracies": accuracies, "norm": float(norm)}


if __name__ == "__main__":
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    print(json.dumps(main(".")))
