"""The TensorFlow side of the table, in an interpreter of its own that has TensorFlow.

It reads lines `name steps` and answers each with the seconds that so many steps took, so that its
blocks can alternate with ours.
"""

import os
import sys
import time
from itertools import pairwise

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

RATE = 0.01


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the library prints is no answer
    tf.get_logger().setLevel("ERROR")
    [cpu] = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    makers = {
        "MLP": lambda: train_step(strategy, [784, 512, 512, 10], residual=False),
        "CNN with max pooling": lambda: cnn_step(strategy),
        "50 layers": lambda: train_step(strategy, [128] * 50 + [10], residual=True),
        "small MLP": lambda: train_step(strategy, [784, 128, 10], residual=False),
        "50 narrow layers": lambda: train_step(strategy, [32] * 50 + [10], residual=True),
        "eager": lambda: eager(strategy, lambda x: x * 2 + 1),
        "eager all_reduce": lambda: eager(
            strategy, lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x * 2)
        ),
    }
    steps = {}
    print("ready", file=answers)
    for line in sys.stdin:
        name, count = line.rsplit(maxsplit=1)
        if name not in steps:
            steps[name] = makers[name]()
        step = steps[name]
        began = time.perf_counter()
        for _ in range(int(count)):
            result = step()
        for x in strategy.experimental_local_results(result):
            x.numpy()
        print(time.perf_counter() - began, file=answers)


def train_step(strategy, widths, *, residual):
    shapes = [shape for a, b in pairwise(widths) for shape in ((a, b), (b,))]

    def logits(weights, out):
        for kernel, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
            new = tf.nn.relu(out @ kernel + bias)
            out = out + new if residual else new
        return out @ weights[-2] + weights[-1]

    return trained(strategy, shapes, (widths[0],), logits)


def cnn_step(strategy):
    shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (7 * 7 * 64, 10), (10,)]

    def logits(weights, out):
        for kernel in weights[:2]:
            out = tf.nn.relu(tf.nn.conv2d(out, kernel, 1, "SAME"))
            out = tf.nn.max_pool2d(out, 2, 2, "VALID")
        return tf.reshape(out, (len(out), -1)) @ weights[2] + weights[3]

    return trained(strategy, shapes, (28, 28, 1), logits)


def trained(strategy, shapes, row, logits):
    rng = np.random.default_rng(0)
    with strategy.scope():
        flat = [tf.Variable((rng.standard_normal(s) * 0.05).astype(np.float32)) for s in shapes]

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            out = logits(flat, x)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=out)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, flat)
        gradients = tf.distribute.get_replica_context().all_reduce("MEAN", gradients)
        for weight, gradient in zip(flat, gradients, strict=True):
            weight.assign_sub(RATE * gradient)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(x, y)), axis=None)

    x, y = (
        strategy.experimental_distribute_values_from_function(make)
        for make in (
            lambda _: tf.constant(rng.standard_normal((64, *row)).astype(np.float32)),
            lambda _: tf.constant(rng.integers(0, 10, 64).astype(np.int32)),
        )
    )
    return lambda: step(x, y)


def eager(strategy, fn):
    x = strategy.experimental_distribute_values_from_function(lambda _: tf.ones(4))
    return lambda: strategy.run(fn, args=(x,))


if __name__ == "__main__":
    main()
