import json
import os

import jax.numpy as jnp
from loop import train

import replicax as rx

strategy = rx.distribute.MultiWorkerMirroredStrategy()
with strategy.scope():
    weights = rx.Variable(jnp.ones((8,)))


def replica(x):
    gradient = rx.distribute.get_replica_context().all_reduce("mean", weights * x)
    weights.assign_sub(0.1 * gradient)


@rx.function
def step():
    strategy.run(replica, args=(jnp.ones(()),))


train(step, json.loads(os.environ["TF_CONFIG"])["task"]["index"])
