"""Several steps in one call, whose number is a tensor; loops over tensors in the step."""

import json

import numpy as np
import tensorflow as tf

BATCH = 8
keras = tf.keras
layers = keras.layers


def discounted(rewards, discount):
    """Returns of an episode, from the last step to the first."""
    steps = tf.reduce_sum(tf.cast(rewards > -100.0, tf.int32))
    total = tf.constant(0.0)
    returns = tf.zeros_like(rewards)
    for i in tf.range(steps - 1, -1, -1):
        total = rewards[i] + discount * total
        returns = tf.tensor_scatter_nd_update(returns, [[i]], [total])
    return returns


@tf.function
def penalty(weights):
    total = 0.0
    largest = tf.reduce_max(weights[0])
    for row in tf.abs(weights):
        total = total + tf.reduce_sum(row)
        if tf.reduce_max(row) > largest:
            largest = tf.reduce_max(row)
    return total, largest


def main(directory):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(23)
    states = rng.normal(size=(64, 4)).astype(np.float32)
    actions = rng.integers(0, 2, size=64)
    rewards = np.array([1.0, 0.5, -1.0, 2.0, -200.0, -200.0], np.float32)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(2)])
        model.set_weights([0.5 * rng.normal(size=w.shape) for w in model.get_weights()])
        optimizer = keras.optimizers.Adam(0.02)
        optimizer.build(model.trainable_variables)
        training_loss = keras.metrics.Mean("training_loss", dtype=tf.float32)

    dataset = tf.data.Dataset.from_tensor_slices((states, actions)).batch(BATCH).repeat()
    train_iterator = iter(strategy.experimental_distribute_dataset(dataset))

    @tf.function
    def train_multiple_steps(iterator, steps):
        def step_fn(inputs):
            features, chosen = inputs
            with tf.GradientTape() as tape:
                logits = model(features, training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(chosen, logits)
                loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(list(zip(gradients, model.trainable_variables)))
            training_loss.update_state(loss * strategy.num_replicas_in_sync)

        for _ in tf.range(steps):
            strategy.run(step_fn, args=(next(iterator),))

    results = []
    for _ in range(3):
        train_multiple_steps(train_iterator, tf.convert_to_tensor(3))
        results.append(float(training_loss.result()))
        training_loss.reset_state()
    returns = tf.function(discounted)(tf.constant(rewards), 0.9)
    found = [float(part) for part in penalty(tf.constant(states[:5]))]
    return {"results": results, "returns": returns.numpy().tolist(), "penalty": found}


if __name__ == "__main__":
    print(json.dumps(main(".")))
