"""Workers that find each other by TF_CONFIG, and train variables of their own."""

import json
import os

import numpy as np
import tensorflow as tf

GLOBAL_BATCH = 8


def main(directory):
    cluster = json.loads(os.environ["TF_CONFIG"])
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.AUTO
        )
    )
    rng = np.random.default_rng(5)
    x = rng.normal(size=(24, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32))[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat(2).batch(GLOBAL_BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    batches = strategy.experimental_distribute_dataset(dataset.with_options(options))

    with strategy.scope():
        w = tf.Variable(tf.zeros([3, 1]), name="w")
        b = tf.Variable(0.0, name="b")
        steps = tf.Variable(
            0,
            dtype=tf.int32,
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @tf.function
    def train_step(iterator):
        def step_fn(inputs):
            features, labels = inputs
            with tf.GradientTape() as tape:
                error = tf.matmul(features, w) + b - labels
                loss = tf.nn.compute_average_loss(
                    tf.reduce_sum(tf.square(error), axis=1), global_batch_size=GLOBAL_BATCH
                )
            gradients = tape.gradient(loss, [w, b])
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
            for variable, gradient in zip([w, b], gradients):
                variable.assign_sub(0.2 * gradient)
            steps.assign_add(1)
            return loss

        losses = strategy.run(step_fn, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    iterator = iter(batches)
    losses = [train_step(iterator).numpy().item() for _ in range(6)]
    return {
        "workers": len(cluster["cluster"]["worker"]),
        "replicas": strategy.num_replicas_in_sync,
        "losses": losses,
        "w": w.numpy().tolist(),
        "b": b.numpy().item(),
        "steps": int(steps.numpy()),
    }


if __name__ == "__main__":
    print(json.dumps(main(".")))
