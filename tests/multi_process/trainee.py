"""A program that trains, restartably: trainee FOLDER STEPS [several]; prints its final state.

With TRAINEE_PAUSE=S it waits S seconds after each step; with TRAINEE_EVERY=N it commits after N.
TRAINEE_FSYNC=S is a disk that takes S seconds for every fsync; TRAINEE_GRACE is `Resumable`'s.

Every step sums up to a ledger that knows each example; dropout-like noise comes from a key that is
part of the state, and the data are shuffled anew in each of several passes.
"""

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx


def slow_fsync(descriptor, fsync=os.fsync):
    time.sleep(float(os.environ.get("TRAINEE_FSYNC", "0")))
    fsync(descriptor)


def main():
    os.fsync = slow_fsync
    folder, steps = sys.argv[1], int(sys.argv[2])
    pause = float(os.environ.get("TRAINEE_PAUSE", "0"))
    if sys.argv[3:] == ["several"]:
        strategy = rx.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    rx.random.set_seed(1)
    dataset = rx.data.Dataset.range(37).shuffle(37).repeat().batch(6)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        w = rx.Variable(jnp.linspace(0.0, 1.0, 5))
        key = rx.Variable(jax.random.key(5))
        seen = rx.Variable(jnp.zeros(37, jnp.int32), aggregation=rx.VariableAggregation.SUM)
        step = rx.Variable(0)

    @rx.function
    def train_step(batch):
        mask = jax.random.bernoulli(key.read_value(), 0.5, (5,))
        key.assign(jax.random.split(key.read_value(), 1)[0])

        def replica(x):
            context = rx.distribute.get_replica_context()
            gradient = context.all_reduce("SUM", jnp.sin(x[:, None] * w).sum(0) * mask)
            w.assign_sub(0.01 * gradient)
            seen.assign_add(jnp.zeros(37, jnp.int32).at[x].add(1))

        strategy.run(replica, args=(batch,))
        step.assign_add(1)

    state = {"w": w, "key": key, "seen": seen, "step": step, "data": iterator}
    grace = float(os.environ.get("TRAINEE_GRACE", "60"))
    every = int(os.environ.get("TRAINEE_EVERY", "3"))
    with rx.train.Resumable(folder, every=every, grace=grace, **state) as run:
        while int(step) < steps:
            train_step(next(iterator))
            run.step()
            time.sleep(pause)
            if int(step) % 5 == 0:
                sys.stdout.write(f"at {int(step)}\n")
                sys.stdout.flush()
    iterator.close()
    bits = np.asarray(w.read_value()).view(np.uint32).tolist()
    sys.stdout.write("final " + json.dumps([bits, seen.numpy().tolist(), int(step)]) + "\n")


if __name__ == "__main__":
    main()
