"""What several pages have in common, word for word."""

import numpy as np

import replicax as tf  # as a program that was moved would have it


def numbers(record_files):
    """The floats in the pages' files, one by one."""
    dataset = tf.data.TFRecordDataset(record_files)
    return dataset.map(lambda record: tf.io.decode_raw(record, np.float32)[0])


def dataset_fn(input_context):
    """Ones without end, in batches of 8 over all replicas."""
    batch_size = input_context.get_per_replica_batch_size(8)
    d = tf.data.Dataset.from_tensors([[1.0]]).repeat().batch(batch_size)
    return d.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)


def run_values_from_a_function(strategy):
    """Twice the number of replicas, from values that a function makes for each."""

    @tf.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    return run()
