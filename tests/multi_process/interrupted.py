"""A worker that trains until Ctrl-C, and then says what its variables are: interrupted."""

import sys

import jax.numpy as jnp

import replicax as rx


def main():
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = [rx.Variable(jnp.zeros(1000)) for _ in range(5)]
        steps = rx.Variable(0)

    @rx.function
    def train_step():
        def replica():
            total = rx.distribute.get_replica_context().all_reduce("SUM", jnp.ones(1000))
            for w in weights:
                w.assign_add(total)
            steps.assign_add(1)

        strategy.run(replica)

    try:
        while True:
            train_step()
            if int(steps) == 20:
                sys.stdout.write("trains\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    finally:
        found = {float(x) for w in weights for x in (w.numpy().min(), w.numpy().max())}
        n = strategy.num_replicas_in_sync
        sys.stdout.write(f"whole {found == {float(n * int(steps))}} at {int(steps)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
