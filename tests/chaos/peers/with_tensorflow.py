import json
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf
from loop import train

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = tf.Variable(tf.ones((8,)))


def replica(x):
    context = tf.distribute.get_replica_context()
    gradient = context.all_reduce(tf.distribute.ReduceOp.MEAN, weights * x)
    weights.assign_sub(0.1 * gradient)


@tf.function
def step():
    strategy.run(replica, args=(tf.ones(()),))


train(step, json.loads(os.environ["TF_CONFIG"])["task"]["index"])
