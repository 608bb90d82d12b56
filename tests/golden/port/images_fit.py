"""Keras's fit on images: a pipeline of tf.image, losses and metrics of the backend, callbacks."""

import json
import os

import numpy as np
import tensorflow as tf
import tensorflow.keras.backend as K  # noqa: N812
from tensorflow.keras.callbacks import LearningRateScheduler, ModelCheckpoint

AUTO = tf.data.experimental.AUTOTUNE
SIZE = (6, 6)


def augment(image, label):
    image = tf.image.convert_image_dtype(image, tf.float32)
    image = tf.image.resize(image, SIZE)
    image = tf.image.flip_left_right(image)
    image = tf.image.central_crop(image, 0.5)
    image = (image - 0.5) * 2.0
    return tf.reshape(image, [4, 4, 3]), tf.one_hot(label, 3)


def dice_loss(y_true, y_pred):
    intersection = K.sum(y_true * y_pred, axis=-1)
    union = K.sum(K.square(y_true), axis=-1) + K.sum(K.square(y_pred), axis=-1)
    dice = 1.0 - (2.0 * intersection + K.epsilon()) / (union + K.epsilon())
    return dice + K.categorical_crossentropy(y_true, K.clip(y_pred, 1e-4, 1.0))


def hits(y_true, y_pred):
    return K.cast(K.equal(K.argmax(y_true), K.argmax(y_pred)), "float32")


def schedule(epoch):
    return 0.05 if epoch < 1 else 0.02


def main(directory):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(31)
    images = rng.integers(0, 256, size=(32, 8, 8, 3)).astype("uint8")
    labels = rng.integers(0, 3, size=32)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.map(augment, num_parallel_calls=AUTO).cache()
    options = tf.data.Options()
    options.experimental_deterministic = True
    train, test = data.take(24).batch(8).with_options(options), data.skip(24).batch(8)

    with strategy.scope():
        inputs = tf.keras.layers.Input(shape=(4, 4, 3))
        x = tf.keras.layers.Conv2D(4, 3, padding="same", activation=tf.nn.relu)(inputs)
        x = tf.keras.layers.MaxPooling2D()(x)
        x = tf.keras.layers.GlobalAveragePooling2D()(x)
        outputs = tf.keras.layers.Dense(3, activation="softmax")(x)
        model = tf.keras.Model(inputs, outputs)
        model.set_weights([0.5 * rng.normal(size=w.shape) for w in model.get_weights()])
        model.compile(
            optimizer=tf.keras.optimizers.SGD(learning_rate=0.05, momentum=0.9),
            loss=dice_loss,
            metrics=[hits, tf.keras.metrics.CategoricalAccuracy(name="accuracy")],
        )
    path = os.path.join(directory, "best.weights.h5")
    history = model.fit(
        train,
        epochs=3,
        validation_data=test,
        callbacks=[
            LearningRateScheduler(schedule),
            ModelCheckpoint(path, save_weights_only=True, monitor="val_loss"),
        ],
        verbose=0,
    )
    found = {k: [float(v) for v in vs] for k, vs in history.history.items()}
    found["evaluate"] = [float(v) for v in model.evaluate(test, verbose=0)]
    found["saved"] = tf.io.gfile.exists(path)
    found["predictions"] = np.asarray(model.predict(test, verbose=0)).tolist()
    return found


if __name__ == "__main__":
    print(json.dumps(main(".")))
