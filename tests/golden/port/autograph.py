# ruff: noqa: RET504, SIM108 - forms that programs have
"""Control flow on tensors, which AutoGraph compiles: every branch is taken, by some input."""

import numpy as np
import tensorflow as tf

counter = tf.Variable(0)
largest = tf.Variable(0.0)


@tf.function
def scale(x):
    # Both branches assign.
    if tf.reduce_sum(x) > 0:
        y = x * 2
    else:
        y = -x
    return y


@tf.function
def clip(x, limit=4.0, verbose=False):
    norm = tf.sqrt(tf.reduce_sum(tf.square(x)))
    if norm > limit:
        x = x / norm * limit
    if verbose:
        print(x)
    return x


@tf.function
def grade(x):
    mean = tf.reduce_mean(x)
    if mean > 2.0:
        kind = tf.constant(2)
        x = x - 1.0
    elif 0.0 < mean < 1.0:
        kind = tf.constant(1)
    elif mean < -1.0 or tf.reduce_any(x > 7.0):
        kind = tf.constant(-1)
        x = x * 0.5
    else:
        kind = tf.constant(0)
    return kind, x


@tf.function
def early(x):
    total = tf.reduce_sum(x)
    if total > 3.0:
        return x + 1.0
    doubled = x * 2.0
    if not total < 0.0:
        return doubled
    doubled = doubled - 10.0
    return doubled


@tf.function
def halve(x):
    turns = 0
    while tf.reduce_max(tf.abs(x)) > 1.0:
        half = x / 2.0
        x = half
        turns += 1
    return x, turns


def count_large(x):
    if tf.reduce_max(x) > largest:
        largest.assign(tf.reduce_max(x))
        counter.assign_add(1)
    else:
        counter.assign_add(10)


@tf.function
def track(x):
    count_large(x)
    return tf.reduce_sum(x) if tf.reduce_sum(x) > 0 else tf.reduce_sum(-x)


@tf.function
def nested(x):
    steps = tf.constant(0)
    while steps < 6:
        if tf.reduce_sum(x) > 5.0:
            if x[0] > x[1]:
                x = x * 0.5
            else:
                x = x - 1.0
        else:
            x = x + 2.0
        steps += 1
    return x


@tf.function
def by_signature(x: tf.Tensor, low: tf.Tensor):
    if x > low:
        x = x - low
    return x


class Gate(tf.keras.layers.Layer):
    """A layer whose call branches on its input."""

    def call(self, x):
        return self.scaled(x)

    def scaled(self, x):
        if tf.reduce_mean(x) > 1.0:
            return x / tf.reduce_mean(x)
        return x


@tf.function
def train(variable, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(variable * x - 1.0))
        if loss > 4.0:
            loss = loss * 0.5
    gradient = tape.gradient(loss, variable)
    if tf.reduce_max(tf.abs(gradient)) > 2.0:
        gradient = gradient / tf.reduce_max(tf.abs(gradient)) * 2.0
    variable.assign_sub(0.1 * gradient)
    return loss


def main(folder):
    inputs = [
        np.array(row, np.float32)
        for row in ([1, 2, 3], [-1, -2, 4], [0.1, 0.2, 0.3], [-9, 2, 1], [9, -8, 0.5], [0, 0, 0])
    ]
    inputs = [tf.constant(row) for row in inputs]
    found = {}
    for function in (scale, clip, grade, early, halve, nested, track, Gate()):
        found[str(len(found))] = [
            [np.asarray(part).tolist() for part in tf.nest.flatten(function(row))] for row in inputs
        ]
    found["state"] = [int(counter), float(largest)]
    found["signature"] = [float(by_signature(tf.constant(a), tf.constant(1.0))) for a in (0.5, 3.0)]
    variable = tf.Variable([0.5, -0.5, 3.0])
    found["losses"] = [float(train(variable, row)) for row in inputs]
    found["variable"] = np.asarray(variable.read_value()).tolist()
    return found


if __name__ == "__main__":
    print(main(""))
