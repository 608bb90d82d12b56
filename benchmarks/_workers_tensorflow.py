"""One of TensorFlow's workers, in an interpreter that has TensorFlow; see ``_workers_ours``."""

import itertools
import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

RATE = 0.01
WIDTHS = [784, 512, 512, 10]
BATCH = 64


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    tf.get_logger().setLevel("ERROR")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    makers = {
        **{f"all_reduce {n}": lambda n=n: all_reduce(strategy, n) for n in (1, 1024, 2**18, 2**22)},
        "MLP": lambda: mlp(strategy),
    }
    steps = {}
    print("ready", file=answers)
    for line in sys.stdin:
        name, count = line.rsplit(maxsplit=1)
        if name not in steps:
            steps[name] = makers[name]()
        began = time.perf_counter()
        for _ in range(int(count)):
            result = steps[name]()
        for x in strategy.experimental_local_results(result):
            x.numpy()
        print(time.perf_counter() - began, file=answers)


def all_reduce(strategy, size):
    def replica(x):
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, x * 1.0)

    @tf.function
    def step(x):
        return strategy.run(replica, args=(x,))

    held = [tf.ones(size)]

    def one():
        held[0] = step(held[0])
        return held[0]

    return one


def mlp(strategy):
    rng = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            tf.Variable(w)
            for a, b in itertools.pairwise(WIDTHS)
            for w in (
                (rng.standard_normal((a, b)) * 0.05).astype(np.float32),
                np.zeros(b, np.float32),
            )
        ]
    rng = np.random.default_rng(1)
    x = tf.constant(rng.standard_normal((BATCH, WIDTHS[0])).astype(np.float32))
    y = tf.constant(rng.integers(0, 10, BATCH).astype(np.int32))

    def replica(x, y):
        with tf.GradientTape() as tape:
            h = x
            for i in range(0, len(weights), 2):
                h = h @ weights[i] + weights[i + 1]
                h = tf.nn.relu(h) if i < len(weights) - 2 else h
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, h)
            loss = tf.reduce_mean(losses) / strategy.num_replicas_in_sync
        grads = tape.gradient(loss, weights)
        grads = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, grads)

        def update(strategy, *grads):
            for w, g in zip(weights, grads, strict=True):
                strategy.extended.update(w, lambda w, g: w.assign_sub(RATE * g), (g,))

        tf.distribute.get_replica_context().merge_call(update, grads)
        return loss

    @tf.function
    def step(x, y):
        return strategy.run(replica, args=(x, y))

    return lambda: step(x, y)


if __name__ == "__main__":
    main()
