"""A worker that adds a number up with the others, and prints the sum."""

import jax.numpy as jnp

import replicax as rx

if __name__ == "__main__":
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    print(float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(())), axis=None)))  # noqa: T201
