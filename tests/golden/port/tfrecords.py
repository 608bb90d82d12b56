"""TFRecord files: examples written, read in turn, parsed, batched and trained on."""

import json
import os

import numpy as np
import tensorflow as tf
from tensorflow.io import FixedLenFeature

BATCH = 6


def write(path, rows):
    with tf.io.TFRecordWriter(path) as writer:
        for row in rows:
            feature = {
                "pixels": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[row.astype(np.uint8).tobytes()])
                ),
                "label": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[int(row.sum()) % 3])
                ),
                "weight": tf.train.Feature(float_list=tf.train.FloatList(value=[row.mean() / 9])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(example.SerializeToString())


def parse(record):
    features = tf.io.parse_single_example(
        record,
        {
            "pixels": FixedLenFeature([], tf.string),
            "label": FixedLenFeature([], tf.int64),
            "weight": FixedLenFeature([1], tf.float32),
        },
    )
    pixels = tf.io.decode_raw(features["pixels"], tf.uint8)
    pixels = tf.reshape(tf.cast(pixels, tf.float32) / 9.0, [5])
    return tf.concat([pixels, features["weight"]], 0), tf.one_hot(features["label"], 3)


def main(directory):
    rng = np.random.default_rng(17)
    for i in range(2):
        write(os.path.join(directory, f"part-{i}.tfrecord"), rng.integers(0, 9, (12, 5)))

    pattern = os.path.join(directory, "part-*.tfrecord")
    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    dataset = files.interleave(tf.data.TFRecordDataset, cycle_length=2, block_length=3)
    dataset = dataset.map(parse, num_parallel_calls=tf.data.experimental.AUTOTUNE)
    dataset = dataset.batch(BATCH).prefetch(2)

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    batches = strategy.experimental_distribute_dataset(dataset.with_options(options))
    with strategy.scope():
        kernel = tf.Variable(tf.fill([6, 3], 0.1))
        bias = tf.Variable(tf.zeros(3))

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = tf.nn.bias_add(x @ kernel, bias)
            losses = tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, [kernel, bias])
        gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        kernel.assign_sub(gradients[0] * 0.5)
        bias.assign_sub(gradients[1] * 0.5)
        hits = tf.equal(tf.argmax(logits, 1), tf.argmax(y, 1))
        return loss, tf.reduce_sum(tf.cast(hits, tf.float32))

    @tf.function
    def train(batch):
        loss, hits = strategy.run(step, args=batch)
        return (
            strategy.reduce("SUM", loss, axis=None),
            strategy.reduce("SUM", hits, axis=None),
        )

    results = []
    for _ in range(3):
        for batch in batches:
            loss, hits = train(batch)
            results.append([float(loss), float(hits)])
    return {"results": results, "kernel": kernel.numpy().tolist(), "bias": bias.numpy().tolist()}


if __name__ == "__main__":
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    print(json.dumps(main("/tmp")))
