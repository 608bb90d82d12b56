"""A program that is told to end while it does something long: told WHERE FOLDER [STEPS].

It says "now" when it is there, and "final" with what it has at its end. With STEPS it does nothing
long.
"""

import sys
import time

import jax.numpy as jnp
import numpy as np

import replicax as rx

PATIENCE = 120.0  # longer than a step takes on a busy machine


def say(word):
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main():
    where, folder, *steps = sys.argv[1:]
    train(where, folder, end=int(steps[0]) if steps else 1000, is_long=not steps)


def dataset_of(end, *, stops):
    def elements():
        for k in range(end):
            if stops and k == 5:
                time.sleep(600)
            yield np.asarray([k, k])

    spec = rx.TensorSpec((2,), "int64")
    return rx.data.Dataset.from_generator(elements, output_signature=spec)


def train(where, folder, *, end, is_long):
    if where == "input of workers":
        strategy = rx.distribute.MultiWorkerMirroredStrategy()
    else:
        strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = dataset_of(end, stops=is_long and where.startswith("input"))
    plain = where == "input in the program itself"
    iterator = iter(dataset if plain else strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        count, total = rx.Variable(0), rx.Variable(0)
        big = rx.Variable(jnp.zeros((64, 1 << (14 if where == "save" else 2))))

    @rx.function
    def step(k):
        count.assign_add(1)
        big.assign_add(jnp.ones_like(big.read_value()))
        x = jnp.eye(4) * 0.1
        for i in range(300 if where == "compile" and is_long else 1):
            x = jnp.sin(x @ x + i)
        total.assign_add(k)
        return x

    grace = 2.0 if where.startswith("input") else PATIENCE
    state = {"count": count, "total": total, "big": big, "data": iterator}
    with rx.train.Resumable(folder, every=3, grace=grace, **state) as run:
        while int(count) < end:
            # Workers agree on several batches at once, and so wait two before the one that is not.
            last = 3 if where == "input of workers" else 5
            if is_long and int(count) == last and where.startswith("input"):
                say("now")
            batch = next(iterator)
            if is_long and where == "compile":
                say("now")
            rows = batch if plain else strategy.experimental_local_results(batch)[0]
            step(jnp.asarray(rows[0], jnp.int32))
            if is_long and where == "save" and int(count) % 3 == 0:
                say("now")
            run.step()
    say(f"final {int(count)} {int(total)} {int(big.numpy().min())} {int(big.numpy().max())}")


if __name__ == "__main__":
    main()
