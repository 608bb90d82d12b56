"""Contrastive learning: each replica compares its examples with those of all replicas."""

import json

import numpy as np
import tensorflow.compat.v2 as tf

LARGE_NUM = 1e9
BATCH = 8


def cross_replica_concat(tensor):
    replica_context = tf.distribute.get_replica_context()
    if replica_context is None or replica_context.num_replicas_in_sync == 1:
        return tensor
    return replica_context.all_gather(tensor, axis=0)


def contrastive_loss(hidden, temperature=0.5):
    hidden = tf.math.l2_normalize(hidden, -1)
    hidden1, hidden2 = tf.split(hidden, 2, 0)
    batch_size = tf.shape(hidden1)[0]
    hidden1_large = cross_replica_concat(hidden1)
    hidden2_large = cross_replica_concat(hidden2)
    enlarged_batch_size = tf.shape(hidden1_large)[0]
    replica_context = tf.distribute.get_replica_context()
    replica_id = tf.cast(replica_context.replica_id_in_sync_group, tf.int32)
    labels_idx = tf.range(batch_size) + replica_id * batch_size
    labels = tf.one_hot(labels_idx, enlarged_batch_size * 2)
    masks = tf.one_hot(labels_idx, enlarged_batch_size)
    logits_aa = tf.matmul(hidden1, hidden1_large, transpose_b=True) / temperature
    logits_aa = logits_aa - masks * LARGE_NUM
    logits_bb = tf.matmul(hidden2, hidden2_large, transpose_b=True) / temperature
    logits_bb = logits_bb - masks * LARGE_NUM
    logits_ab = tf.matmul(hidden1, hidden2_large, transpose_b=True) / temperature
    logits_ba = tf.matmul(hidden2, hidden1_large, transpose_b=True) / temperature
    loss_a = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ab, logits_aa], 1))
    loss_b = tf.nn.softmax_cross_entropy_with_logits(labels, tf.concat([logits_ba, logits_bb], 1))
    loss = tf.reduce_mean(loss_a + loss_b)
    return loss, logits_ab, labels


def main(directory):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rng = np.random.default_rng(13)
    views = rng.normal(size=(4, BATCH, 2, 5)).astype("float32")
    views[:, :, 1] = views[:, :, 0] + 0.1 * views[:, :, 1]

    def dataset_fn(context):
        per_replica = context.get_per_replica_batch_size(BATCH)
        ds = tf.data.Dataset.from_tensor_slices(views.reshape(-1, 2, 5))
        return ds.batch(per_replica)

    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.Input((5,)), tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(3)]
        )
        model.set_weights([0.5 * rng.normal(size=w.shape) for w in model.get_weights()])
        optimizer = tf.keras.optimizers.SGD(
            tf.keras.optimizers.schedules.CosineDecay(0.2, 10), momentum=0.9
        )
        optimizer.build(model.trainable_variables)
        loss_metric = tf.keras.metrics.Mean("contrast_loss")
        accuracy_metric = tf.keras.metrics.Mean("contrast_acc")

    def single_step(features):
        with tf.GradientTape() as tape:
            both = tf.concat([features[:, 0], features[:, 1]], 0)
            loss, logits, labels = contrastive_loss(model(both, training=True))
            scaled = loss / strategy.num_replicas_in_sync
        correct = tf.equal(tf.argmax(labels, 1), tf.argmax(logits, axis=1))
        accuracy_metric.update_state(tf.reduce_mean(tf.cast(correct, tf.float32)))
        loss_metric.update_state(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    @tf.function
    def train_step(inputs):
        strategy.run(single_step, args=(inputs,))

    results = []
    for inputs in strategy.distribute_datasets_from_function(dataset_fn):
        train_step(inputs)
        results.append([float(loss_metric.result()), float(accuracy_metric.result())])
    norm = tf.linalg.global_norm(model.trainable_variables)
    return {"results": results, "norm": float(norm)}


if __name__ == "__main__":
    print(json.dumps(main(".")))
