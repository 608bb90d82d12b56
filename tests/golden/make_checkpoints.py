"""Writes small checkpoints with TensorFlow 2.21: what `rx.train` must be able to read.

Needs TensorFlow; fills the folder ``checkpoints`` beside it:

    python tests/golden/make_checkpoints.py
"""

import json
import os
import pathlib
import shutil
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from tensorflow.python.keras.optimizer_v2 import (
    adadelta,
    adagrad,
    adam,
    adamax,
    ftrl,
    gradient_descent,
    rmsprop,
)

FOLDER = pathlib.Path(__file__).parent / "checkpoints"


def of_variables() -> None:
    checkpoint = tf.train.Checkpoint(
        v=tf.Variable(np.arange(6, dtype=np.float32).reshape(2, 3)),
        w=tf.Variable([1, -2], dtype=tf.int64),
        s=tf.Variable(["a", "bcd", ""]),
        h=tf.Variable(tf.constant([1.5, -2.5], tf.bfloat16)),
        b=tf.Variable([True, False]),
        e=tf.Variable(np.zeros((0, 3), np.float16)),
        lst=[tf.Variable(1.0), {"x": tf.Variable(2.0)}],
    )
    checkpoint.save(str(FOLDER / "variables"))


def in_parts() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        value = v1.random_uniform_initializer(seed=3)
        whole = v1.get_variable(
            "big/w", (300, 3), initializer=value, partitioner=v1.fixed_size_partitioner(3)
        )
        v1.get_variable("q", initializer=np.float64(3.5))
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(FOLDER / "parts"), write_meta_graph=False)
        np.save(FOLDER / "parts.npy", session.run(whole.as_tensor()))


def of_keras() -> None:
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((4,)), layers.Dense(3), layers.BatchNormalization(), layers.Dense(1)]
    )
    optimizer = tf.keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    model.fit(x, x.sum(1, keepdims=True), verbose=0, shuffle=False, epochs=2)
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(FOLDER / "keras"))
    weights = [w.tolist() for w in model.get_weights()]
    history = model.fit(x, x.sum(1, keepdims=True), verbose=0, shuffle=False, epochs=2).history
    told = {"weights": weights, "x": x.tolist(), "loss_after": history["loss"]}
    (FOLDER / "keras.json").write_text(json.dumps(told))


def of_slots() -> None:
    """Optimizers as Keras 2 had them, with slots; and what two further steps give."""
    told = {}
    for name, optimizer in {
        "adam": adam.Adam(0.1),
        "amsgrad": adam.Adam(0.1, amsgrad=True),
        "sgd": gradient_descent.SGD(0.1, momentum=0.9),
        "rmsprop": rmsprop.RMSprop(0.1, momentum=0.5),
        "adagrad": adagrad.Adagrad(0.1),
        "adadelta": adadelta.Adadelta(0.1),
        "adamax": adamax.Adamax(0.1),
        "ftrl": ftrl.Ftrl(0.1),
    }.items():
        a, b = tf.Variable([1.0, -2.0, 3.0]), tf.Variable([[4.0], [0.5]])

        def step(a: tf.Variable, b: tf.Variable, optimizer: Any) -> None:
            optimizer.apply_gradients([(2 * a, a), (b * b, b)])

        for _ in range(3):
            step(a, b, optimizer)
        tf.train.Checkpoint(a=a, b=b, optimizer=optimizer).write(str(FOLDER / f"slots-{name}"))
        for _ in range(2):
            step(a, b, optimizer)
        told[name] = [a.numpy().tolist(), b.numpy().tolist()]
    (FOLDER / "slots.json").write_text(json.dumps(told))


if __name__ == "__main__":
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    in_parts()
    of_keras()
    of_slots()
    of_variables()
