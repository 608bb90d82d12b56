"""Keras: compile and fit in the scope of a MirroredStrategy."""

import json

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers

BATCH = 8


def make_model():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation=tf.nn.relu),
            layers.Dense(3),
        ]
    )
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=w.shape) * 0.3 for w in model.get_weights()])
    return model


def make_dataset():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 4)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int32) + (x[:, 0] > 0.5)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).cache().batch(BATCH)
    return dataset.with_options(options).prefetch(tf.data.AUTOTUNE)


def main(directory):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    print(f"Number of devices: {strategy.num_replicas_in_sync}")
    with strategy.scope():
        model = make_model()
        model.compile(
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=tf.keras.optimizers.Adam(0.02),
            metrics=["accuracy"],
        )
    history = model.fit(make_dataset(), epochs=3, verbose=0, shuffle=False)
    loss, accuracy = model.evaluate(make_dataset(), verbose=0)
    predicted = tf.argmax(model.predict(make_dataset(), verbose=0), axis=1)
    return {
        "losses": history.history["loss"],
        "test": [loss, accuracy],
        "predicted": predicted.numpy().tolist(),
    }


if __name__ == "__main__":
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
    )
    print(json.dumps(main(".")))
