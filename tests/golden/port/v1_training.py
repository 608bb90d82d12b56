"""Optimizers, losses and names of version 1, in a loop under a strategy."""

import json

import numpy as np
import tensorflow.compat.v1 as tf

tf.enable_v2_behavior()
tf.logging.set_verbosity(tf.logging.ERROR)
BATCH, STEPS = 8, 4


def make_optimizer(name, step):
    if name == "sgd":
        return tf.train.GradientDescentOptimizer(0.5)
    if name == "momentum":
        return tf.train.MomentumOptimizer(0.1, momentum=0.9)
    if name == "nesterov":
        return tf.train.MomentumOptimizer(0.1, 0.9, use_nesterov=True)
    if name == "adam":
        return tf.train.AdamOptimizer(learning_rate=lambda: 0.05 / (1.0 + tf.to_float(step)))
    if name == "adagrad":
        return tf.train.AdagradOptimizer(0.3)
    if name == "rmsprop":
        return tf.train.RMSPropOptimizer(0.02, decay=0.8, momentum=0.5, epsilon=1e-3)
    if name == "centered":
        return tf.train.RMSPropOptimizer(0.02, centered=True)
    return tf.train.FtrlOptimizer(
        0.4,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.02,
        l2_shrinkage_regularization_strength=0.03,
        beta=0.1,
    )


def train(name, images, labels):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        rng = np.random.default_rng(19)
        weights = tf.Variable(0.3 * rng.normal(size=(5, 3)).astype("float32"))
        biases = tf.Variable(tf.zeros([3]))
        global_step = tf.Variable(0, trainable=False, dtype=tf.int32)
        optimizer = make_optimizer(name, global_step)

    def step_fn(features, targets):
        with tf.GradientTape() as tape:
            logits = tf.matmul(features, weights) + biases
            loss = tf.losses.softmax_cross_entropy(
                tf.one_hot(targets, 3), logits, label_smoothing=0.1, reduction="weighted_sum"
            )
            loss += 0.01 * tf.losses.huber_loss(tf.zeros_like(weights), weights, delta=0.2)
            loss /= BATCH
        gradients = tape.gradient(loss, [weights, biases])
        optimizer.apply_gradients(zip(gradients, [weights, biases]), global_step=global_step)
        return loss

    @tf.function
    def train_step(features, targets):
        losses = strategy.run(step_fn, args=(features, targets))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH)
    losses = [
        float(train_step(*batch)) for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    return {
        "losses": losses,
        "weights": weights.numpy().tolist(),
        "slots": optimizer.get_slot_names(),
        "step": int(global_step.numpy()),
    }


def main(directory):
    rng = np.random.default_rng(17)
    images = rng.normal(size=(BATCH * STEPS, 5)).astype("float32")
    labels = np.argmax(images[:, :3], axis=1)
    names = ["sgd", "momentum", "nesterov", "adam", "adagrad", "rmsprop", "centered", "ftrl"]
    found = {name: train(name, images, labels) for name in names}
    variable = tf.Variable([1.0, -2.0])
    tf.train.AdamOptimizer(0.1).minimize(lambda: tf.reduce_sum(tf.square(variable)))
    found["minimize"] = variable.numpy().tolist()
    return found


if __name__ == "__main__":
    print(json.dumps(main(".")))
