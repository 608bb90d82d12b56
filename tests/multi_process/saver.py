"""A program that saves without end, until it is killed: saver FOLDER [several].

Everything that it saves is one number; it says the number when it is saved.
"""

import sys

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401 - the first save would, which takes seconds

import replicax as rx


def main():
    if sys.argv[2:] == ["several"]:
        strategy = rx.distribute.MultiWorkerMirroredStrategy(variable_policy="sharded")
    else:
        strategy = rx.distribute.get_strategy()
    with strategy.scope():
        v = [rx.Variable(jnp.zeros(100_000)) for _ in range(4)]
        n = rx.Variable(0)
    checkpoint = rx.train.Checkpoint(v=v, n=n)
    manager = rx.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2)
    manager.restore_or_initialize()
    while True:
        n.assign_add(1)
        for x in v:
            x.assign(np.full(100_000, int(n), np.float32))
        manager.save()
        sys.stdout.write(f"saved {int(n)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
