"""One of TensorFlow's workers, in an interpreter that has TensorFlow."""

import os
from functools import partial

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf

from benchmarks._workers import networks
from benchmarks._workers.serve import eager, is_eager, serve


def main() -> None:
    tf.get_logger().setLevel("ERROR")
    if is_eager():
        eager(first_eager_step)
        return
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    makers = {
        **networks.all_reduces(partial(all_reduce, strategy)),
        **networks.trainers(partial(trainer, strategy), LOSSES),
    }
    serve(makers, lambda x: [r.numpy() for r in strategy.experimental_local_results(x)])


def all_reduce(strategy, size):
    def replica(x):
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, x * 1.0)

    @tf.function
    def step(x):
        return strategy.run(replica, args=(x,))

    last = [tf.ones(size)]

    def one():
        last[0] = step(last[0])
        return last[0]

    return one


def first_eager_step():
    [cpu] = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    batch = networks.mlp_batch()
    step = trainer(strategy, mlp_loss, networks.mlp_weights(), batch, compiled=False)
    for value in strategy.experimental_local_results(step()):
        value.numpy()


def trainer(strategy, loss, initial, batch, *, compiled=True):
    with strategy.scope():
        weights = [tf.Variable(w) for w in initial]
    batch = [tf.constant(x) for x in batch]

    def replica(*batch):
        with tf.GradientTape() as tape:
            value = loss(weights, *batch)
        grads = [tf.convert_to_tensor(g) for g in tape.gradient(value, weights)]
        mean = tf.distribute.ReduceOp.MEAN
        grads = tf.distribute.get_replica_context().all_reduce(mean, grads)

        def update(strategy, *grads):
            for w, g in zip(weights, grads, strict=True):
                strategy.extended.update(w, lambda w, g: w.assign_sub(networks.RATE * g), (g,))

        tf.distribute.get_replica_context().merge_call(update, grads)
        return value

    def step(*batch):
        return strategy.run(replica, args=batch)

    step = tf.function(step) if compiled else step
    return lambda: step(*batch)


def mlp_loss(weights, x, y):
    for i in range(0, len(weights), 2):
        x = x @ weights[i] + weights[i + 1]
        x = tf.nn.relu(x) if i < len(weights) - 2 else x
    return cross_entropy(x, y)


def cnn_loss(weights, x, y):
    for kernel in weights[:2]:
        x = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), 2, 2, "VALID")
    return cross_entropy(tf.reshape(x, (len(x), -1)) @ weights[2] + weights[3], y)


def transformer_loss(weights, tokens, following):
    embedding, positions, *blocks, out = weights
    n, t = tokens.shape
    heads, each = networks.HEADS, networks.WIDTH // networks.HEADS
    hidden = tf.reshape(tf.gather(embedding, tokens) + positions, (n * t, -1))
    mask = tf.linalg.band_part(tf.ones((t, t), tf.bool), -1, 0)
    for i in range(0, len(blocks), 4):
        to_qkv, to_hidden, up, down = blocks[i : i + 4]
        qkv = tf.reshape(normalised(hidden) @ to_qkv, (n, t, 3, heads, each))
        q, k, v = (tf.transpose(qkv[:, :, j], (0, 2, 1, 3)) for j in range(3))
        scores = tf.where(mask, tf.matmul(q, k, transpose_b=True) / each**0.5, -1e9)
        mixed = tf.transpose(tf.nn.softmax(scores) @ v, (0, 2, 1, 3))
        hidden += tf.reshape(mixed, (n * t, -1)) @ to_hidden
        hidden += tf.nn.relu(normalised(hidden) @ up) @ down
    return cross_entropy(normalised(hidden) @ out, tf.reshape(following, (-1,)))


def normalised(x):
    x -= tf.reduce_mean(x, -1, keepdims=True)
    return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-5)


def cross_entropy(logits, labels):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


LOSSES = {"MLP": mlp_loss, "CNN": cnn_loss, "transformer": transformer_loss}


if __name__ == "__main__":
    main()
